"""Report of a plan: phases, models, whether the run fits, and settings that would make it fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from rlhf_lightning.app.memory_plan.phases import Phase, Plan, plan
from rlhf_lightning.app.memory_plan.run import Run
from rlhf_lightning.app.memory_plan.simulation import Simulation
from rlhf_lightning.app.memory_plan.sizes import GIB
from rlhf_lightning.hparams import LoraHparams, Precision

# CUDA's context, cuBLAS's workspaces and NCCL's buffers: assumed, as it depends on the card.
CUDA_RUNTIME = GIB
WORTH = 0.99  # of the peak: what saves less than one part in a hundred is not worth a line
DEVICES = (2, 4, 8, 16, 32, 64)
SPEED, SERVERS, RESULT, HARDWARE, TASK = (
    "slower, the same result",
    "servers with memory of their own",
    "changes what is trained",
    "more devices",
    "changes the task",
)


@dataclass(frozen=True)
class Choice:
    """Settings that would change the memory of a run.

    Args:
        settings: overrides for the command line.
        total: bytes on one device with them.
        phase: the phase that then takes most.
        fits: whether that is within the device's memory; None if that is unknown.
        cost: side effects of the settings.
    """

    settings: tuple[str, ...]
    total: int
    phase: str
    fits: bool | None
    cost: str


@dataclass(frozen=True)
class Report:
    """Memory of a run on one device, in bytes.

    Args:
        about: the run in words.
        device: kind of device, `cpu` or `cuda`.
        num_devices: number of devices that train together.
        device_memory: memory of one device, or None if it is unknown.
        models: bytes of weights, by model.
        phases: part -> bytes of each phase, at its peak.
        peak_phase: the phase that takes most.
        runtime: memory of a process on a GPU before its first tensor; 0 on a CPU, where only
            tensors are counted.
        total: bytes at the peak, runtime included.
        fits: whether `total` is within `device_memory`.
        choices: settings that would change it, the least intrusive first.
        together: the first of them that suffice together, if one alone does not.
        notes: assumptions of the plan.
        simulated: one rank of a run whose models are sharded, if requested.
    """

    about: Mapping[str, str]
    device: str
    num_devices: int
    device_memory: int | None
    models: Mapping[str, int]
    phases: Mapping[str, Mapping[str, int]]
    peak_phase: str
    runtime: int
    total: int
    fits: bool | None
    choices: Sequence[Choice]
    together: Choice | None
    notes: Sequence[str]
    simulated: Simulation | None = None


@dataclass(frozen=True)
class Option:
    """Other settings, their cost, the run with them and, once it is planned, its peak."""

    settings: tuple[str, ...]
    cost: str
    run: Run
    peak: Phase | None = None

    @property
    def total(self) -> int:
        """Bytes of the peak, without the runtime."""
        return 0 if self.peak is None else self.peak.total


def make_report(run: Run, device_memory: int | None, notes: Sequence[str]) -> Report:
    """Return the report of `run` on devices of `device_memory` bytes."""
    planned = plan(run)
    runtime = 0 if run.device == "cpu" else CUDA_RUNTIME
    budget = None if device_memory is None else device_memory - runtime
    fits = None if budget is None else planned.peak.total <= budget
    steps = [*STEPS, _shorter]
    found = [best for step in steps if (best := _best(step(run, planned), planned, budget))]
    enough = None
    if budget is not None and not fits and not any(best.total <= budget for best in found):
        enough = _together(run, planned, budget)

    def choice(option: Option) -> Choice:
        assert option.peak is not None
        fitting = None if budget is None else option.total <= budget
        name, total = option.peak.name, option.total + runtime
        return Choice(option.settings, total, name, fitting, option.cost)

    return Report(
        about=describe(run, planned),
        device=run.device,
        num_devices=run.num_devices,
        device_memory=device_memory,
        models=dict(planned.models),
        phases={phase.name: dict(phase.parts) for phase in planned.phases},
        peak_phase=planned.peak.name,
        runtime=runtime,
        total=planned.peak.total + runtime,
        fits=fits,
        choices=[choice(option) for option in found],
        together=None if enough is None else choice(enough),
        notes=list(notes),
    )


def describe(run: Run, planned: Plan) -> dict[str, str]:
    """Return the run in words, by topic."""
    config = run.shape.config()
    lora = run.style.lora
    trained = "all weights" if lora is None else f"LoRA, r={lora.r}, {lora.target_modules}"
    lengths = f"{run.length} tokens"
    if run.spec.rolls_out:
        lengths = f"{run.prompt_length} + {run.response_length} tokens"
    share = run.micro_rows // run.sequences_per_row
    rows = "pairs" if run.sequences_per_row == 2 else "rows"
    where = f"{run.num_devices} x {run.device}"
    if run.num_devices > 1:
        where += f", {run.strategy}"
    compute: str = run.style.precision
    if run.style.compute_dtype is not None:
        compute = f"{compute}, gathered in {str(run.style.compute_dtype).removeprefix('torch.')}"
    if run.style.activation_checkpointing:
        compute += ", activation checkpointing"
    model = (
        f"{config.model_type}, {planned.elements / 1e6:,.1f} M weights, "
        f"{run.shape.num_layers} layers, vocabulary {run.shape.vocab_size:,}"
    )
    return {
        "stage": f"{run.title}, {trained}",
        "model": model,
        "batch": f"{run.batch_size} {rows} of up to {lengths}, {share} at once",
        "compute": compute,
        "devices": where,
    }


def _together(run: Run, planned: Plan, budget: int) -> Option | None:
    """Return the first steps that fit when they are taken together, or None."""
    settings: tuple[str, ...] = ()
    costs: list[str] = []
    for step in STEPS:
        best = _best(step(run, planned), planned, budget)
        if best is None:
            continue
        planned = plan(best.run)
        settings, run = settings + best.settings, best.run
        costs += [best.cost] if best.cost not in costs else []
        if best.total <= budget:
            return replace(best, settings=settings, cost=", ".join(costs))
    return None


def _best(options: Iterator[Option], planned: Plan, budget: int | None) -> Option | None:
    """Return the first option within `budget`, else the smallest; None if that saves nothing."""
    best: Option | None = None
    for option in options:
        here = replace(option, peak=plan(option.run).peak)
        fits = budget is not None and here.total <= budget
        if best is None or fits or here.total < best.total:
            best = here
        if fits:
            break
    return None if best is None or best.total > WORTH * planned.peak.total else best


def _halved(rows: int) -> Iterator[int]:
    while rows > 1:
        rows = -(-rows // 2)
        yield rows


def _micro_batches(run: Run, planned: Plan) -> Iterator[Option]:
    if planned.peak.name not in ("update", "score"):
        return
    for rows in _halved(run.micro_rows // run.sequences_per_row):
        settings: tuple[str, ...] = (f"module.{run.spec.settings}.micro_batch_size={rows}",)
        equal = run.scoring.micro_batch_size == run.micro_batch_size
        follows = equal and run.scoring.keys == ("scorer.micro_batch_size",)
        if run.scoring.kind == "model" and not follows:
            settings += tuple(f"{key}={rows}" for key in run.scoring.keys)
        scoring = replace(run.scoring, micro_batch_size=rows)
        yield Option(settings, SPEED, replace(run, micro_batch_size=rows, scoring=scoring))


def _later_batches(run: Run, planned: Plan) -> Iterator[Option]:
    """Smaller batches of what runs beside training, where that is the peak."""
    if planned.peak.name == "validate":
        sequences = run.spec.sequences_per_row
        for rows in _halved(run.validation_rows // sequences):
            settings = (f"data.validation_batch_size={rows}",)
            yield Option(settings, SPEED, replace(run, validation_rows=sequences * rows))
    if planned.peak.name == "evaluate" and run.evaluation is not None:
        for rows in _halved(run.evaluation.rows):
            changed = replace(run, evaluation=replace(run.evaluation, rows=rows))
            yield Option((f"evaluation.batch_size={rows}",), SPEED, changed)


def _recomputed(run: Run, _: Plan) -> Iterator[Option]:
    if not run.style.activation_checkpointing:
        style = replace(run.style, activation_checkpointing=True)
        settings = ("model.activation_checkpointing=true",)
        yield Option(settings, SPEED, replace(run, style=style))


def _with_precision(run: Run, precision: Precision, compute_dtype: torch.dtype | None) -> Run:
    lora = run.style.lora and replace(run.style.lora, base_precision=precision)
    style = replace(run.style, precision=precision, compute_dtype=compute_dtype, lora=lora)
    return replace(run, style=style)


def _rounded(run: Run, _: Plan) -> Iterator[Option]:
    if run.style.precision == "32-true" and run.style.compute_dtype is None:
        changed = _with_precision(run, "bf16-mixed", None)
        yield Option(("trainer.precision=bf16-mixed",), "bf16 compute", changed)


def _served(run: Run, planned: Plan) -> Iterator[Option]:
    gathers = planned.peak.name in ("generate", "score", "evaluate")
    if gathers and run.sharded > 1 and run.spec.rolls_out and not run.served:
        yield Option(("rollout=vllm",), SERVERS, replace(run, served=True))


def _adapted(run: Run, _: Plan) -> Iterator[Option]:
    own = run.scoring.kind == "model" and run.scoring.shape is None
    extra = ("scorer=reward_adapter",) if own else ()
    changed = replace(run, scoring=replace(run.scoring, kind="adapter", count=1)) if own else run
    if run.style.lora is None:
        style = replace(run.style, lora=LoraHparams(base_precision=run.style.precision))
        yield Option(("lora=lora", *extra), RESULT, replace(changed, style=style))
    elif own:
        yield Option(extra, RESULT, changed)


def _sharded(run: Run, _: Plan) -> Iterator[Option]:
    if run.device == "cpu":
        return
    prompts = run.batch_size // run.num_generations
    for count in DEVICES:
        if count > run.sharded and prompts % (count * run.num_minibatches) == 0:
            settings: tuple[str, ...] = ("strategy=fsdp", f"trainer.devices={count}")
            settings += (f"data.batch_size={prompts}",)  # a model may have another one under fsdp
            if run.style.autocast:
                settings += ("trainer.precision=32-true",)
            changed = _with_precision(run, "32-true", torch.bfloat16)
            changed = replace(changed, strategy="fsdp", num_devices=count, shard_over=None)
            yield Option(settings, HARDWARE, changed)


def _shorter(run: Run, _: Plan) -> Iterator[Option]:
    tokens = (run.response_length if run.spec.rolls_out else run.prompt_length) // 2
    if not tokens:
        return
    settings = (f"{run.spec.shortened_by}={tokens}",)
    if run.spec.rolls_out:
        evaluation = run.evaluation and replace(run.evaluation, max_new_tokens=tokens)
        changed = replace(run, response_length=tokens, evaluation=evaluation)
    else:
        changed = replace(run, prompt_length=tokens)
    yield Option(settings, TASK, changed)


# Settings that make a run smaller, the least intrusive first.
STEPS: tuple[Callable[[Run, Plan], Iterator[Option]], ...] = (
    _micro_batches,
    _later_batches,
    _recomputed,
    _rounded,
    _served,
    _adapted,
    _sharded,
)
