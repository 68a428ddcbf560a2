"""Limits: loads budgets and quota policies, and blocks and unblocks executions on them."""
