"""What is measured: a row of a suite, the functions that compute it, and their errors."""
