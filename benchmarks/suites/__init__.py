"""Suites: lists of calls of an operation, a TOML file each."""
