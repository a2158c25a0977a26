"""A rater's process, for tests that run several and kill them: labels, and says what was kept.

python labelling_process.py STORE NAME
"""

from __future__ import annotations

import sys

from rlhf_lightning.preferences.annotation.store import LabelStore


def main() -> None:
    path, name = sys.argv[1:]
    with LabelStore(path) as store:
        while (task := store.next_task(name)) is not None:
            if store.label(name, task.pair.pair_id, task.shown_first):
                sys.stdout.write(f"{task.pair.pair_id}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
