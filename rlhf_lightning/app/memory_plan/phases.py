"""Bytes that are held in each phase of a run, part by part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from rlhf_lightning.app.memory_plan import passes
from rlhf_lightning.app.memory_plan.models import (
    COPIES,
    FROZEN,
    LARGEST,
    POLICY,
    REFERENCE,
    REWARD,
    TEACHER,
    TRAINED,
    VALUE,
    FakeModels,
)
from rlhf_lightning.app.memory_plan.passes import Rows
from rlhf_lightning.app.memory_plan.run import Run
from rlhf_lightning.app.memory_plan.tracker import GRADIENTS
from rlhf_lightning.models.forward import BUCKET

BUCKET_ELEMENTS = 2**23  # of gradients that DDP's average exchanges at once
WEIGHTS = "weights"
OPTIMIZER = "optimizer state"
ROLLOUT = "rollout"
BUCKETS = "DDP buckets"
COPIED = "prepared weights"
GATHERED = "gathered weights"
STEP = "optimizer's temporaries"


@dataclass(frozen=True)
class Phase:
    """Bytes that are held at the peak of one phase, by part."""

    name: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Plan:
    """The bytes of tensors that a run holds on one device, without its runtime.

    Args:
        models: bytes of each model's weights.
        optimizer: bytes of the optimizer's state.
        phases: in the order in which they come.
        elements: weights of the policy.
    """

    models: Mapping[str, int]
    optimizer: int
    phases: tuple[Phase, ...]
    elements: int

    @property
    def peak(self) -> Phase:
        """The phase that takes most."""
        return max(self.phases, key=lambda phase: phase.total)


def plan(run: Run) -> Plan:
    """Return what the tensors of `run` take on one of its devices."""
    parts = Parts(run)
    models, kinds = parts.models(), run.spec.trains
    optimizer = sum(parts.optimizer(kind)["state"] for kind in kinds)
    held = Counter({WEIGHTS: sum(models.values()), OPTIMIZER: optimizer})
    if run.strategy == "ddp" and run.num_devices > 1:
        # Lightning's wrapper makes them for all gradients.
        held[BUCKETS] = sum(parts.fake.weights(kind)[TRAINED] for kind in kinds)
    phases = []
    if run.spec.rolls_out:
        # int64 ids, two masks and eight numbers a token; a teacher's is one more
        numbers = 8 + (run.teacher is not None)
        held[ROLLOUT] = run.rows * (9 * run.length + (1 + numbers * 4) * run.response_length)
        if run.teacher is not None and run.divergence is not None:
            states = run.response_length * int(run.teacher.config().hidden_size)
            held[ROLLOUT] += 4 * run.rows * states
        generated = parts.generation(run.rows, run.response_length)
        phases += [Phase("generate", held + generated), Phase("score", held + parts.scoring())]
    phases.append(Phase("update", held + _largest(parts.update())))
    if run.validation_rows:
        phases.append(Phase("validate", held + parts.validation()))
    if run.evaluation is not None:
        found = parts.held_by_evaluation(held) + parts.evaluation()
        phases.append(Phase("evaluate", found))
    return Plan(models, optimizer, tuple(phases), parts.fake.total(POLICY))


class Parts:
    """Bytes on one device of what a run holds, measured on fake models."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.fake = FakeModels(run)

    def models(self) -> dict[str, int]:
        """Return what the weights of each model take, by the model's name."""
        run, weights = self.run, self.fake.weights
        value = "value model" if run.spec.trains_policy else "reward model"
        names, found = {POLICY: "policy", VALUE: value}, {}
        if run.style.lora is not None:
            found["frozen base"] = weights(POLICY, base=True)[FROZEN]
            names = {kind: f"{name}'s adapter" for kind, name in names.items()}
        for kind in run.spec.trains:
            found[names[kind]] = weights(kind)[TRAINED]
        if run.spec.rolls_out and run.style.lora is None:
            found["reference"] = weights(REFERENCE)[FROZEN]
        if run.teacher is not None:
            found["teacher"] = weights(TEACHER)[FROZEN]
        count = run.scoring.count
        if run.scoring.kind == "model":
            name = "reward model" if count == 1 else f"{count} reward models"
            found[name] = count * weights(REWARD)[FROZEN]
        elif run.scoring.kind == "adapter":
            name = "reward model's adapter" if count == 1 else f"{count} reward models' adapters"
            found[name] = count * weights(VALUE)[TRAINED]
        return {name: self._share(size) for name, size in found.items()}

    def optimizer(self, kind: str) -> dict[str, int]:
        """Return bytes of the `state` that is kept and of what a `step` holds beside it."""
        build = self.run.optimizer
        peaks = self.fake.peaks(kind, lambda m: passes.optimizer_peaks(m, build), as_held=True)
        state = sum(peaks["state"].values())
        step = max(sum(peaks["step"].values()) - state, 0)
        return {"state": self._share(state), "step": self._share(step)}

    def update(self) -> Iterator[Counter[str]]:
        """Yield what is held beside weights and optimizer: in each backward, and in the step."""
        run, kinds = self.run, self.run.spec.trains
        sharded, accumulated = run.sharded > 1, run.num_micro_batches > 1
        gradients = {kind: self._share(self.fake.weights(kind)[TRAINED]) for kind in kinds}
        everything = sum(gradients.values())
        for index, kind in enumerate(kinds):
            done = sum(gradients[other] for other in kinds[:index])
            for segment, live in self._training(kind, accumulated).items():
                parts = Counter(live)
                own = self._share(parts.pop(GRADIENTS, 0))
                if sharded:
                    backward = segment.startswith("backward")
                    parts += self._gathered((kind,), backward=backward)
                    if (taught := self._taught()) is not None and kind == POLICY:
                        head = taught.vocabulary * taught.hidden_size  # a copy, for the chunks
                        parts[GATHERED] += head * taught.dtype.itemsize
                yield +parts + Counter({GRADIENTS: everything if accumulated else done + own})
            if sharded:
                exchanged = everything if accumulated else done + gradients[kind]
                yield Counter({GRADIENTS: exchanged}) + self._end_of_backward(kind)
        step = sum(self.optimizer(kind)["step"] for kind in kinds)
        yield Counter({GRADIENTS: everything, STEP: step})
        if run.strategy == "ddp":
            largest = max(self.fake.weights(kind)[LARGEST] for kind in kinds)
            exchanged = 4 * min(BUCKET_ELEMENTS + largest, everything // 4)
            yield Counter({GRADIENTS: everything, STEP: exchanged})

    def generation(self, rows: int, new_tokens: int) -> Counter[str]:
        """Return the memory of sampling `rows` responses, or of sending the weights to a server."""
        run = self.run
        if run.served:
            size, whole = run.style.matmul_dtype.itemsize, self.fake.weights(POLICY)[LARGEST]
            sent = self._outside_layers(POLICY) * size + whole * 4 if run.sharded > 1 else 0
            return +Counter({GATHERED: sent})
        found = self.fake.peak(
            POLICY,
            passes.generation_peaks,
            *(rows, run.prompt_length, new_tokens, run.style),
            read_at_once=run.read_at_once,
        )
        found[COPIED] = self.fake.total(POLICY, COPIES)
        if run.sharded > 1:
            if run.device != "cpu":  # they are gathered in the dtype that generation wants
                del found[COPIED]
            found[GATHERED] = self.fake.total(POLICY) * run.style.matmul_dtype.itemsize
        return +found

    def scoring(self) -> Counter[str]:
        """Return what the forwards between generation and update hold: the largest of them."""
        run = self.run
        together = run.rows_at_once(run.micro_batch_size, run.rows, run.length)
        rows = Rows(together, _padded(run.length), run.response_length)
        siblings: tuple[str, ...] = (REFERENCE,) if run.style.lora is None else ()
        siblings = siblings if run.teacher is None else (*siblings, TEACHER)
        candidates = [
            self._forward(kind, rows, with_entropy=kind == POLICY)
            for kind in (POLICY, VALUE, *siblings)
        ]
        if run.scoring.kind == "model":
            length = _padded(run.scoring.max_length or run.length)
            together = run.rows_at_once(run.scoring.micro_batch_size, run.rows, length)
            candidates.append(self._forward(REWARD, Rows(together, length, 1)))
            siblings = (*siblings, REWARD)
        gathered = self._gathered(run.spec.trains, backward=False)
        if run.sharded > 1 and not run.served:  # policy and reference as a whole, as to generate
            whole = self.fake.total(POLICY) + (self._kept() if siblings else 0)
            whole *= run.style.matmul_dtype.itemsize
            gathered[GATHERED] = max(gathered[GATHERED], whole)
        computing = _largest(candidates) + gathered
        return _largest([computing, *(self._gathered_beside(kind) for kind in siblings)])

    def validation(self) -> Counter[str]:
        """Return what a validation batch holds."""
        run = self.run
        (kind,) = run.spec.trains
        asked = run.length if kind == POLICY else 1
        found = self._forward(kind, Rows(run.validation_rows, _padded(run.length), asked))
        return found + self._gathered((kind,), backward=False)

    def evaluation(self) -> Counter[str]:
        """Return the memory of sampling and comparing responses after training."""
        run, evaluation = self.run, self.run.evaluation
        assert evaluation is not None
        rows, new_tokens = evaluation.rows, evaluation.max_new_tokens
        candidates = [self.generation(rows, new_tokens)]
        if run.spec.trains_policy:
            length = _padded(run.prompt_length + new_tokens)
            together = run.rows_at_once(evaluation.micro_batch_size, rows, length)
            compared = Rows(together, length, new_tokens)
            candidates.append(self._forward(POLICY, compared))
        return _largest(candidates)

    def held_by_evaluation(self, held: Counter[str]) -> Counter[str]:
        """Return what is left of `held` while responses are compared."""
        run = self.run
        if run.evaluation is not None and run.evaluation.during_training:
            return held
        start = 0
        if not run.spec.rolls_out and run.style.lora is None:  # where the policy started
            start = self._share(self.fake.weights(REFERENCE)[FROZEN])
        if run.device == "cpu":  # training's gradients and optimizer state are freed before
            left = Counter({part: size for part, size in held.items() if part != OPTIMIZER})
            return left + Counter({WEIGHTS: start})
        # Lightning moves what it trained to the CPU after `fit`; what is compared comes back.
        models = self.models()
        models.pop("value model", None)
        return Counter({WEIGHTS: sum(models.values()) + start})

    def _share(self, size: int) -> int:
        return -(-size // self.run.sharded)

    def _training(self, kind: str, accumulated: bool) -> dict[str, dict[str, int]]:
        run = self.run
        answered = run.response_length if run.spec.rolls_out else run.length
        asked = answered if run.spec.trains_policy else 1
        rows = Rows(run.micro_rows, _padded(run.length), asked)
        return self.fake.peaks(
            kind,
            lambda model: passes.training_peaks(
                model,
                *(rows, run.style),
                accumulated=accumulated,
                in_place=run.device == "cpu" and run.sharded == 1,
                with_entropy=run.with_entropy,
                taught=self._taught() if kind == POLICY else None,
            ),
        )

    def _taught(self) -> passes.TeacherHead | None:
        run = self.run
        if run.teacher is None or run.divergence is None:
            return None
        config = run.teacher.config()
        size = int(config.vocab_size), int(config.hidden_size)
        return passes.TeacherHead(*size, run.style.matmul_dtype, run.divergence)

    def _forward(self, kind: str, rows: Rows, **options: bool) -> Counter[str]:
        return self.fake.peak(kind, passes.forward_peaks, rows, self.run.style, **options)

    def _gathered(self, kinds: tuple[str, ...], *, backward: bool) -> Counter[str]:
        """Return what FSDP2 gathers: all but the layers for good, layers as they are needed.

        One layer computes, the next one is on its way, and its flat copy is alive meanwhile; in
        the backward pass a layer's gradients are there whole, once as computed and once in fp32 to
        be sent, and the head's wait for those of the embeddings.
        """
        if self.run.sharded == 1:
            return Counter()
        size = self.run.style.matmul_dtype.itemsize
        gradients = backward and self.run.style.lora is None  # those of adapters are small
        rest = sum(self._outside_layers(kind) for kind in kinds)
        layer = max(self.fake.layer_elements(kind) for kind in kinds)
        total = rest * (size + size * gradients)
        return Counter({GATHERED: total + layer * (3 * size + (size + 4) * gradients)})

    def _gathered_beside(self, kind: str) -> Counter[str]:
        """Return what is whole while a frozen model gathers what it has outside of its layers.

        That is there twice, as it comes and cut into tensors.
        """
        if self.run.sharded == 1:
            return Counter()
        size = self.run.style.matmul_dtype.itemsize
        total = 2 * self._outside_layers(kind) + 2 * self.fake.layer_elements(kind)
        return Counter({GATHERED: size * (self._kept() + total)})

    def _kept(self) -> int:
        """Return the weights outside of layers that stay whole after a trained model's pass.

        The policy's are freed when its pass ends.
        """
        return sum(self._outside_layers(kind) for kind in self.run.spec.trains if kind != POLICY)

    def _end_of_backward(self, kind: str) -> Counter[str]:
        """Return what is whole when the last gradients, of embeddings and head, are sent."""
        if self.run.style.lora is not None:
            return Counter()
        size = self.run.style.matmul_dtype.itemsize
        return Counter({GATHERED: self._outside_layers(kind) * (2 * size + 4)})

    def _outside_layers(self, kind: str) -> int:
        """Return the weights of a model that are in no decoder layer."""
        layers = self.fake.shape_of(kind).num_layers * self.fake.layer_elements(kind)
        return self.fake.total(kind) - layers


def _largest(candidates: Iterable[Counter[str]]) -> Counter[str]:
    return max(candidates, key=lambda parts: parts.total())


def _padded(length: int) -> int:
    return -(-length // BUCKET) * BUCKET
