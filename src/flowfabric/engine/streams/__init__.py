"""Output streams and event subscriptions."""
