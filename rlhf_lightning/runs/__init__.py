"""The run folder, its summary, artefacts and resume."""
