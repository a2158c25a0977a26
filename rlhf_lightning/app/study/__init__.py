"""A matrix of runs and one page of what was measured on them."""
