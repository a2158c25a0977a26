"""The page where people label: one pair at a time, in a browser. Needs the extra `annotate`."""
