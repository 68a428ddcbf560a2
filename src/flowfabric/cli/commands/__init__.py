"""The commands of `ff`, one module for those that belong together."""
