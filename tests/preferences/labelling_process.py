"""A rater's process, for tests that run several and kill them: labels, and says what was kept.

python labelling_process.py STORE NAME [COUNT]
"""

from __future__ import annotations

import sys

from rlhf_lightning.preferences.annotation.assignment import Sharing
from rlhf_lightning.preferences.annotation.store import LabelStore


def main() -> None:
    path, name = sys.argv[1:3]
    most = int(sys.argv[3]) if len(sys.argv) > 3 else sys.maxsize
    sharing = Sharing(gold_share=0.0)
    with LabelStore(path) as store:
        rater = store.enter(name)[0]
        for _ in range(most):
            task = store.next_task(rater, sharing)
            if task is None:
                break
            if store.label(rater, task.assignment_id, "left", sharing) == "kept":
                sys.stdout.write(f"{task.pair.pair_id}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
