"""The rate at which this machine multiplies matrices: at a trunk's shapes, and large ones."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import Tensor

from benchmarks.flops import layer_matrices
from benchmarks.worker import Stopwatch, Task, worker_main

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LARGE = {"cpu": 2048, "cuda": 8192}


def run(task: Task) -> dict[str, Any]:
    """Return operations per second by precision: of one layer's products, and of a square one.

    The products of a layer are those of forward and backward: outputs, gradients of inputs,
    gradients of weights, for as many tokens as one micro-batch has.
    """
    watch, device, tokens = Stopwatch(task["device"]), task["device"], task["tokens"]
    result: dict[str, Any] = {"tokens": tokens}
    for name in task["precisions"]:
        options = {"device": device, "dtype": DTYPES[name]}
        seconds, operations = 0.0, 0.0
        for inputs, outputs in layer_matrices(task["shape"]):
            x, w = torch.randn(tokens, inputs, **options), torch.randn(outputs, inputs, **options)
            g = torch.randn(tokens, outputs, **options)
            for a, b in ((x, w.T), (g, w), (g.T, x)):
                seconds += _seconds(a, b, watch, task["seconds"])
                operations += 2.0 * tokens * inputs * outputs
        size = task.get("large", LARGE[device])
        a, b = torch.randn(size, size, **options), torch.randn(size, size, **options)
        large = _seconds(a, b, watch, task["seconds"])
        result[name] = {"trunk": operations / seconds, "large": 2.0 * size**3 / large}
    return result


def _seconds(a: Tensor, b: Tensor, watch: Stopwatch, budget: float) -> float:
    """Return the median time of `a @ b`, over at least five calls and `budget` seconds."""
    for _ in range(3):
        _ = a @ b
    times: list[float] = []
    while len(times) < 5 or sum(times) < budget:
        started = watch.now()
        _ = a @ b
        times.append(watch.now() - started)
    return statistics.median(times)


if __name__ == "__main__":
    worker_main(run)
