"""``patch`` makes JAX's own products trace to the library's."""
