"""The operations: signatures, semantics and rules, one family a file."""
