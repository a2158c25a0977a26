"""One PPO iteration, this project against TRL 1.12: seconds, phases, memory, matrix rate reached.

python -m benchmarks.ppo_iteration --shape 135m
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

from benchmarks.command import (
    PEER,
    Setting,
    add_overrides,
    add_peer,
    finish,
    gib,
    models,
    parser,
    peer_python,
    table,
)
from benchmarks.flops import update_flops
from benchmarks.processes import Side, alternate

PHASES = ("generate", "score", "update")
NAMES = {"ours": "rlhf_lightning", "trl": "TRL 1.12"}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure, write the JSON, print the table."""
    made = parser(__doc__.splitlines()[0])
    made.add_argument("--precisions", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    made.add_argument("--only", choices=["ours", "trl"], help="measure one side")
    made.add_argument("--warmup", type=int, default=0, help="iterations not counted, a process")
    made.add_argument("--iterations", type=int, default=1, help="iterations counted, a process")
    add_peer(made, str(PEER), "trl==1.12.0")
    add_overrides(made)
    setting = Setting("ppo_iteration", made.parse_args(arguments))
    options = setting.options
    who = [options.only] if options.only else ["ours", "trl"]
    peer = peer_python(options) if "trl" in who else ""
    with models(setting) as folder:
        task = setting.task(
            folder=str(folder),
            workload=setting.workload.as_dict(),
            warmup=options.warmup,
            overrides=options.overrides,
            iterations=options.iterations,
        )
        sides = [
            ppo_side(side, precision, task, peer)
            for precision in options.precisions
            for side in who
        ]
        # On CUDA benchmarks.gpu_engine gives the share of the card's peak.
        rate = [] if setting.device == "cuda" else [matrix_side(setting)]
        runs = alternate([*rate, *sides], options.repeats, lock=setting.lock)
    return finish(
        setting,
        runs,
        summarise(setting, runs),
        render,
        pythons={"trl": peer} if peer else None,
        settings={
            "workload": setting.workload.as_dict(),
            "update_flops": update_flops(setting.shape, setting.workload),
        },
    )


def ppo_side(side: str, precision: str, task: dict[str, Any], peer: str) -> Side:
    """Return the process that runs PPO iterations of one side in one precision."""
    task = task | {"precision": precision}
    if side == "ours":
        return Side(f"ours {precision}", "ppo_ours", task)
    # TRL does not pass `bf16=True` on: its accelerator reads this variable, as the launcher does.
    mixed = {"ACCELERATE_MIXED_PRECISION": "bf16" if precision == "bf16" else "no"}
    return Side(f"trl {precision}", "ppo_trl", task, peer, mixed)


def matrix_side(setting: Setting, seconds: float = 0.3) -> Side:
    """Return the process that measures how fast the machine multiplies matrices."""
    workload = setting.workload
    tokens = workload.micro_batch_size * (workload.longest_prompt + workload.new_tokens)
    task = setting.task(
        shape=setting.shape, tokens=tokens, precisions=["fp32", "bf16"], seconds=seconds
    )
    quick = {"large": 64, "seconds": 0.001} if setting.options.quick else {}
    return Side("matrix rate", "matrix_rate", task | quick)


def summarise(setting: Setting, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return medians by side, the share of the matrix rate and the ratios between sides.

    Raises:
        RuntimeError: if the sides did not take the same number of optimizer steps.
    """
    rates = matrix_rates(runs["matrix rate"]) if "matrix rate" in runs else {}
    sides = {name: medians(taken) for name, taken in runs.items() if name != "matrix rate"}
    wanted = setting.workload.num_ppo_epochs
    for name, taken in runs.items():
        steps = {lap["optimizer_steps"] for run in taken for lap in run.get("iterations", [])}
        if name != "matrix rate" and steps != {wanted}:
            raise RuntimeError(f"{name} took {sorted(steps)} optimizer steps, wanted {wanted}")
    operations = update_flops(setting.shape, setting.workload)
    for name, side in sides.items() if rates else ():
        rate = rates[name.split()[1]]["trunk"]
        for kind, count in operations.items():
            side[f"share_{kind}"] = count / side["update"] / rate
    summary: dict[str, Any] = {"matrix_rate": rates, "sides": sides, "optimizer_steps": wanted}
    summary["ratios"] = {
        f"{ours} against {other}": {
            "faster": sides[other]["seconds"] / sides[ours]["seconds"],
            "memory": sides[ours]["memory_peak"] / sides[other]["memory_peak"],
        }
        for ours in sides
        for other in sides
        if ours.startswith("ours") and other.startswith("trl")
    }
    return summary


def matrix_rates(taken: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the median rates of several measurements, operations per second."""
    return {
        precision: {
            kind: statistics.median(run[precision][kind] for run in taken)
            for kind in ("trunk", "large")
        }
        for precision in ("fp32", "bf16")
    }


def medians(taken: list[dict[str, Any]]) -> dict[str, float]:
    """Return a side's medians over all its measured iterations, and over its processes."""
    laps = [lap for run in taken for lap in run["iterations"]]
    memory = [run["memory"] for run in taken]
    side = {
        name: statistics.median(lap[name] for lap in laps)
        for name in ("seconds", "cpu_seconds", *PHASES)
    }
    side["measured"] = len(laps)
    side["slowest"] = max(lap["seconds"] for lap in laps)
    side["fastest"] = min(lap["seconds"] for lap in laps)
    peak = "peak_device" if "peak_device" in memory[0] else "peak"
    side["memory_peak"] = statistics.median(m[peak] for m in memory)
    side["memory_imports"] = statistics.median(m["after_imports"] for m in memory)
    if "peak_device" in memory[0]:
        side["memory_host"] = statistics.median(m["peak"] for m in memory)
        side["planned"] = taken[0].get("planned", 0)
        side["first_rollout"] = statistics.median(run["first_rollout"] for run in taken)
    return side


def render(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    summary = result["summary"]
    if not summary["matrix_rate"]:
        return _on_cuda(summary)
    rows = []
    for name, side in summary["sides"].items():
        who, precision = name.split()
        spread = f"{side['fastest']:.1f} to {side['slowest']:.1f}"
        rows.append(
            [
                f"{NAMES[who]} {precision}",
                f"{side['seconds']:.2f} s",
                f"{spread} ({side['measured']:.0f})",
                f"{side['cpu_seconds']:.1f} s",
                *(f"{side[phase]:.2f}" for phase in PHASES),
                gib(side["memory_peak"]),
                gib(side["memory_peak"] - side["memory_imports"]),
                f"{side['share_nominal']:.0%} / {side['share_needed']:.0%}",
            ]
        )
    head = [
        "",
        "iteration",
        "range (count)",
        "processor time",
        *PHASES,
        "peak memory",
        "above imports",
    ]
    lines = [table([*head, "update's share of the matrix rate, nominal / needed"], rows), ""]
    lines += [
        f"* {name}: {ratio['faster']:.2f}x faster, {ratio['memory']:.2f}x the memory"
        for name, ratio in summary["ratios"].items()
    ]
    for precision, rate in summary["matrix_rate"].items():
        lines.append(
            f"* matrix rate {precision}: {rate['trunk'] / 1e9:,.0f} GFLOP/s at the trunk's shapes, "
            f"{rate['large'] / 1e9:,.0f} GFLOP/s at large ones"
        )
    return "\n".join(lines)


def _on_cuda(summary: dict[str, Any]) -> str:
    rows = [
        [
            f"{NAMES[name.split()[0]]} {name.split()[1]}",
            f"{side['seconds']:.2f} s",
            f"{side['fastest']:.2f} to {side['slowest']:.2f} ({side['measured']:.0f})",
            *(f"{side[phase]:.2f}" for phase in PHASES),
            *(gib(side[kind]) for kind in ("memory_peak", "memory_host")),
            gib(side["planned"]) if side["planned"] else "-",
            f"{side['first_rollout']:.0f} s",
        ]
        for name, side in summary["sides"].items()
    ]
    head = [
        "",
        "iteration",
        "range (count)",
        *PHASES,
        "GPU memory",
        "host memory",
        "by the formula",
    ]
    return table([*head, "start to first rollout"], rows)


if __name__ == "__main__":
    main(sys.argv[1:])
