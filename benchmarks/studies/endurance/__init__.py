"""PPO runs of hundreds of iterations with faults of the process and of its reward service."""
