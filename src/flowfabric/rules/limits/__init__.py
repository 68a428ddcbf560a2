"""Limits: budgets that are spent, and quota policies that bound rate and concurrency."""
