"""``attention``: softmax of any function of a product of queries and keys, times values."""
