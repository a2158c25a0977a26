"""How far a reward model can be followed, by its size and its pairs (Gao et al. 2022).

    python -m benchmarks.studies.overoptimization --jobs 2     # about 3.5 hours of processor time

PPO with and without a KL penalty, and the best of up to 1,000, against reward models of five sizes
and three amounts of data. The gold reward, which no training sees, is measured on the way. Reward
models start from decoders of their own size, which have read the same texts; few pairs are read
more often.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from statistics import fmean
from typing import TYPE_CHECKING

from benchmarks.studies.law import Law, Point, Way, fit_law, left_out
from benchmarks.studies.run import Row, Study, interval, main

if TYPE_CHECKING:
    from benchmarks.studies.run import Result, Results

# name -> hidden size, layers, heads, width of the MLP, weights without embeddings and head
SIZES = {
    "tiny": (16, 1, 2, 48, 3_376),
    "small": (32, 1, 2, 96, 13_408),
    "medium": (64, 2, 4, 168, 97_600),
    "large": (128, 3, 4, 336, 584_576),
    "largest": (160, 4, 4, 420, 1_217_440),
}
PAIRS = {"few": (500, 4), "some": (2000, 2), "many": (8000, 1)}  # number, epochs
NEAR = 0.15  # of a predicted peak


def _base(hidden: int, layers: int, heads: int, width: int, _: int) -> Row:
    return Row(
        [
            "+experiment=base",
            f"model.from_scratch.hidden_size={hidden}",
            f"model.from_scratch.num_hidden_layers={layers}",
            f"model.from_scratch.num_attention_heads={heads}",
            f"model.from_scratch.intermediate_size={width}",
            "+dataset.source.num_texts=10000",
        ]
    )


def _reward(size: str, pairs: int, epochs: int) -> Row:
    words = [
        "+experiment=reward",
        "trainer.validations=1",
        f"data.num_epochs={epochs}",
        f"+dataset.source.num_preferences={pairs}",
        "+dataset.source.num_validation_preferences=600",
    ]
    return Row(words, starts_from={"sft": f"base_{size}"})


def _against(size: str, amount: str, *words: str, command: str = "train") -> Row:
    starts = {"sft": "sft", "reward": f"reward_{size}_{amount}"}
    return Row(words, command, starts_from=starts)


PPO = ("+experiment=ppo", "+preset=overoptimization")
STUDY = Study(
    "overoptimization",
    {
        **{f"base_{size}": _base(*shape) for size, shape in SIZES.items()},
        "sft": Row(["+experiment=sft"]),
        **{f"reward_{s}_{a}": _reward(s, *PAIRS[a]) for s in SIZES for a in PAIRS},
        **{f"ppo_{s}_{a}": _against(s, a, *PPO) for s in SIZES for a in PAIRS},
        **{f"best_of_{s}": _against(s, "many", command="evaluate") for s in SIZES},
        **{f"brake_{s}": _against(s, "many", *PPO, "module.ppo.kl_coef=0.1") for s in SIZES},
    },
    seeds=(2, 3, 4),  # the learning rate was chosen on seed 1
    measure=(
        "val/accuracy",
        "val/gold",
        "val/score",
        "val/kl_per_response",
        "val/response_length",
    ),
    shared={
        "train": ["logger=none", "gates=none"],
        "evaluate": [
            "gates=none",
            "safety=none",
            "policy=${artifacts.sft}",
            "evaluation.num_prompts=32",
            "best_of.n=[1,2,3,5,8,13,21,34,55,89,144,233,377,610,1000]",
            "best_of.pool=1000",
        ],
    },
    also=lambda results: laws_table(results),
)


def points_of(results: list[Result]) -> list[Point]:
    """Return gold gained by sqrt(KL), of the rows of metrics.csv or of each n.

    A first measurement at KL 0 is of the SFT policy with the noise of all others: their origin.
    """
    if results[0].is_bound:
        rows: list[Mapping[str, float]] = [one.metrics for one in results]
    else:
        with (results[0].folder / "metrics.csv").open(newline="") as file:
            rows = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
    found: list[Point] = []
    origin = None
    for row in rows:
        kl, gold = row.get("val/kl_per_response"), row.get("val/gold")
        start = row.get("val/baseline_gold")
        if kl is None or gold is None or (start is None and origin is None):
            continue
        if kl == 0 and not found:
            origin = gold
        begin = origin if origin is not None else start
        assert begin is not None
        found.append(Point(math.sqrt(max(kl, 0.0)), gold - begin))
    return found


def laws_of(results: Results) -> dict[str, dict[int, Law]]:
    """Return the fit of each run of PPO and of the best of n, by row and seed."""
    of_run: dict[tuple[str, int], list[Result]] = {}
    for (row, _), seeds in results.items():
        for seed, one in seeds.items():
            of_run.setdefault((row, seed), []).append(one)
    laws: dict[str, dict[int, Law]] = {}
    for (row, seed), found in of_run.items():
        way: Way = "best_of_n" if found[0].is_bound else "rl"
        points = points_of(found) if row.startswith(("ppo", "best_of", "brake")) else []
        if sum(point.distance > 0 for point in points) >= 3:
            laws.setdefault(row, {})[seed] = fit_law(way, points)
    return laws


def laws_table(results: Results) -> str:
    """Return coefficients, peak and the peak that the other sizes predict, in Markdown."""
    laws = laws_of(results)
    lines = ["| row | seeds | a | b | least R2 | peak of gold | as the other sizes predict it |"]
    lines.append("|---|---|---|---|---|---|---|")
    for row, found in laws.items():
        peak = _mean(found).peak
        size = next(size for size in SIZES if size in row.split("_"))
        family = {
            SIZES[s][-1]: list(laws[name].values())
            for s in SIZES
            if (name := "_".join(s if part == size else part for part in row.split("_"))) in laws
        }
        predicted = left_out(family, SIZES[size][-1]).peak if len(family) > 3 else None
        cells = [row, str(len(found)), interval([law.a for law in found.values()])]
        cells += [interval([law.b for law in found.values()])]
        cells += [f"{min(law.r2 for law in found.values()):.2f}", _shown(peak), _shown(predicted)]
        if peak is not None and predicted is not None:
            cells[-1] += f" ({'near' if abs(predicted.gain / peak.gain - 1) <= NEAR else 'off'})"
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) if laws else ""


def _mean(found: Mapping[int, Law]) -> Law:
    first = next(iter(found.values()))
    return Law(first.way, fmean(x.a for x in found.values()), fmean(x.b for x in found.values()))


def _shown(peak: Point | None) -> str:
    return "none" if peak is None else f"{peak.gain:.2f} at {peak.distance:.2f}"


if __name__ == "__main__":
    main(STUDY)
