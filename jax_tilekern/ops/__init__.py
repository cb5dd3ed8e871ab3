"""The operations: signatures, semantics and rules, one family per file."""
