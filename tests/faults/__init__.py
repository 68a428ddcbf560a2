"""Faults put in on purpose, to see that a test notices each of them."""
