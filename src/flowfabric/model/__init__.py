"""What exists: records and closed vocabularies. No I/O, no decisions."""
