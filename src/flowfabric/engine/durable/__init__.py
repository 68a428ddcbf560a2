"""The components behind durable functions."""
