"""A policy against a baseline on held-out prompts: `python -m rlhf_lightning.evaluate`."""

from functools import partial

from rlhf_lightning.app.start import start

main = partial(start, "evaluate")

if __name__ == "__main__":
    main()
