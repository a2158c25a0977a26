"""The memory of a run, before it is launched: `rlhf_lightning.plan +experiment=...`."""

from functools import partial

from rlhf_lightning.app.start import start

main = partial(start, "plan")

if __name__ == "__main__":
    main()
