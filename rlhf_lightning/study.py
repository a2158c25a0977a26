"""`rlhf-study` was withdrawn: it names what to write instead."""

from rlhf_lightning.app.config import withdrawn

main = withdrawn.refuse_study

if __name__ == "__main__":
    main()
