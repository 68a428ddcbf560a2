"""The operations of the engine, in groups; `Engine` combines them."""
