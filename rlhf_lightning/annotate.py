"""The page where people label pairs: `python -m rlhf_lightning.annotate file=PAIRS`."""

from functools import partial

from rlhf_lightning.app.start import start

main = partial(start, "annotate")

if __name__ == "__main__":
    main()
