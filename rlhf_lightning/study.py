"""A matrix of runs and one page of what they show: `python -m rlhf_lightning.study NAME`."""

from rlhf_lightning.app.study.run import main

if __name__ == "__main__":
    main()
