"""Joins, fan-out and cancellation of the executions of a flow."""
