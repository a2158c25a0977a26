"""A matrix of runs and one page of what they show: `python -m rlhf_lightning.study NAME`."""

from functools import partial

from rlhf_lightning.app.start import start

main = partial(start, "study", "study.study")

if __name__ == "__main__":
    main()
