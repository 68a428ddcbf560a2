"""Answers: what operations return. Refusals are errors, not answers."""
