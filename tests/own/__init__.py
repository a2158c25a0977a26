"""A user's package: an objective and a scorer, each a class and a YAML file."""
