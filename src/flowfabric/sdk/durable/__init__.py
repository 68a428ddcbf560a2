"""The durable operations of a handler's context: steps, waits, children, output and budgets, replayed by attempts."""
