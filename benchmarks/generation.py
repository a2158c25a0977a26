"""Rollout tokens a second in bf16: this project's generator against plain `generate`.

python -m benchmarks.generation --shape 135m
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

from benchmarks.command import Setting, add_overrides, finish, gib, models, parser, table
from benchmarks.flops import head_weights, trunk_weights
from benchmarks.processes import Side, alternate

ENGINES = {
    "ours": "rlhf_lightning, fp32 weights under autocast",
    "autocast": "`generate`, fp32 weights under autocast",
    "bf16 weights": "`generate`, a bf16 copy of the weights",
}
SIZES = {
    "cpu": {"rows": 32, "prompt": [8, 32], "shortest": 8, "longest": 64},
    "cuda": {"rows": 64, "prompt": [16, 256], "shortest": 64, "longest": 512},
    "quick": {"rows": 4, "prompt": [2, 6], "shortest": 2, "longest": 6},
}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure, write the JSON, print the table."""
    made = parser(__doc__.splitlines()[0])
    made.add_argument("--iterations", type=int, default=3, help="generations counted, a process")
    made.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    add_overrides(made)
    setting = Setting("generation", made.parse_args(arguments))
    size = SIZES["quick" if setting.options.quick else setting.device]
    with models(setting) as folder:
        task = setting.task(
            folder=str(folder),
            vocabulary=setting.shape["vocab_size"],
            iterations=setting.options.iterations,
            overrides=setting.options.overrides,
            **size,
        )
        sides = [
            Side(f"{engine}, {kind}", "generation", task | {"engine": engine, "ragged": ragged})
            for kind, ragged in (("fixed", False), ("ragged", True))
            for engine in setting.options.engines
        ]
        bandwidth_task = setting.task(megabytes=1 if setting.options.quick else 512)
        sides.append(Side("bandwidth", "bandwidth", bandwidth_task))
        runs = alternate(sides, setting.options.repeats, lock=setting.lock)
    return finish(setting, runs, summarise(setting, runs, size), render, settings=size)


def summarise(
    setting: Setting, runs: dict[str, list[dict[str, Any]]], size: dict[str, Any]
) -> dict[str, Any]:
    """Return each side's tokens a second, and ours over the faster `generate`.

    `bandwidth_share` is what reading the bf16 weights once a step takes of the memory bandwidth:
    a lower bound of the traffic, as the cache is read too.
    """
    bandwidth = statistics.median(run["bytes_per_second"] for run in runs.pop("bandwidth"))
    weights = 2.0 * (trunk_weights(setting.shape) + head_weights(setting.shape))
    sides = {}
    for name, taken in runs.items():
        laps = [lap for run in taken for lap in run["iterations"]]
        seconds = statistics.median(lap["seconds"] for lap in laps)
        sides[name] = {
            "seconds": seconds,
            "fastest": min(lap["seconds"] for lap in laps),
            "slowest": max(lap["seconds"] for lap in laps),
            "tokens_per_second": laps[0]["tokens"] / seconds,
            "memory_peak": statistics.median(run["memory"]["peak"] for run in taken),
            "bandwidth_share": weights * size["longest"] / seconds / bandwidth,
        }
    ratios = {}
    for kind in ("fixed", "ragged"):
        rates = {
            name.split(",")[0]: side["tokens_per_second"]
            for name, side in sides.items()
            if name.endswith(kind)
        }
        others = [rate for engine, rate in rates.items() if engine != "ours"]
        if "ours" in rates and others:
            ratios[kind] = rates["ours"] / max(others)
    return {"sides": sides, "ratios": ratios, "bandwidth": bandwidth}


def render(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    rows = []
    for name, side in result["summary"]["sides"].items():
        engine, kind = name.split(", ")
        rows.append(
            [
                ENGINES[engine],
                kind,
                f"{side['tokens_per_second']:,.0f}",
                f"{side['seconds']:.2f} s ({side['fastest']:.2f} to {side['slowest']:.2f})",
                f"{side['bandwidth_share']:.0%}",
                gib(side["memory_peak"]),
            ]
        )
    head = [
        "",
        "lengths",
        "tokens a second",
        "seconds",
        "share of bandwidth",
        "peak memory",
    ]
    lines = [table(head, rows), ""]
    lines += [
        f"* {kind} lengths: {ratio:.2f}x the faster `generate`"
        for kind, ratio in result["summary"]["ratios"].items()
    ]
    lines.append(f"* memory bandwidth, copying: {result['summary']['bandwidth'] / 1e9:,.0f} GB/s")
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
