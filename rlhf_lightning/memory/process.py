"""What a process on a CPU holds beside tensors: fitted to measured peaks, see docs/memory.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from rlhf_lightning.memory.run import Run
from rlhf_lightning.memory.sizes import MIB
from rlhf_lightning.memory.tracker import ACTIVATIONS, CASTS, HEAD

PROCESS = "process"
KEPT = "kept by the C library"
# Tokenizer, records and configuration before a model is loaded, with a vocabulary of 49,152.
RECORDS = 60 * MIB
# oneDNN's kernels, 0.6 MiB for each shape of product: fp32 in training takes another library.
KERNELS = 70 * MIB
# Of what a pass holds and frees, that glibc cannot use again for what comes next: adapters leave
# many small objects between the tensors.
SHARE_KEPT = 0.7
FREED_IN_A_PASS = (ACTIVATIONS, CASTS, HEAD)


def beside_tensors(run: Run, parts: Mapping[str, int]) -> Counter[str]:
    """Return what the process holds beside the `parts` of a phase, on a CPU with adapters.

    Nothing on a GPU. Nothing for whole models: the layers as transformers wrote them, which are
    counted, take more than the written-out ones of `models/fused_layer.py`, and that outweighs it.

    Args:
        run: what is planned.
        parts: tensors at the phase's peak, in bytes.
    """
    if run.device != "cpu" or run.style.lora is None:
        return Counter()
    freed = sum(parts.get(part, 0) for part in FREED_IN_A_PASS)
    process = RECORDS + (KERNELS if run.style.autocast else 0)
    return Counter({PROCESS: process, KEPT: round(SHARE_KEPT * freed)})
