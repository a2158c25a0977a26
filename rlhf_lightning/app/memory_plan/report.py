"""What is printed: phases, models, whether it fits, and what would change it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhf_lightning.app.memory_plan.advice import Suggestion, suggestions, together
from rlhf_lightning.app.memory_plan.phases import Plan, plan
from rlhf_lightning.app.memory_plan.run import Run
from rlhf_lightning.app.memory_plan.sizes import GIB

# CUDA's context, cuBLAS's workspaces and NCCL's buffers: assumed, as it depends on the card.
CUDA_RUNTIME = GIB


@dataclass(frozen=True)
class Choice:
    """Settings that would change what a run takes.

    Args:
        settings: overrides for the command line.
        total: bytes on one device with them.
        phase: the phase that then takes most.
        fits: whether that is within the device's memory; None if nobody knows it.
        cost: what else changes.
    """

    settings: tuple[str, ...]
    total: int
    phase: str
    fits: bool | None
    cost: str


@dataclass(frozen=True)
class Report:
    """What a run takes on one device, in bytes.

    Args:
        about: the run in words.
        device: `cpu` or `cuda`.
        num_devices: that train together.
        device_memory: of one, or None if nobody knows it.
        models: weights, by model.
        phases: part -> bytes of each phase, at its peak.
        peak_phase: the phase that takes most.
        runtime: what a process takes on a GPU before it holds a tensor; 0 on a CPU, where
            tensors alone are counted.
        total: of the peak, runtime included.
        fits: whether `total` is within `device_memory`.
        choices: what would change it, the least intrusive first.
        together: the first of them that are enough together, if one alone is not.
        notes: what was assumed.
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


def make_report(run: Run, device_memory: int | None, notes: Sequence[str]) -> Report:
    """Return the report of `run` on devices of `device_memory` bytes."""
    planned = plan(run)
    runtime = 0 if run.device == "cpu" else CUDA_RUNTIME
    budget = None if device_memory is None else device_memory - runtime
    total = planned.peak.total + runtime
    found = suggestions(run, planned, budget)
    fits = None if device_memory is None else total <= device_memory
    enough = None
    if budget is not None and not fits and not any(s.peak <= budget for s in found):
        enough = together(run, planned, budget)

    def choice(suggestion: Suggestion) -> Choice:
        new = suggestion.peak + runtime
        fitting = None if device_memory is None else new <= device_memory
        return Choice(suggestion.settings, new, suggestion.phase, fitting, suggestion.cost)

    return Report(
        about=describe(run, planned),
        device=run.device,
        num_devices=run.num_devices,
        device_memory=device_memory,
        models=dict(planned.models),
        phases={phase.name: dict(phase.parts) for phase in planned.phases},
        peak_phase=planned.peak.name,
        runtime=runtime,
        total=total,
        fits=fits,
        choices=[choice(s) for s in found],
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
    share = run.micro_rows // run.spec.sequences_per_row
    batch = f"{run.batch_size} {run.spec.rows} of up to {lengths}, {share} at once"
    where = f"{run.num_devices} x {run.device}"
    if run.num_devices > 1:
        where += f", {run.strategy}"
    compute = run.style.precision
    if run.style.compute_dtype is not None:
        compute = f"{compute}, gathered in {str(run.style.compute_dtype).removeprefix('torch.')}"
    if run.style.activation_checkpointing:
        compute += ", activation checkpointing"
    model = (
        f"{config.model_type}, {planned.elements / 1e6:,.1f} M weights, "
        f"{run.shape.num_layers} layers, vocabulary {run.shape.vocab_size:,}"
    )
    return {
        "stage": f"{run.spec.title}, {trained}",
        "model": model,
        "batch": batch,
        "compute": compute,
        "devices": where,
    }
