"""What is held in each phase of a run, part by part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rlhf_lightning.app.memory_plan import traces
from rlhf_lightning.app.memory_plan.generation import generation_peaks
from rlhf_lightning.app.memory_plan.run import Run
from rlhf_lightning.app.memory_plan.sharding import GATHERED, end_of_backward, gathered
from rlhf_lightning.app.memory_plan.traces import Rows
from rlhf_lightning.app.memory_plan.tracker import GRADIENTS
from rlhf_lightning.app.memory_plan.weights import COPIES, ELEMENTS, FROZEN, LARGEST, TRAINED
from rlhf_lightning.app.memory_plan.workbench import (
    BASE,
    POLICY,
    REFERENCE,
    REWARD,
    VALUE,
    Workbench,
    compute_dtype,
)
from rlhf_lightning.models.forward import BUCKET

BUCKET_ELEMENTS = 2**23  # of gradients that DDP's average exchanges at once
WEIGHTS = "weights"
OPTIMIZER = "optimizer state"
ROLLOUT = "rollout"
BUCKETS = "DDP buckets"
COPIED = "prepared weights"
STEP = "optimizer's temporaries"


@dataclass(frozen=True)
class Phase:
    """What is held at the peak of one phase, in bytes by part."""

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
    bench = Workbench(run)
    models = model_bytes(bench)
    optimizer = optimizer_bytes(bench)
    held = Counter({WEIGHTS: sum(models.values()), OPTIMIZER: optimizer})
    if run.strategy == "ddp" and run.num_devices > 1:
        held[BUCKETS] = trained_bytes(bench)  # Lightning's wrapper makes them for all gradients
    phases = []
    if run.spec.rolls_out:
        held[ROLLOUT] = rollout_bytes(run)
        generated = generation(bench, run.rows, run.response_length)
        phases += [Phase("generate", held + generated), Phase("score", held + scoring(bench))]
    phases.append(Phase("update", held + _largest(update(bench))))
    if run.validation_rows:
        phases.append(Phase("validate", held + validation(bench)))
    if run.evaluation is not None:
        phases.append(Phase("evaluate", _held_by_evaluation(bench, held) + evaluation(bench)))
    elements = sum(bench.weights(POLICY, part=part)[ELEMENTS] for part in bench.parts)
    return Plan(models, optimizer, tuple(phases), elements)


def model_bytes(bench: Workbench) -> dict[str, int]:
    """Return what the weights of each model take on one device, by the model's name."""
    run, found = bench.run, {}
    names = {POLICY: "policy", VALUE: "value model" if run.spec.trains_policy else "reward model"}
    if run.style.lora is not None:
        found["frozen base"] = bench.weights(POLICY, part=BASE)[FROZEN]
        names = {kind: f"{name}'s adapter" for kind, name in names.items()}
    for kind in run.spec.trains:
        found[names[kind]] = bench.weights(kind)[TRAINED]
    if run.spec.holds_reference and run.style.lora is None:
        found["reference"] = bench.weights(REFERENCE)[FROZEN]
    if run.scoring.kind == "model":
        found["reward model"] = bench.weights(REWARD)[FROZEN]
    elif run.scoring.kind == "adapter":
        found["reward model's adapter"] = bench.weights(VALUE)[TRAINED]
    return {name: -(-size // run.sharded) for name, size in found.items()}


def trained_bytes(bench: Workbench) -> int:
    """Return the bytes of all trained weights, not sharded: those of a full set of gradients."""
    return sum(bench.weights(kind)[TRAINED] for kind in bench.run.spec.trains)


def optimizer_bytes(bench: Workbench) -> int:
    """Return what the optimizer keeps between steps on one device."""
    return sum(_optimizer(bench, kind)["state"] for kind in bench.run.spec.trains)


def rollout_bytes(run: Run) -> int:
    """Return the bytes of a RolloutBatch: int64 ids, two masks and eight numbers a token."""
    return run.rows * (9 * run.length + (1 + 8 * 4) * run.response_length)


def update(bench: Workbench) -> Iterator[Counter[str]]:
    """Yield what is held beside weights and optimizer: in each backward, and in the step."""
    run = bench.run
    kinds = run.spec.trains
    accumulated = run.num_micro_batches > 1
    gradients = {kind: -(-bench.weights(kind)[TRAINED] // run.sharded) for kind in kinds}
    everything = sum(gradients.values())
    for index, kind in enumerate(kinds):
        parts = Counter(_training(bench, kind, accumulated=accumulated or run.sharded > 1))
        if run.sharded > 1:
            parts[GRADIENTS] = everything
            parts += gathered(bench, (kind,), backward=True)
            yield Counter({GRADIENTS: everything}) + end_of_backward(bench, kind)
        elif accumulated:
            parts[GRADIENTS] = everything
        else:
            parts[GRADIENTS] += sum(gradients[done] for done in kinds[:index])
        yield parts
    step = Counter({GRADIENTS: everything})
    step[STEP] = sum(_optimizer(bench, kind)["step"] for kind in kinds)
    yield step
    if run.strategy == "ddp":
        largest = max(bench.weights(kind)[LARGEST] for kind in kinds)
        exchanged = 4 * min(BUCKET_ELEMENTS + largest, everything // 4)
        yield Counter({GRADIENTS: everything, STEP: exchanged})


def generation(bench: Workbench, rows: int, new_tokens: int) -> Counter[str]:
    """Return what answering `rows` prompts holds."""
    run = bench.run
    found = Counter(
        bench.peak(
            POLICY,
            lambda model: generation_peaks(
                model,
                rows,
                run.prompt_length,
                new_tokens,
                run.style,
                read_at_once=run.read_at_once,
            ),
        )
    )
    found[COPIED] = bench.weights(POLICY)[COPIES]
    if run.style.lora is not None:
        found[COPIED] = sum(bench.weights(POLICY, part=part)[COPIES] for part in bench.parts)
    if run.sharded > 1:
        if run.device != "cpu":  # they are gathered in the dtype that generation wants
            del found[COPIED]
        size = compute_dtype(run.style).itemsize
        elements = sum(bench.weights(POLICY, part=part)[ELEMENTS] for part in bench.parts)
        found[GATHERED] = elements * size
    return +found


def scoring(bench: Workbench) -> Counter[str]:
    """Return what the forwards between generation and update hold: the largest of them."""
    run = bench.run
    together = min(run.micro_batch_size or run.rows, run.rows)
    rows = Rows(together, _padded(run.length), run.response_length)
    kinds = [POLICY, VALUE]
    candidates = [
        _forward(bench, kind, rows, with_entropy=kind == POLICY, several=True) for kind in kinds
    ]
    if run.style.lora is None:
        candidates.append(_forward(bench, REFERENCE, rows, several=True))
    if run.scoring.kind == "model":
        together = min(run.scoring.micro_batch_size or run.rows, run.rows)
        length = _padded(run.scoring.max_length or run.length)
        candidates.append(_forward(bench, REWARD, Rows(together, length, 1)))
    parts = _largest(candidates)
    return parts + gathered(bench, run.spec.trains, backward=False)


def validation(bench: Workbench) -> Counter[str]:
    """Return what a validation batch holds."""
    run = bench.run
    (kind,) = run.spec.trains
    asked = run.length if kind == POLICY else 1
    rows = Rows(run.validation_rows, _padded(run.length), asked)
    found = _forward(bench, kind, rows)
    return found + gathered(bench, (kind,), backward=False)


def evaluation(bench: Workbench) -> Counter[str]:
    """Return what sampling and comparing answers holds when training is over."""
    run = bench.run
    assert run.evaluation is not None
    rows, new_tokens = run.evaluation.rows, run.evaluation.max_new_tokens
    candidates = [generation(bench, rows, new_tokens)]
    if run.spec.trains_policy:
        together = min(run.evaluation.micro_batch_size or rows, rows)
        width = _padded(run.prompt_length + new_tokens)
        compared = Rows(together, width, new_tokens)
        candidates.append(_forward(bench, POLICY, compared, with_entropy=False))
    return _largest(candidates)


def _held_by_evaluation(bench: Workbench, held: Counter[str]) -> Counter[str]:
    run = bench.run
    if run.evaluation is not None and run.evaluation.during_training:
        return held
    start = 0
    if not run.spec.holds_reference and run.style.lora is None:  # the policy that it started from
        start = -(-bench.weights(REFERENCE)[FROZEN] // run.sharded)
    if run.device == "cpu":  # training's gradients and optimizer state are freed before
        return Counter({part: n for part, n in held.items() if part != OPTIMIZER}) + Counter(
            {WEIGHTS: start}
        )
    # Lightning moves what it trained to the CPU after `fit`; what is compared comes back.
    models = model_bytes(bench)
    models.pop("value model", None)
    return Counter({WEIGHTS: sum(models.values()) + start})


def _training_rows(run: Run) -> Rows:
    answered = run.response_length if run.spec.rolls_out else run.length
    asked = answered if run.spec.trains_policy else 1
    return Rows(run.micro_rows, _padded(run.length), asked)


def _training(bench: Workbench, kind: str, *, accumulated: bool) -> dict[str, int]:
    run = bench.run
    rows = _training_rows(run)
    in_place = run.device == "cpu" and run.sharded == 1
    return bench.peak(
        kind,
        lambda model: traces.training_peaks(
            model,
            rows,
            run.style,
            accumulated=accumulated,
            in_place=in_place,
            with_entropy=run.with_entropy,
        ),
    )


def _forward(
    bench: Workbench, kind: str, rows: Rows, *, with_entropy: bool = False, several: bool = False
) -> Counter[str]:
    return Counter(
        bench.peak(
            kind,
            lambda model: traces.forward_peaks(
                model, rows, bench.run.style, with_entropy=with_entropy, several=several
            ),
        )
    )


def _optimizer(bench: Workbench, kind: str) -> dict[str, int]:
    """Return bytes of the `state` that is kept and of what a `step` holds beside it."""
    peaks = bench.peaks(
        kind, lambda model: traces.optimizer_peaks(model, bench.run.optimizer), as_held=True
    )
    state = sum(peaks["state"].values())
    step = max(sum(peaks["step"].values()) - state, 0)
    return {"state": -(-state // bench.run.sharded), "step": -(-step // bench.run.sharded)}


def _largest(candidates: Iterator[Counter[str]] | list[Counter[str]]) -> Counter[str]:
    return max(candidates, key=lambda parts: parts.total())


def _padded(length: int) -> int:
    return -(-length // BUCKET) * BUCKET
