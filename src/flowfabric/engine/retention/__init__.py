"""Purging of ended executions and flows."""
