"""Durable functions: memoized steps, gates that a function waits for, mailboxes, approval schemas."""
