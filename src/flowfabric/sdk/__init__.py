"""The SDK for applications: tasks, runs, flows, limits and workers on top of the engine's operations."""
