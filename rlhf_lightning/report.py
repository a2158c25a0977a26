"""Write a run's report.html again; of several runs also one page that compares them."""

from functools import partial

from rlhf_lightning.app.start import start

main = partial(start, "report")

if __name__ == "__main__":
    main()
