"""Train one stage of RLHF: `python -m rlhf_lightning.train +experiment=sft | reward | ppo`."""

from rlhf_lightning.app.train import main

if __name__ == "__main__":
    main()
