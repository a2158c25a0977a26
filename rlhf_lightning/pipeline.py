"""All stages in a row, each judged by its gates: `python -m rlhf_lightning.pipeline`."""

from functools import partial

from rlhf_lightning.app.start import start

main = partial(start, "pipeline", "pipeline")

if __name__ == "__main__":
    main()
