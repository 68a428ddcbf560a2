"""Scheduling: ready queues, fairness, capabilities, the worker registry, and why an execution does not run."""
