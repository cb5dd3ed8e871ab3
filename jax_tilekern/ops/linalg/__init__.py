"""Linear algebra: batches of small matrices, and large ones in blocks."""
