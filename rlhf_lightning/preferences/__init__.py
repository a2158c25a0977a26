"""From prompts to labelled pairs: candidates, annotators, budget, agreement, the labelling page."""
