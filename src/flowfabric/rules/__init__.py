"""What may happen: pure functions over what was loaded and what is asked. No clock, no chance, no I/O."""
