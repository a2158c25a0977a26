"""Export a run's model as a Hugging Face folder: `python -m rlhf_lightning.export RUN`."""

from rlhf_lightning.app.export import main

if __name__ == "__main__":
    main()
