"""Runs of the built-in world with one planted disease each, and healthy ones."""
