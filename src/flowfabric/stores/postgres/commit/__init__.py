"""Commit on Postgres: plans a batch of changes, composes its statement and encodes its parameters."""
