"""Memory before launch: what a configuration takes on each device, without weights or data."""
