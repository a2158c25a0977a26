"""The memory of a run, before it is launched: `rlhf_lightning.plan +experiment=...`."""

from rlhf_lightning.app.plan import main

if __name__ == "__main__":
    main()
