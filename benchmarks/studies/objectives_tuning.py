"""Learning rates of the objectives of `objectives`, on a seed that is not reported there.

    python -m benchmarks.studies.objectives_tuning

Three trials each (half, the same and twice PPO's rate; DPO has its own) at the middle strength of
the KL. The highest gold win rate is taken.
"""

from __future__ import annotations

from benchmarks.studies.run import Row, Study, main

RATES = [2e-4, 4e-4, 8e-4]
GROUPS = ("grpo", "rloo", "dr_grpo", "reinforce_pp", "gspo", "cispo")
STUDY = Study(
    "objectives_tuning",
    {
        "ppo": Row(["+experiment=ppo"], vary={"module.ppo.learning_rate": RATES}),
        "dpo": Row(
            ["+experiment=dpo", "module.dpo.beta=0.5"],
            vary={"module.dpo.learning_rate": [1e-4, 2e-4, 4e-4]},
        ),
        **{
            name: Row([f"+experiment={name}"], vary={"module.grpo.learning_rate": RATES})
            for name in GROUPS
        },
    },
    seeds=(101,),
    shared={"train": ["logger=none"]},
)

if __name__ == "__main__":
    main(STUDY)
