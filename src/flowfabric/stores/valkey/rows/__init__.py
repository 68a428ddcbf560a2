"""Rows of the Valkey store: key texts, blobs, and changes as arguments of functions."""
