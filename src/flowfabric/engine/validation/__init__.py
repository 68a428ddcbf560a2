"""Validation of the arguments of operations."""
