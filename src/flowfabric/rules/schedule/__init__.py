"""Rules of schedules."""
