"""A policy against a baseline on held-out prompts: `python -m rlhf_lightning.evaluate`."""

from rlhf_lightning.app.evaluate import main

if __name__ == "__main__":
    main()
