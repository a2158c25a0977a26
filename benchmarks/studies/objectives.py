"""Objectives at three KL strengths each: gold against KL on the built-in world.

    python -m benchmarks.studies.objectives --jobs 2

Learning rates are the best of three trials each, on another seed (`objectives_tuning`). Best of n
trains nothing: it costs n responses each time it is used.
"""

from __future__ import annotations

from benchmarks.studies.run import Row, Study, main
from benchmarks.studies.trade_off import comparison

KL = [0.02, 0.05, 0.15]
GROUPS = {"grpo": None, "rloo": None, "dr_grpo": 8e-4, "reinforce_pp": None, "gspo": 8e-4,
          "cispo": 8e-4}  # fmt: skip


def _group(name: str, rate: float | None) -> Row:
    words = [
        f"+experiment={name}",
        *([] if rate is None else [f"module.grpo.learning_rate={rate}"]),
    ]
    return Row(words, vary={"module.grpo.kl_coef": KL})


STUDY = Study(
    "objectives",
    {
        "ppo": Row(
            ["+experiment=ppo", "module.ppo.learning_rate=8e-4"], vary={"module.ppo.kl_coef": KL}
        ),
        "dpo": Row(
            ["+experiment=dpo", "module.dpo.learning_rate=4e-4"],
            vary={"module.dpo.beta": [0.2, 0.5, 1.0]},
        ),
        "best_of_n": Row(
            ["policy=${artifacts.sft}", "best_of.n=[1,2,4,16]", "best_of.pool=16"], "evaluate"
        ),
        **{name: _group(name, rate) for name, rate in GROUPS.items()},
    },
    seeds=(1, 2, 3),
    shared={"train": ["logger=none"]},
    also=lambda results: comparison(results, (0.05, 0.1, 0.2)),
)

if __name__ == "__main__":
    main(STUDY)
