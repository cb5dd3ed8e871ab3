"""``patch``: JAX's own products, traced to the library's."""
