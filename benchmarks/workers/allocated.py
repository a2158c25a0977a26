"""Run the command line of `rlhf_lightning.train` on a GPU and write the peak of its tensors.

`python -m benchmarks.workers.allocated RESULT OVERRIDE...`
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    """Train, and write the most bytes that tensors and cuBLAS's workspaces took on the GPU."""
    result, *overrides = sys.argv[1:]
    sys.argv = ["rlhf_lightning.train", *overrides]
    from rlhf_lightning.app import train

    train.main()
    import torch

    peak = torch.cuda.max_memory_allocated()
    Path(result).write_text(json.dumps({"peak": peak}), encoding="utf-8")


if __name__ == "__main__":
    main()
