"""The labelling page and its store."""
