"""Talk to a policy, or to two side by side: `python -m rlhf_lightning.chat RUN [RUN]`."""

from functools import partial

from rlhf_lightning.app.start import start

main = partial(start, "chat")

if __name__ == "__main__":
    main()
