"""Preference pairs in the formats of other tools."""
