"""What watches a run: metrics, samples, checkpoints, the console."""
