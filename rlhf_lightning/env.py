"""Facts for a bug report: versions, devices, ranks, commit."""

from functools import partial

from rlhf_lightning.app.start import start

main = partial(start, "env")

if __name__ == "__main__":
    main()
