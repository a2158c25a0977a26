"""Ranks, sharding, checkpoints of sharded models and launching: the only code that knows ranks."""
