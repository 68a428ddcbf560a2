"""Random sequences of operations, run on several stores at once and compared with a naive model."""
