"""Comparing a policy with a baseline."""
