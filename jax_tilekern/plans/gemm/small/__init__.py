"""Plans for products of small matrices and of odd sizes."""
