"""Factorisations and solves."""
