"""Faster paths of models on a CPU."""
