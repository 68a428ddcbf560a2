"""Keys that name runs, and the runs that have them."""
