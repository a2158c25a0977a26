"""The run folder, its summary, artifacts and resume."""
