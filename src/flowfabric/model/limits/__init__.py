"""Limits: the records of budgets and quota policies."""
