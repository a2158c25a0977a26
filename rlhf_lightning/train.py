"""Train one stage of RLHF: `python -m rlhf_lightning.train +experiment=sft | reward | ppo`."""

from functools import partial

from rlhf_lightning.app.start import start

main = partial(start, "train")

if __name__ == "__main__":
    main()
