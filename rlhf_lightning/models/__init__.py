"""Models: factories, heads and every full-sequence call."""
