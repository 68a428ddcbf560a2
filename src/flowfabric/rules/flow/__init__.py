"""Flows: executions that form a graph, and the joins that decide when each member may run."""
