"""Collect preference records of prompts, within a budget: `python -m rlhf_lightning.collect`."""

from functools import partial

from rlhf_lightning.app.start import start

main = partial(start, "collect")

if __name__ == "__main__":
    main()
