"""Scorers: the protocol and one file a kind."""
