"""Claiming: how workers get ready executions, directly or by grants."""
