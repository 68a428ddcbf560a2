"""Many processes, killed ones, and a server that goes away."""
