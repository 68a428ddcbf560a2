"""Stores: they keep rows, guards, queues and the event feed, and decide no behaviour."""
