"""All stages in a row, each judged by its gates: `python -m rlhf_lightning.pipeline`."""

from rlhf_lightning.app.pipeline.run import main

if __name__ == "__main__":
    main()
