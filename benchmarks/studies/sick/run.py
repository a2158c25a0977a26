"""Run sick and healthy runs and report which detectors fired, and when.

    python -m benchmarks.studies.sick.run --disease kl_off healthy --seeds 0-9 --out FOLDER
    python -m benchmarks.studies.sick.run --report --out FOLDER
    python -m benchmarks.studies.sick.run --replay --out FOLDER   the same with changed thresholds

Results in FOLDER are kept, several calls may fill it, and a run that was killed continues. A sick
run ends when all its detectors have fired. The models of the built-in world are looked for in
`--artifacts` and trained there once where they are missing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.studies.sick.continued import SAVING, fitted, study_settings
from benchmarks.studies.sick.diseases import BASE, DISEASES

# Fewer pairs than the world's own reward stage, so that they are there in minutes.
REWARD_OVERRIDES = (
    "+experiment=reward",
    "seed=1",
    "logger=none",
    "gates=none",
    "trainer.validations=1",
    "+dataset.source.num_preferences=8000",
    "+dataset.source.num_validation_preferences=600",
)
NOISY = "reward_noisy"
NOISY_OVERRIDES = (
    "+experiment=reward",
    "seed=1",
    "logger=none",
    "+dataset.source.num_preferences=3000",
    "+dataset.source.num_validation_preferences=400",
    # The labels are coin flips: what the annotators see counts next to nothing.
    "+dataset.source.panel=[{_target_: rlhf_lightning.SimulatedAnnotator, "
    "name: coin, temperature: 1000.0, length_bias: 0.0}]",
    "gates=none",
)


def train(overrides: Sequence[str], root: Path) -> None:
    """Train one artefact below `root` in a process of its own; a killed one is continued."""
    command = [sys.executable, "-m", "rlhf_lightning.train", *overrides, "resume=auto"]
    command += ["callbacks.checkpoint.every_n_iterations=200", f"paths.artifacts={root}"]
    subprocess.run([*command, f"paths.outputs={root / 'runs'}"], check=True)


def make_artifacts(root: Path) -> None:
    """Train what is missing: base, SFT and reward model of world 1, and a noisy reward model."""
    world = root / "demo_seed1"
    commands = []
    if not (world / "reward" / "config.json").is_file():
        commands.append(REWARD_OVERRIDES)
    if not (world / NOISY / "config.json").is_file():
        commands.append((*NOISY_OVERRIDES, f"artifacts.publish={world / NOISY}"))
    for overrides in commands:
        train(overrides, root)


def run_one(
    disease: str, seed: int, artifacts: Path, runs: Path | None = None, *, whole: bool = False
) -> dict[str, Any]:
    """Train one run in this process; return its alerts and what was measured.

    Args:
        disease: a key of `DISEASES`.
        seed: of prompts and sampling.
        artifacts: folder of the models.
        runs: where a run that is killed goes on later; None for a temporary place.
        whole: do not end when all its detectors have fired.
    """
    from rlhf_lightning.runs.doctor_log import alerts_of, read_events
    from rlhf_lightning.runs.folder import RunFolder, read_metrics

    plan, world = DISEASES[disease], artifacts / "demo_seed1"
    reward = world / (NOISY if plan.noisy_labels else "reward")
    places = (
        f"artifacts.sft={world / 'sft'}",
        f"artifacts.reward={reward}",
        f"seed={seed}",
        f"data.num_iterations={plan.iterations}",
    )
    settings = study_settings([*BASE, *places, *plan.overrides, *SAVING])
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) if runs is None else runs / f"{disease}_{seed:02d}"
        _, seconds = fitted(settings, path, () if whole else plan.detectors)
        folder = RunFolder(path)
        rows = read_metrics(folder.metrics)
        alerts = alerts_of(read_events(folder.doctor))
    if runs is not None:
        shutil.rmtree(path)
    return {
        "disease": disease,
        "seed": seed,
        "cpu_seconds": round(seconds, 1),
        "alerts": alerts,
        "rows": rows,
    }


def seeds_of(text: str) -> list[int]:
    """Return the seeds that `0-9,12` names."""
    found: list[int] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        found += range(int(low), int(high or low) + 1)
    return found


def fired(result: dict[str, Any]) -> dict[str, int]:
    """Return the iteration at which each detector was first raised."""
    first: dict[str, int] = {}
    for alert in result["alerts"]:
        first.setdefault(alert["detector"], alert["raised_at"])
    return first


def judged_again(result: dict[str, Any]) -> dict[str, Any]:
    """Return a recorded run with the alerts that the detectors as they are now would raise."""
    from benchmarks.studies.sick.replay import replay
    from rlhf_lightning.doctor.thresholds import DoctorThresholds

    length = DISEASES[result["disease"]].iterations
    raised = [
        {"detector": change.detector, "raised_at": iteration}
        for iteration, change in replay(result["rows"], DoctorThresholds(), length)
        if change.after > change.before
    ]
    return {**result, "alerts": raised}


def read_results(out: Path) -> list[dict[str, Any]]:
    """Return all results of a folder."""
    return [json.loads(path.read_text()) for path in sorted(out.glob("*_*.json"))]


def report(results: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table: the detected runs of each disease, and the iteration.

    A healthy run is one row for each detector that fired on any, or one row saying that none did.
    """
    lines = ["| disease | detector | seeds | noticed | in time | iteration, median (latest) |"]
    lines.append("|---|---|---|---|---|---|")
    for name, plan in DISEASES.items():
        mine = [r for r in results if r["disease"] == name]
        if not mine:
            continue
        seeds = told_seeds([r["seed"] for r in mine])
        for detector in plan.detectors or sorted({d for r in mine for d in fired(r)}):
            when = sorted(fired(r)[detector] for r in mine if detector in fired(r))
            timely = sum(iteration <= plan.within for iteration in when)
            told = f"{when[len(when) // 2]} ({when[-1]})" if when else "-"
            limit = f"{timely} by {plan.within}" if plan.detectors else "false alarm"
            lines.append(
                f"| {name} | {detector} | {seeds} | {len(when)} of {len(mine)} | {limit} | {told} |"
            )
        if not plan.detectors:
            ill = sum(bool(fired(r)) for r in mine)
            lines.append(f"| {name} | any | {seeds} | {ill} of {len(mine)} | | |")
    return "\n".join(lines)


def margins(results: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table: healthy runs' values nearest to each warning, over all seeds."""
    from benchmarks.studies.sick.replay import nearest
    from rlhf_lightning.doctor.catalog import DETECTORS
    from rlhf_lightning.doctor.spec import WARN
    from rlhf_lightning.doctor.thresholds import DoctorThresholds

    limits, healthy = DoctorThresholds(), [r for r in results if r["disease"] == "healthy"]
    kept = [nearest(r["rows"], limits, DISEASES["healthy"].iterations) for r in healthy]
    lines = [
        "| detector | warns | farthest of each run: median | and of all |",
        "|---|---|---|---|",
    ]
    for name, spec in DETECTORS.items():
        values = sorted(k[name] for k in kept if name in k)
        if not values:
            continue
        worst = values[-1] if spec.beyond == "above" else values[0]
        bound = f"{spec.beyond} {spec.bound(limits, WARN):g}"
        lines.append(f"| {name} | {bound} | {values[len(values) // 2]:.3g} | {worst:.3g} |")
    return "\n".join(lines)


def told_seeds(seeds: Sequence[int]) -> str:
    """Return seeds as `0-4, 7`."""
    parts: list[list[int]] = []
    for seed in sorted(seeds):
        if parts and parts[-1][1] == seed - 1:
            parts[-1][1] = seed
        else:
            parts.append([seed, seed])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


def make_result(disease: str, seed: int, options: argparse.Namespace) -> None:
    """Make the result of one run unless it exists; wait for another call that makes it."""
    from rlhf_lightning.runs.lock import artifact_lock

    path, runs = options.out / f"{disease}_{seed:02d}.json", options.out / "runs"
    with artifact_lock(runs / path.stem):
        if path.exists():
            return
        artifacts = options.artifacts.absolute()
        result = run_one(disease, seed, artifacts, runs, whole=options.whole)
        unfinished = path.with_suffix(".part")
        unfinished.write_text(json.dumps(result))
        unfinished.rename(path)
    told = f"{disease} seed {seed}: {fired(result)}, {result['cpu_seconds']} s"
    print(f"{told}, {len(result['rows'])} iterations", flush=True)  # noqa: T201


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--disease", nargs="*", choices=list(DISEASES), default=list(DISEASES))
    parser.add_argument("--seeds", type=seeds_of, help="0-9,12; of a report all that are there")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--artifacts", type=Path, default=Path("artifacts"))
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start nothing later")
    parser.add_argument("--whole", action="store_true", help="go on when all is noticed")
    parser.add_argument("--report", action="store_true", help="only read what is there")
    parser.add_argument(
        "--replay",
        action="store_true",
        help="judge the recorded metrics by the detectors as they are",
    )
    parser.add_argument(
        "--margins", action="store_true", help="how near healthy runs came to each warning"
    )
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + 60 * options.minutes
    if not (options.report or options.replay):
        make_artifacts(options.artifacts.absolute())
        for seed in options.seeds or [0]:
            for disease in options.disease:
                if time.monotonic() < until:
                    make_result(disease, seed, options)
    results = read_results(options.out)
    if options.replay:
        results = [judged_again(r) for r in results]
    if options.seeds is not None:
        results = [r for r in results if r["seed"] in options.seeds]
    print(report(results))  # noqa: T201
    if options.margins:
        print(margins(results))  # noqa: T201


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
