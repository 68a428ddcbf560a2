"""Scheduling: the records of lanes and of the worker registry."""
