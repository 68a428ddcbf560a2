"""Model: records, closed vocabularies and changes. No I/O, no decisions."""
