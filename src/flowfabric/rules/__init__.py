"""Rules: pure functions that decide every behaviour from loaded rows and a request."""
