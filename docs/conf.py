"""Sphinx configuration; `make docs` builds and treats every warning as an error."""

project = "rlhf_lightning"
author = "the rlhf_lightning contributors"
copyright = "2026, the rlhf_lightning contributors"

extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = "rlhf_lightning"
