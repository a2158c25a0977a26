"""Objectives whose samples are 0, 1 and 4 iterations old.

    python -m benchmarks.studies.staleness --jobs 2
    python -m benchmarks.studies.staleness --tuning

The generator of `tests/own/stale.py` lags. `--tuning` tries learning rates with fresh samples on
seed 11; the highest gold win rate was taken.
"""

from __future__ import annotations

import sys

from benchmarks.studies.run import Row, Study, main

FLASH = [  # as FlashREINFORCE: no value model, mean of the batch, tokens outside a band left out
    "module.grpo.surrogate=masked_ratio",
    "module.grpo.ratio_base=sampler",
    "module.grpo.cliprange=0.8",
    "module.grpo.cliprange_high=3.0",
]
ROWS = {
    "sao": ["+experiment=sao", "module.ppo.rollout_lag=0"],
    "ppo": ["+experiment=ppo"],
    "grpo": ["+experiment=grpo"],
    "reinforce_pp": ["+experiment=reinforce_pp"],
    "flash": ["+experiment=reinforce_pp", *FLASH],
}
RATES = {"sao": ["module.ppo.learning_rate=8e-4"], "ppo": ["module.ppo.learning_rate=8e-4"]}
LAGS = {"+rollout.lag": [0, 1, 4]}
STUDY = Study(
    "staleness",
    {name: Row([*words, *RATES.get(name, ())], vary=LAGS) for name, words in ROWS.items()},
    seeds=(1, 2, 3),
    shared={
        "train": [
            "logger=none",
            "rollout=cached",
            "rollout._target_=tests.own.stale.StaleGenerator",
        ]
    },
)


def _tuning(name: str, words: list[str]) -> Row:
    group = "ppo" if name in RATES else "grpo"
    return Row(words, vary={f"module.{group}.learning_rate": [2e-4, 4e-4, 8e-4]})


TUNING = Study(
    "staleness_tuning",
    {name: _tuning(name, words) for name, words in ROWS.items()},
    seeds=(11,),
    shared={"train": ["logger=none"]},
)

if __name__ == "__main__":
    tuning = "--tuning" in sys.argv
    main(TUNING if tuning else STUDY, [word for word in sys.argv[1:] if word != "--tuning"])
