"""The operations of the engine, in groups, which `Engine` combines. A new operation is added to one of them."""
