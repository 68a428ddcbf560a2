"""Suspension: an execution releases its lease and waits on waitpoints until signals satisfy its condition."""
