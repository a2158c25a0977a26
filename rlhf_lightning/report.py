"""Write a run's report.html again; of several runs also one page that compares them."""

from rlhf_lightning.app.report import main

if __name__ == "__main__":
    main()
