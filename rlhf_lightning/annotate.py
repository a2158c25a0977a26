"""The page where people label pairs: `python -m rlhf_lightning.annotate file=PAIRS`."""

from rlhf_lightning.app.annotate import main

if __name__ == "__main__":
    main()
