"""The preference lab: candidates, annotators, budget, agreement and the labelling page."""
