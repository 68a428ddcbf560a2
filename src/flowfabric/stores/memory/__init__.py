"""The memory store: rows in dictionaries, for tests and for trying things out."""
