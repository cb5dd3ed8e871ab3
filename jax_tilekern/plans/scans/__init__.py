"""Plans of scans: the combinations of the elements of a sequence up to each of them."""
