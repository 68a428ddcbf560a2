"""Security: the records of API tokens and signing keys, and ids within a namespace."""
