"""One optimizer step of SFT and of the reward model, against TRL 1.16's trainers.

python -m benchmarks.sft_reward_steps --shape 135m
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

from benchmarks.command import (
    Setting,
    add_peer,
    finish,
    gib,
    models,
    parser,
    peer_python,
    table,
)
from benchmarks.processes import Side, alternate
from benchmarks.ragged import RAGGED

# TRL's default takes rows in random order; "batch_rebalance" is its remedy against padding.
SAMPLINGS = {
    "trl": "sequential",
    "trl rebalanced": "batch_rebalance",
    "trl padding_free": "sequential",  # rows of a micro-batch in one sequence; of SFT alone
}
NAMES = {
    "ours": "rlhf_lightning",
    "trl": "TRL 1.16, rows as they come",
    "trl rebalanced": "TRL 1.16, `batch_rebalance`",
    "trl padding_free": "TRL 1.16, `padding_free`",
}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure, write the JSON, print the table."""
    made = parser(__doc__.splitlines()[0])
    made.add_argument("--precision", choices=["fp32", "bf16"], default="bf16")
    made.add_argument("--stages", nargs="+", choices=["sft", "reward"], default=["sft", "reward"])
    made.add_argument("--sides", nargs="+", choices=list(NAMES), default=list(NAMES))
    made.add_argument("--warmup", type=int, default=1, help="steps not counted, a process")
    made.add_argument("--iterations", type=int, default=3, help="steps counted, a process")
    add_peer(made, sys.executable, "trl==1.16.*")
    setting = Setting("sft_reward_steps", made.parse_args(arguments))
    options = setting.options
    peer = peer_python(options)
    kind = "quick" if options.quick else setting.device
    sizes = {stage: RAGGED[kind, stage].as_dict() for stage in options.stages}
    with models(setting) as folder:
        task = setting.task(
            folder=str(folder),
            vocabulary=setting.shape["vocab_size"],
            precision=options.precision,
            warmup=options.warmup,
            iterations=options.iterations,
        )
        sides = []
        for stage in options.stages:
            for who in options.sides:
                if stage == "reward" and who == "trl padding_free":
                    continue
                own = task | {"stage": stage, "ragged": sizes[stage]}
                name = f"{stage}, {who}"
                if who == "ours":
                    sides.append(Side(name, "steps_ours", own))
                else:
                    own["sampling"] = SAMPLINGS[who]
                    own["padding_free"] = who == "trl padding_free"
                    sides.append(Side(name, "steps_trl", own, peer))
        runs = alternate(sides, options.repeats, lock=setting.lock)
    return finish(
        setting,
        runs,
        summarise(runs, options.warmup + options.iterations),
        render,
        pythons={"trl": peer},
        settings={"precision": options.precision, **sizes},
    )


def summarise(runs: dict[str, list[dict[str, Any]]], wanted: int) -> dict[str, Any]:
    """Return each side's medians, and ours over each TRL side.

    Raises:
        RuntimeError: if the sides did not take the same number of optimizer steps.
    """
    sides = {}
    for name, taken in runs.items():
        steps = {run["optimizer_steps"] for run in taken}
        if steps != {wanted}:
            raise RuntimeError(f"{name} took {sorted(steps)} optimizer steps, wanted {wanted}")
        laps = [lap["seconds"] for run in taken for lap in run["iterations"]]
        used = [lap["cpu_seconds"] for run in taken for lap in run["iterations"]]
        sides[name] = {
            "cpu_seconds": statistics.median(used),
            "seconds": statistics.median(laps),
            "fastest": min(laps),
            "slowest": max(laps),
            "measured": len(laps),
            "memory_peak": statistics.median(run["memory"]["peak"] for run in taken),
        }
    ratios = {
        name: side["seconds"] / sides[f"{name.split(',')[0]}, ours"]["seconds"]
        for name, side in sides.items()
        if not name.endswith("ours") and f"{name.split(',')[0]}, ours" in sides
    }
    return {"sides": sides, "ratios": ratios}


def render(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    rows, summary = [], result["summary"]
    for name, side in summary["sides"].items():
        stage, who = name.split(", ")
        ratio = summary["ratios"].get(name)
        rows.append(
            [
                stage,
                NAMES[who],
                f"{side['seconds']:.2f} s",
                f"{side['fastest']:.2f} to {side['slowest']:.2f} ({side['measured']})",
                f"{side['cpu_seconds']:.2f} s",
                f"{ratio:.2f}x" if ratio else "",
                gib(side["memory_peak"]),
            ]
        )
    head = ["", "", "step", "range (count)", "processor time", "ours is faster by", "peak memory"]
    return table(head, rows)


if __name__ == "__main__":
    main(sys.argv[1:])
