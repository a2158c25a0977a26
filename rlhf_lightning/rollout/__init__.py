"""Rollouts: generation, scoring, and their assembly into a RolloutBatch."""
