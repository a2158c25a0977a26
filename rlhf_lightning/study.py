"""`rlhf-study` was withdrawn: it names what to write instead."""

from rlhf_lightning.app.config.withdrawn import refuse_study as main

if __name__ == "__main__":
    main()
