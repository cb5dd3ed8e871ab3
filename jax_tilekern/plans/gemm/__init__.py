"""Matrix products: the problem, the choice of a kernel, and what each architecture offers."""
