"""What a run takes in memory, before it is launched: `rlhf_lightning.plan +experiment=...`."""

from rlhf_lightning.app.plan import main

if __name__ == "__main__":
    main()
