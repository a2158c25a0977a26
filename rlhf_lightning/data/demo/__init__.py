"""The built-in world: prompts, texts, demonstrations, preferences and a gold reward from a seed."""
