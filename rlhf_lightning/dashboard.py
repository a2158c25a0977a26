"""The dashboard of a project in Weights & Biases: `python -m rlhf_lightning.dashboard`."""

from rlhf_lightning.app.dashboard import main

if __name__ == "__main__":
    main()
