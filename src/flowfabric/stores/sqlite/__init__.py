"""Rows in one file, shared by the processes of one machine."""

from flowfabric.stores.sqlite.store import SQLiteStore

__all__ = ["SQLiteStore"]
