"""Schedules: the scheduler that fires them, and the operations on them."""
