"""Rows in PostgreSQL 13 or newer, through asyncpg."""

from flowfabric.stores.postgres.store import PostgresStore

__all__ = ["PostgresStore"]
