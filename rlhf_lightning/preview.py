"""What is read of a file before anything is trained: `rlhf-data FILE model=FOLDER`."""

from functools import partial

from rlhf_lightning.app.start import start

main = partial(start, "preview")

if __name__ == "__main__":
    main()
