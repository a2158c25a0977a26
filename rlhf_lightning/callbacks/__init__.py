"""Callbacks that record a run: metrics, samples, checkpoints, the console."""
