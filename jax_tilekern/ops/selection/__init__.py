"""The largest elements of rows, and their order."""
