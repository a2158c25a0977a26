"""Generators: the protocol and its engines."""
