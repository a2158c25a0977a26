"""Train the reward models, run PPO against them, and draw gold and proxy over KL.

    python -m benchmarks.studies.ensembles.run --out FOLDER [--artifacts DIR] [--seeds 1-8]
    python -m benchmarks.studies.ensembles.run --report --out FOLDER [--pictures docs/images]

Existing results are kept, and a run that was killed continues. `--minutes N` starts nothing new
after N.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.studies.ensembles.curves import report
from benchmarks.studies.ensembles.plan import (
    SEEDS,
    WORLD,
    Condition,
    conditions,
    ppo_overrides,
    reward_name,
    reward_overrides,
)
from benchmarks.studies.sick.continued import SAVING, fitted, study_settings
from benchmarks.studies.sick.run import seeds_of, train

REFERENCE_BATCHES = 8


def make_models(root: Path, until: float) -> bool:
    """Train what is missing; return False if time ran out first."""
    world = root / WORLD
    for member in SEEDS:
        folder, overrides = world / reward_name(member), reward_overrides(member, root)
        if (folder / "config.json").is_file():
            continue
        if time.monotonic() > until:
            return False
        train(overrides, root)
    return True


def run_one(condition: Condition, seed: int, root: Path, runs: Path) -> dict[str, Any]:
    """Train one run in this process; return its curve and the scores of SFT."""
    from rlhf_lightning.runs.folder import RunFolder, read_metrics

    settings = study_settings([*ppo_overrides(condition, seed, root), *SAVING])
    path = runs / f"{condition.name}_{seed}"
    parts, seconds = fitted(settings, path)
    rows = read_metrics(RunFolder(path).metrics)
    names = {
        "kl": "rollout/kl_per_response",
        "proxy": "rollout/score",
        "gold": "doctor/second_score",
        "length": "rollout/response_length",
        "distinct_2": "rollout/distinct_2",
    }
    return {
        "condition": condition.name,
        "seed": seed,
        "cpu_seconds": round(seconds, 1),
        "sft": sft_scores(parts),
        "curve": [{key: row[name] for key, name in names.items()} for row in rows],
    }


def sft_scores(parts: Any) -> dict[str, float]:
    """Return mean and standard deviation of the SFT policy's proxy and gold, on training prompts.

    They are the origin and the unit of both axes.
    """
    from rlhf_lightning.data.demo.gold import gold_scores
    from rlhf_lightning.evaluation.generate import Sampling, sample_batches
    from rlhf_lightning.rollout.noise import RowNoise

    decoding = parts.settings.evaluation.decoding
    sampling = Sampling(parts.module.generator, parts.module.tokenizer, **decoding)
    batches = list(itertools.islice(parts.data.train_dataloader(), REFERENCE_BATCHES))
    found = sample_batches(
        parts.module.reference,
        batches,
        sampling,
        noise=RowNoise(1, "evaluation"),
        scorer=parts.module.scorer,
    )
    gold = gold_scores(found.prompts, found.completions, found.finished)
    return {
        "answers": len(gold),
        "proxy_mean": statistics.fmean(found.scores),
        "proxy_std": statistics.pstdev(found.scores),
        "gold_mean": statistics.fmean(gold),
        "gold_std": statistics.pstdev(gold),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--artifacts", type=Path, default=Path("artifacts"))
    parser.add_argument("--seeds", type=seeds_of, default=list(SEEDS))
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--report", action="store_true", help="only read what is there")
    parser.add_argument("--pictures", type=Path, help="folder that the pictures are written to")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + 60 * options.minutes
    root = options.artifacts.absolute()
    if not options.report and make_models(root, until):
        for seed in options.seeds:
            for condition in conditions(seed):
                path = options.out / f"{condition.name}_{seed}.json"
                if path.exists() or time.monotonic() > until:
                    continue
                result = run_one(condition, seed, root, options.out / "runs")
                unfinished = path.with_suffix(".part")
                unfinished.write_text(json.dumps(result))
                unfinished.rename(path)
                shutil.rmtree(options.out / "runs" / path.stem)
                print(f"{path.stem}: {result['cpu_seconds']} s", flush=True)  # noqa: T201
    results = [json.loads(path.read_text()) for path in sorted(options.out.glob("*_*.json"))]
    print(report(results, options.pictures))  # noqa: T201


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
