"""Seeded faults: each is a small mistake in the source that a test has to detect."""
