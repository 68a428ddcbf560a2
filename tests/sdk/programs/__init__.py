"""Random durable functions, a model of what must happen, and the faults they are run with."""
