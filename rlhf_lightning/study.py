"""`rlhf-study` is gone: it names what to write instead."""

from rlhf_lightning.app.config import errors

main = errors.refuse_study

if __name__ == "__main__":
    main()
