"""Decide, commit, load and wake up: what every operation of the engine uses."""
