"""The engine: loads rows, calls the rule, commits the change and returns the answer."""
