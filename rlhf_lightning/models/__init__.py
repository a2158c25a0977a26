"""Models: factories, heads, tokenizers and every full-sequence call."""
