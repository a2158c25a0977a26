"""The dashboard of a project in Weights & Biases: `python -m rlhf_lightning.dashboard`."""

from functools import partial

from rlhf_lightning.app.start import start

main = partial(start, "dashboard")

if __name__ == "__main__":
    main()
