"""What would make a run fit: other settings, each with the figure it would give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from rlhf_lightning.app.memory_plan.phases import Plan, plan
from rlhf_lightning.app.memory_plan.run import Run
from rlhf_lightning.hparams import LoraHparams

WORTH = 0.99  # of the peak: what saves less than one part in a hundred is not worth a line
DEVICES = (2, 4, 8, 16, 32, 64)
SPEED, RESULT, HARDWARE, TASK = (
    "slower, the same result",
    "changes what is trained",
    "more devices",
    "changes the task",
)


@dataclass(frozen=True)
class Suggestion:
    """Other settings and what the run would take with them.

    Args:
        settings: overrides for the command line.
        cost: what else they change.
        peak: bytes of the largest phase on one device, without its runtime.
        phase: that phase.
        run: with these settings.
    """

    settings: tuple[str, ...]
    cost: str
    peak: int
    phase: str
    run: Run


Option = tuple[tuple[str, ...], str, Run]


def suggestions(run: Run, planned: Plan, budget: int | None) -> list[Suggestion]:
    """Return what makes `run` smaller, the least intrusive first.

    Args:
        run: as configured.
        planned: what it takes.
        budget: bytes that a device has for it, or None if nobody knows.
    """
    kinds = (_micro_batches, _later_batches, _recomputed, _rounded, _adapted, _sharded)
    candidates = [options(run, planned) for options in kinds] + [_shorter(run)]
    found = [_first_that_fits(run, planned, options, budget) for options in candidates]
    return [s for s in found if s is not None and s.peak <= WORTH * planned.peak.total]


def together(run: Run, planned: Plan, budget: int) -> Suggestion | None:
    """Return the first suggestions that fit when they are taken together, or None.

    Args:
        run: as configured.
        planned: what it takes.
        budget: bytes that a device has for it.
    """
    steps: tuple[Callable[[Run, Plan], Iterator[Option]], ...]
    steps = (_micro_batches, _later_batches, _recomputed, _rounded, _adapted, _sharded)
    settings: tuple[str, ...] = ()
    costs: list[str] = []
    for step in steps:
        best = _first_that_fits(run, planned, step(run, planned), budget)
        if best is None or best.peak > WORTH * planned.peak.total:
            continue
        planned = plan(best.run)
        settings, run = settings + best.settings, best.run
        costs += [best.cost] if best.cost not in costs else []
        if best.peak <= budget:
            return replace(best, settings=settings, cost=", ".join(costs))
    return None


def _first_that_fits(
    run: Run, planned: Plan, options: Iterator[Option], budget: int | None
) -> Suggestion | None:
    """Return the first option within `budget`, else the smallest; options come in order."""
    smallest: Suggestion | None = None
    for settings, cost, other in options:
        phase = plan(other).peak
        here = Suggestion(settings, cost, phase.total, phase.name, other)
        if smallest is None or here.peak < smallest.peak:
            smallest = here
        if budget is not None and here.peak <= budget:
            return here
    return smallest


def _micro_batches(run: Run, planned: Plan) -> Iterator[Option]:
    rows = run.micro_rows // run.spec.sequences_per_row
    while planned.peak.name in ("update", "score") and rows > 1:
        rows = -(-rows // 2)
        settings: tuple[str, ...] = (f"module.{run.spec.settings}.micro_batch_size={rows}",)
        if run.scoring.kind == "model" and run.scoring.micro_batch_size != run.micro_batch_size:
            settings += (f"scorer.micro_batch_size={rows}",)
        scoring = replace(run.scoring, micro_batch_size=rows)
        yield settings, SPEED, replace(run, micro_batch_size=rows, scoring=scoring)


def _later_batches(run: Run, planned: Plan) -> Iterator[Option]:
    """Smaller batches of what runs beside training, where that is the peak."""
    rows = run.validation_rows
    while planned.peak.name == "validate" and rows > 1:
        rows = -(-rows // 2)
        yield (f"data.validation_batch_size={rows}",), SPEED, replace(run, validation_rows=rows)
    if planned.peak.name == "evaluate" and run.evaluation is not None:
        rows = run.evaluation.rows
        while rows > 1:
            rows = -(-rows // 2)
            changed = replace(run.evaluation, rows=rows)
            yield (f"evaluation.batch_size={rows}",), SPEED, replace(run, evaluation=changed)


def _recomputed(run: Run, planned: Plan) -> Iterator[Option]:
    del planned
    if not run.style.activation_checkpointing:
        style = replace(run.style, activation_checkpointing=True)
        yield ("model.activation_checkpointing=true",), SPEED, replace(run, style=style)


def _rounded(run: Run, planned: Plan) -> Iterator[Option]:
    del planned
    if run.style.precision == "32-true" and run.style.compute_dtype is None:
        yield ("trainer.precision=bf16-mixed",), "bf16 compute", _with_precision(run)


def _with_precision(run: Run) -> Run:
    lora = run.style.lora
    lora = None if lora is None else replace(lora, base_precision="bf16-mixed")
    return replace(run, style=replace(run.style, precision="bf16-mixed", lora=lora))


def _adapted(run: Run, planned: Plan) -> Iterator[Option]:
    del planned
    own = run.scoring.kind == "model" and run.scoring.shape is None
    scoring = replace(run.scoring, kind="adapter") if own else run.scoring
    extra = ("scorer=reward_adapter",) if own else ()
    if run.style.lora is None:
        lora = LoraHparams(base_precision=run.style.precision)
        changed = replace(run, style=replace(run.style, lora=lora), scoring=scoring)
        yield ("lora=lora", *extra), RESULT, changed
    elif own:
        yield extra, RESULT, replace(run, scoring=scoring)


def _sharded(run: Run, planned: Plan) -> Iterator[Option]:
    del planned
    if run.device == "cpu":
        return
    for count in DEVICES:
        if count > run.sharded and run.batch_size % (count * run.num_minibatches) == 0:
            settings: tuple[str, ...] = ("strategy=fsdp", f"trainer.devices={count}")
            if run.style.autocast:
                settings += ("trainer.precision=32-true",)
            yield settings, HARDWARE, sharded(run, count)


def sharded(run: Run, count: int) -> Run:
    """Return the run with every model sharded over `count` devices, computing in bf16."""
    import torch

    lora = run.style.lora
    lora = None if lora is None else replace(lora, base_precision="32-true")
    style = replace(run.style, precision="32-true", compute_dtype=torch.bfloat16, lora=lora)
    return replace(run, strategy="fsdp", num_devices=count, shard_over=None, style=style)


def _shorter(run: Run) -> Iterator[Option]:
    if run.spec.rolls_out:
        tokens = run.response_length // 2
        if tokens:
            evaluation = run.evaluation and replace(run.evaluation, max_new_tokens=tokens)
            changed = replace(run, response_length=tokens, evaluation=evaluation)
            yield (f"{run.spec.shortened_by}={tokens}",), TASK, changed
    elif run.prompt_length > 1:
        tokens = run.prompt_length // 2
        yield (f"{run.spec.shortened_by}={tokens}",), TASK, replace(run, prompt_length=tokens)
