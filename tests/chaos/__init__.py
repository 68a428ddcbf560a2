"""Tests with many processes, killed processes, and a server that goes down."""
