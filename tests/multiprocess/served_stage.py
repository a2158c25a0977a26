"""One rank of a PPO run whose responses a server writes: `served_stage.py OUT STRATEGY LAG`."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from rlhf_lightning.batches import PromptBatch
from rlhf_lightning.rollout.generators.vllm import VllmGenerator
from tests.builders.models import EOS, PAD
from tests.builders.ranks import ROOT
from tests.builders.stages import RecordedPPO, ppo_hparams, prompts, tiny_module, trainer
from tests.multiprocess.train_stage import leave, strategy_of

ROWS, ITERATIONS = 8, 3  # rows of all ranks
RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
STAND_IN = {"PYTHONPATH": ROOT / "tests/builders/vllm_stand_in", "OMP_NUM_THREADS": 1}


class Watched(VllmGenerator):
    """Notes how many weights of decoder layers are whole when responses are asked for."""

    whole = 0

    def options_for(self, model: Any) -> Any:
        weights = model.model.layers.parameters()
        self.whole += sum(not isinstance(weight, DTensor) for weight in weights)
        return super().options_for(model)


def with_following(number: int) -> PromptBatch:
    """Return this rank's prompts of an iteration, and as spares those of the next."""
    share = ROWS // WORLD_SIZE
    parts = [
        replace(batch, spare=torch.full((ROWS,), following))[RANK * share : (RANK + 1) * share]
        for batch, following in (
            (prompts(number, rows=ROWS), False),
            (prompts(number + 1, rows=ROWS), True),
        )
    ]
    return PromptBatch.cat(parts)


def main(out: Path, strategy: str, lag: int) -> None:
    torch.manual_seed(1)
    generator = Watched(
        [EOS], PAD, python=sys.executable, replicas=[STAND_IN] * 2, logprob_tolerance=1e-4
    )
    module = tiny_module(
        "llama",
        cls=RecordedPPO,
        ppo=ppo_hparams(
            num_ppo_epochs=1,
            num_minibatches=1,
            micro_batch_size=2,
            rollout_lag=lag,
            off_policy="truncated",
        ),
        generator=generator,
    )
    batches = [with_following(number) for number in range(ITERATIONS)]
    if not lag:
        batches = [batch[~batch.spare] for batch in batches]
    trainer(
        devices=WORLD_SIZE,
        strategy=strategy_of(strategy, WORLD_SIZE),
        use_distributed_sampler=False,
        default_root_dir=out,
    ).fit(module, DataLoader(batches, batch_size=None))
    rows = [
        [row[mask].tolist() for row, mask in zip(r.response_tensors, r.response_mask, strict=True)]
        for r in module.rollouts
    ]
    found = {"rows": rows, "whole": generator.whole, "servers": len(generator.pool.servers)}
    (out / f"rank_{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    leave()
