"""What a process on a CPU holds beside tensors: measured constants, and the C library's share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rlhf_lightning.memory.heap import replayable, resident_in_update
from rlhf_lightning.memory.recording import LAYERS, record_steps, record_update
from rlhf_lightning.memory.run import Run
from rlhf_lightning.memory.sizes import MIB
from rlhf_lightning.memory.traces import Rows
from rlhf_lightning.memory.workbench import Workbench

PROCESS = "process"
KEPT = "kept by the C library"
# Tokenizer, records and configuration before a model is loaded, with a vocabulary of 49,152.
RECORDS = 60 * MIB
# oneDNN's kernels, 0.6 MiB for each shape of product: fp32 in training takes another library.
KERNELS = 70 * MIB
# Further ones find the heap as those before left it.
MICRO_BATCHES, MINIBATCHES = 4, 2


def beside_tensors(run: Run) -> Counter[str]:
    """Return what the process holds that is no tensor; nothing on a GPU."""
    if run.device != "cpu":
        return Counter()
    return Counter({PROCESS: RECORDS + (KERNELS if run.style.autocast else 0)})


def held_in_update(bench: Workbench, kinds: Sequence[str], rows: Rows) -> int:
    """Return the most bytes that the C library holds for updates; 0 where nobody knows its ways.

    Gradients and the optimizer's state are part of it, weights are not.

    Args:
        bench: of the run.
        kinds: models that are trained, in the order of their losses.
        rows: a micro-batch.
    """
    run = bench.run
    if run.device != "cpu" or run.sharded > 1 or not replayable():
        return 0
    updates, steps = {}, {}
    for kind in kinds:
        depth = bench.shape_of(kind).num_layers
        layers = min(depth, LAYERS)
        updates[kind] = record_update(
            bench.model(kind, layers),
            rows,
            run.style,
            layers=layers,
            depth=depth,
            accumulated=run.num_micro_batches > 1,
            with_entropy=run.with_entropy,
        )
        steps[kind] = record_steps(bench.model(kind, depth, as_held=True), run.optimizer)
    return resident_in_update(
        updates,
        steps,
        micro_batches=min(run.num_micro_batches, MICRO_BATCHES),
        minibatches=min(run.num_minibatches, MINIBATCHES),
        trims=run.stage == "ppo",
    )
