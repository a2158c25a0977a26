"""One rank of a stage whose last rank alone breaks: `poisoned_rank.py STAGE STRATEGY OUT LIMIT`.

Each rank writes whether its weights moved, what it logged, and what stopped it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from rlhf_lightning.callbacks.run_tables import SaveFaultyBatch
from rlhf_lightning.modules.non_finite import NonFiniteError
from rlhf_lightning.runs.folder import RunFolder
from tests.builders.models import tiny_tokenizer
from tests.builders.stages import (
    ppo_hparams,
    preference_batch,
    prompts,
    sft_batch,
    tiny_module,
    tiny_reward,
    tiny_sft,
    trainer,
)
from tests.faults.poison import Poison
from tests.multiprocess.train_stage import ROWS, strategy_of

ITERATIONS = 3


def main(stage: str, strategy: str, out: Path, limit: int) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    module: Any
    if stage == "ppo":
        hparams = ppo_hparams(num_ppo_epochs=1, num_minibatches=1, max_skipped_steps=limit)
        module = tiny_module(ppo=hparams)
        batches: list[Any] = [prompts(i, rows=ROWS) for i in range(ITERATIONS)]
    else:
        tiny, batch = {"sft": (tiny_sft, sft_batch), "reward": (tiny_reward, preference_batch)}[
            stage
        ]
        module = tiny(max_skipped_steps=limit)
        batches = [batch(seed=i) for i in range(ITERATIONS)]
    module.tokenizer = tiny_tokenizer()
    share = ROWS // world_size
    poison = Poison("loss", {2} if rank == world_size - 1 else ())
    folder = RunFolder(out)
    lightning_trainer = trainer(
        devices=world_size,
        strategy=strategy_of(strategy, world_size),
        use_distributed_sampler=False,
        default_root_dir=out,
        callbacks=[poison, SaveFaultyBatch(folder)],
    )
    loader = DataLoader([b[rank * share : (rank + 1) * share] for b in batches], batch_size=None)
    stopped = ""
    try:
        lightning_trainer.fit(module, loader)
    except NonFiniteError as error:
        stopped = str(error)
    moved = [poison.moved(i + 1) for i in range(len(poison.after))]
    torch.save({"moved": moved, "rows": poison.rows, "stopped": stopped}, out / f"rank_{rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # FSDP2 on gloo now and then aborts while the interpreter ends
