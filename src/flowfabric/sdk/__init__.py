"""What application developers meet: tasks, runs, workers."""
