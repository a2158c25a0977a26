"""Export a run's model as a Hugging Face folder: `python -m rlhf_lightning.export RUN`."""

from functools import partial

from rlhf_lightning.app.start import start

main = partial(start, "export")

if __name__ == "__main__":
    main()
