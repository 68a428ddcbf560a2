"""The worker: claims executions, runs their handlers, renews their leases and reports their outcomes."""
