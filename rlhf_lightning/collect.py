"""Collect preference records of prompts, within a budget: `python -m rlhf_lightning.collect`."""

from rlhf_lightning.app.collect import main

if __name__ == "__main__":
    main()
