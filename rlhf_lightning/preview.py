"""A look at the records of a file before training: `rlhf-data FILE model=FOLDER`."""

from functools import partial

from rlhf_lightning.app.start import start

main = partial(start, "preview")

if __name__ == "__main__":
    main()
