"""Sharded runs on fake ranks: FSDP2 itself, with tensors and a process group that hold nothing.

Every phase runs the real code, from `shard` to the gathering for an export, on one rank of as many
as asked, and every storage and every collective is counted. It runs with few layers: as layers are
alike, what is alive at a given moment and what is exchanged grow by the same with each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import masking_utils

from rlhf_lightning.app.memory_plan.models import (
    POLICY,
    REFERENCE,
    REWARD,
    TEACHER,
    VALUE,
    FakeModels,
)
from rlhf_lightning.app.memory_plan.passes import (
    Rows,
    autocast,
    extrapolated,
    generate,
    layers_marked,
    loss_of,
)
from rlhf_lightning.app.memory_plan.run import Run
from rlhf_lightning.app.memory_plan.tracker import Tracker
from rlhf_lightning.distributed.collectives import (
    SHARD,
    clip_grad_norm,
    full_state,
    mesh_in_groups,
    shard,
    unsharded,
)
from rlhf_lightning.distributed.fake_ranks import fake_ranks, own_part
from rlhf_lightning.distributed.read_weights import tensors_of
from rlhf_lightning.functional.linear_logprobs import sized_for
from rlhf_lightning.models.forward import BUCKET
from rlhf_lightning.models.heads import ScalarHeadModel
from rlhf_lightning.models.lora import AdaptedPolicy, add_scalar_model
from rlhf_lightning.rollout.generators.vllm_weights import named_weights

FEW, MORE = 3, 4  # layers: FSDP2 gathers the next one while one computes and one is freed
START, GENERATE, SCORE, UPDATE, EXPORT = "start", "generate", "score", "update", "export"
ITERATED = (GENERATE, SCORE, UPDATE)
RANK = 1  # of those that run: it keeps nothing of what is gathered for rank 0
ALIVE, RECEIVED = "alive", "received"


@dataclass(frozen=True)
class Simulation:
    """One rank of a sharded run, in bytes.

    Args:
        peaks: largest number of live bytes on its device in each phase, weights included.
        received: bytes from other ranks in an iteration, by phase; for `start` and `export`, once.
        whole: bytes of the largest model in fp32, which rank 0 holds in its host's memory while it
            reads it, and of the policy while it is exported.
        shards: bytes of all its models on its device.
    """

    peaks: Mapping[str, int]
    received: Mapping[str, int]
    whole: int
    shards: int


def simulate(run: Run, *, num_layers: int | None = None) -> Simulation:
    """Return the bytes that one rank of `run`, whose models are sharded, holds and receives.

    Args:
        run: a run under FSDP2.
        num_layers: simulate so many in place of few; for tests of the extrapolation.
    """
    fake = FakeModels(run)
    depth = run.shape.num_layers

    def measure(layers: int) -> dict[str, Counter[str]]:
        with sized_for(run.device), fake_ranks(run.num_devices, rank=RANK):
            return _Rank(run, fake, layers).run_phases()

    if num_layers is None:
        found = extrapolated(measure, depth, few=FEW, more=MORE)
    else:
        found = {name: dict(counts) for name, counts in measure(num_layers).items()}
    iterated = ITERATED if run.spec.rolls_out else (UPDATE,)
    peaks = dict.fromkeys((START, *iterated, EXPORT), 0)
    received: Counter[str] = Counter()
    for name, counts in found.items():
        phase = name.partition(":")[0]
        peaks[phase] = max(peaks[phase], counts.get(ALIVE, 0))
        received[phase] += counts.get(RECEIVED, 0)
    kinds = [POLICY, *((REWARD,) if run.scoring.kind == "model" else ())]
    kinds += [] if run.teacher is None else [TEACHER]
    return Simulation(
        peaks=peaks,
        received=dict(received),
        whole=4 * max(fake.total(kind) for kind in kinds),
        shards=found[f"{START}:end"][ALIVE],
    )


class ShardedTracker(Tracker):
    """Counts storages that FSDP2 empties and fills again, local shards, and collectives.

    Attributes:
        times: how often an iteration does what runs now.
        received: bytes from other ranks, by phase.
    """

    def __init__(self) -> None:
        super().__init__()
        self.times = 1
        self.received: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation; count what it allocates and what it receives."""
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.received[self.segment] += self.times * _received(func._schema.name, args, result)
        return result

    def count(self, tensor: Tensor, category: str) -> None:
        """Count a tensor, of a sharded one what this rank holds."""
        super().count(own_part(tensor), category)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage of another size than before."""
        known = self._known.get(storage._cdata)
        if known is not None:
            category, before = known
            self._known[storage._cdata] = (category, storage.nbytes())
            self.live[category] += storage.nbytes() - before
            self._note_peak()


def _received(name: str, args: Any, result: Any) -> int:
    if name == "c10d::_allgather_base_":
        return _size(args[0]) - _size(args[1])
    if name == "c10d::_reduce_scatter_base_":
        return _size(args[1]) - _size(args[0])
    if name == "_c10d_functional::all_gather_into_tensor":
        return _size(result) - _size(args[0])
    if name == "_c10d_functional::all_reduce" or name == "_c10d_functional::all_reduce_":
        return 2 * _size(args[0])
    if name == "c10d::allreduce_":
        return 2 * sum(map(_size, args[0]))
    if name.startswith(("c10d::", "_c10d_functional::")) and "wait" not in name:
        raise NotImplementedError(f"{name} is not counted")
    return 0


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class _Rank:
    """One rank with models of `num_layers`, phase after phase."""

    def __init__(self, run: Run, fake: FakeModels, num_layers: int) -> None:
        self.run = run
        self.tracker = ShardedTracker()
        self.built = self._build(fake, num_layers)  # on the meta device
        mesh = mesh_in_groups("cpu", run.num_devices, run.sharded)
        self.place = SimpleNamespace(
            mesh_of_shards=mesh[SHARD] if run.sharded == run.num_devices else mesh,
            cpu_offload=False,
        )

    def _build(self, fake: FakeModels, num_layers: int) -> dict[str, Any]:
        run = self.run
        kinds = [*run.spec.trains]
        if run.spec.rolls_out:
            kinds.append(REFERENCE)
        count = run.scoring.count if run.scoring.kind == "model" else 0
        own = {f"{REWARD} {n}": fake.build(REWARD, num_layers) for n in range(1, count + 1)}
        own |= {} if run.teacher is None else {TEACHER: fake.build(TEACHER, num_layers)}
        if run.style.lora is None:
            return {kind: fake.build(kind, num_layers) for kind in kinds} | own
        first = fake.build(kinds[0], num_layers)
        built: dict[str, Any] = {kinds[0]: first}
        with torch.device("meta"):
            for kind in kinds[1:]:
                if kind == VALUE:
                    built[kind] = add_scalar_model(first.base, "value", init_std=0.0, seed=0)
        if REFERENCE in kinds:
            built[REFERENCE] = AdaptedPolicy(first.base, None)
        return built | own

    def run_phases(self) -> dict[str, Counter[str]]:
        """Return bytes that were alive and received, by `phase:segment`."""
        resize = torch.UntypedStorage.resize_
        run, tracker = self.run, self.tracker

        def resize_and_count(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            tracker.resized(storage)
            return result

        with (
            FakeTensorMode(),
            tracker,
            patch.object(torch.UntypedStorage, "resize_", resize_and_count),
            # transformers reads numbers there, to see that no row holds two texts
            patch.object(masking_utils, "find_packed_sequence_indices", lambda *_: None),
        ):
            self._start()
            tracker.enter("between")
            trained = [self.built[kind] for kind in run.spec.trains]
            groups = [[p for p in m.parameters() if p.requires_grad] for m in trained]
            optimizer = run.optimizer([{"params": group, "lr": 1e-4} for group in groups])
            for parameter in (p for group in groups for p in group):
                parameter.grad = torch.empty_like(parameter)
            optimizer.step()  # makes its state
            optimizer.zero_grad(set_to_none=True)
            if run.spec.rolls_out:
                self._roll_out()
            self._update(optimizer, times=run.num_minibatches * run.num_passes)
            optimizer.state.clear()  # as Lightning's teardown leaves it
            tracker.enter(f"{EXPORT}:gather")
            full_state(trained[0])
        names = {*tracker.peaks, *tracker.received}
        return {
            name: Counter(
                {
                    ALIVE: sum(tracker.peaks.get(name, {}).values()),
                    RECEIVED: tracker.received[name],
                }
            )
            for name in sorted(names)
            if ":" in name
        }

    def _start(self) -> None:
        run, tracker = self.run, self.tracker
        roots = {model.root: kind for kind, model in reversed(self.built.items())}
        for number, (root, kind) in enumerate(roots.items()):
            tracker.enter(f"{START}:{number}")
            shard(
                root,
                self.place,
                frozen=kind not in run.spec.trains,
                compute_dtype=run.style.compute_dtype,
                prepare=self._given,
            )
        tracker.enter(f"{START}:end")

    def _given(self, unit: nn.Module) -> None:
        """Do to the counts what `ReadWeights.give` does to memory."""
        made: dict[int, Tensor] = {}
        for _, (store, key) in list(tensors_of(unit)):
            own = store[key]
            if not own.is_meta:
                continue
            if id(own) not in made:
                whole = torch.empty(own.shape, dtype=own.dtype, device="cpu")
                self.tracker.received[self.tracker.segment] += _size(whole)
                parameter = isinstance(own, nn.Parameter)
                made[id(own)] = nn.Parameter(whole, own.requires_grad) if parameter else whole
            store[key] = made[id(own)]

    def _roll_out(self) -> None:
        run, tracker = self.run, self.tracker
        policy = self.built[POLICY]
        gathered = partial(unsharded, layers=not run.served)
        tracker.enter(f"{GENERATE}:gather")
        with torch.no_grad(), autocast(run.style), gathered(policy.root):
            with policy.generating() as network:
                if run.served:
                    for _ in named_weights(network):
                        pass
                else:
                    generate(
                        network,
                        *(run.rows, run.prompt_length, run.response_length, run.style),
                        read_at_once=run.read_at_once,
                        enter=lambda step: tracker.enter(f"{GENERATE}:{step}"),
                        tracker=tracker,
                    )
            tracker.enter(f"{GENERATE}:end")
        rows = run.rows_at_once(run.micro_batch_size, run.rows, run.length)
        for kind, model in self.built.items():
            scores = kind.startswith(REWARD)
            own = run.scoring.micro_batch_size if scores else rows
            together = run.rows_at_once(own, run.rows, run.length)
            asked = 1 if scores else run.response_length
            # Policy, reference and teacher are gathered once for all their micro-batches.
            at_once = kind in (POLICY, REFERENCE, TEACHER)
            tracker.enter(f"{SCORE}:{kind} gather")
            with torch.no_grad(), gathered(model.root) if at_once else nullcontext():
                tracker.times = -(-run.rows // together)
                self._pass(f"{SCORE}:{kind}", model, Rows(together, self._width, asked))
                tracker.times = 1

    def _update(self, optimizer: torch.optim.Optimizer, *, times: int) -> None:
        """Take one optimizer step; an iteration takes so many."""
        run, tracker = self.run, self.tracker
        asked = run.response_length if run.spec.rolls_out else run.length
        batch = Rows(run.micro_rows, self._width, asked if run.spec.trains_policy else 1)
        # The first micro-batch, and one that finds gradients.
        for passes in (1, run.num_micro_batches - 1):
            tracker.times = times * passes
            for kind in run.spec.trains if passes else ():
                self._pass(f"{UPDATE}:{kind}", self.built[kind], batch, train=True)
        tracker.times = times
        tracker.enter(f"{UPDATE}:norm")
        for group in optimizer.param_groups:
            clip_grad_norm(group["params"], 1.0)
        tracker.enter(f"{UPDATE}:step")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        tracker.times = 1

    def _pass(self, name: str, model: Any, batch: Rows, *, train: bool = False) -> None:
        tracker = self.tracker
        scalar = isinstance(model, ScalarHeadModel)
        tracker.enter(f"{name} embeddings")
        with (
            torch.set_grad_enabled(train),
            autocast(self.run.style),
            layers_marked(model, tracker, prefix=f"{name} "),
        ):
            entropy = not scalar and (not train or self.run.with_entropy)
            loss = loss_of(model, batch, entropy)
            if train:
                tracker.enter(f"{name} loss")
                loss.backward()

    @property
    def _width(self) -> int:
        return -(-self.run.length // BUCKET) * BUCKET
