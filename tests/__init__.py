"""The proof: rules, stores, engine and edges at work."""
