"""One rank of a PPO run under FSDP2 that counts what it sends: `count_collectives.py OUT [SYNC]`.

The answers of rank 0 end after one token, those of the others never end by themselves.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from rlhf_lightning.hparams import SamplingHparams
from rlhf_lightning.modules import on_policy
from rlhf_lightning.rollout.generators.base import CachedGenerator
from tests.builders.models import PAD, VOCABULARY
from tests.builders.stages import RecordedPPO, ppo_hparams, prompts, tiny_module, trainer
from tests.multiprocess.train_stage import leave, strategy_of

ROWS = 4  # of each rank
MICRO_BATCH = 1
LONGEST = 40
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
gathered: list[dict[str, int]] = []  # to generate, then of the policy and of the reference
plainly_unsharded = on_policy.unsharded


class Counter(TorchDispatchMode):
    """Counts the calls of each collective, in forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        if function.namespace in ("c10d", "_c10d_functional"):
            name = function._schema.name.partition("::")[2]
            self.counts[name] = self.counts.get(name, 0) + 1
        return function(*arguments, **(options or {}))


@contextmanager
def unsharded_and_counted(model: Any, **options: Any) -> Iterator[Any]:
    with Counter() as counter, plainly_unsharded(model, **options) as whole:
        yield whole
    gathered.append(counter.counts)


class Counted(RecordedPPO):
    """Notes what an update sends, and what of its gradients is whole after a micro-batch."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.updates: list[dict[str, int]] = []
        self.whole = 0
        self.backwards = 0

    def update(self, *arguments: Any, **options: Any) -> bool:
        with Counter() as counter:
            keep_going = super().update(*arguments, **options)
        self.updates.append(counter.counts)
        return keep_going

    def manual_backward(self, *arguments: Any, **options: Any) -> None:
        super().manual_backward(*arguments, **options)
        self.backwards += 1
        for root in self.trained_roots:
            for unit in units(root):
                group = unit._get_fsdp_state()._fsdp_param_group
                for parameter in group.fsdp_params:
                    gradients = (
                        parameter.unsharded_accumulated_grad,  # of another dtype than is sent
                        parameter.unsharded_param.grad,
                    )
                    self.whole += any(gradient is not None for gradient in gradients)
        for parameter in self.parameters():
            assert parameter.grad is None or isinstance(parameter.grad, DTensor)


def units(root: torch.nn.Module) -> list[Any]:
    return [m for m in root.modules() if isinstance(m, FSDPModule)]


def main(out: Path, sync: str = "micro_batch") -> None:
    torch.manual_seed(1)
    on_policy.unsharded = unsharded_and_counted  # type: ignore[assignment]
    module = tiny_module(
        "llama",
        cls=Counted,
        ppo=ppo_hparams(num_ppo_epochs=1, num_minibatches=1, micro_batch_size=MICRO_BATCH),
        sampling=SamplingHparams(max_new_tokens=LONGEST),
        generator=CachedGenerator(range(VOCABULARY) if RANK == 0 else (VOCABULARY - 1,), PAD),
    )
    batch = prompts(rows=ROWS * WORLD_SIZE)[RANK * ROWS : (RANK + 1) * ROWS]
    strategy = strategy_of("fsdp", WORLD_SIZE)
    strategy.gradient_sync = sync
    trainer(
        devices=WORLD_SIZE,
        strategy=strategy,
        use_distributed_sampler=False,
        default_root_dir=out,
    ).fit(module, DataLoader([batch, batch], batch_size=None))
    found = {
        "lengths": [r.response_mask.sum(1).tolist() for r in module.rollouts],
        "gathered": gathered,
        "updates": module.updates,
        "whole": module.whole,
        "backwards": module.backwards,
        "layers": len(module.policy.model.model.layers),
        "weights": [p.full_tensor().sum().item() for p in module.parameters()],
        "units": [len(units(root)) for root in module.trained_roots],
    }
    (out / f"rank_{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
    leave()
