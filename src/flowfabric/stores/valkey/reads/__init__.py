"""Reads of the Valkey store: loads, due rows, scans, searches and counts."""
