"""Passes over memory before and after a product."""
