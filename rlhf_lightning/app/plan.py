"""The memory of a run, before it is launched: `rlhf_lightning.plan +experiment=...`.

It trains nothing and needs no network, no weights and no earlier stage: `models/memory.py` has the
formula, and the configs of the models the sizes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, PretrainedConfig

from rlhf_lightning.app.command_line import run_command, say
from rlhf_lightning.app.config.compose import ConfigError, choices
from rlhf_lightning.app.config.groups import PlanGroup
from rlhf_lightning.app.config.settings import PlanSettings, TrainSettings
from rlhf_lightning.app.config.targets import Node
from rlhf_lightning.app.evaluation import check_context_length, num_answered
from rlhf_lightning.models import memory
from rlhf_lightning.models.forward import BUCKET
from rlhf_lightning.models.gpu_kernels import KNOWN, has_liger
from rlhf_lightning.models.memory import Arithmetic, count_weights
from rlhf_lightning.models.micro_batching import TOKENS
from rlhf_lightning.models.quiet import quieten_transformers
from rlhf_lightning.rollout.generators.captured import (
    KEPT_SHARE,
    CapturedGenerator,
    why_not_captured,
)

GIB = 2**30
# CUDA's context, cuBLAS's workspaces and NCCL's buffers: assumed, as it depends on the card.
CUDA_RUNTIME = GIB
POLICY, SCALAR = "policy", "value"  # kinds of models that are trained
# Rows of the table, in its order; docs/scaling.md says what each is.
PARTS = (
    *("weights", "optimizer", "gradients", "gathered", "copies", "captured", "activations"),
    *("logits", "cache", "runtime"),
)
Parts = dict[str, int]


class Plan:
    """The bytes that a run holds on one of its devices.

    Args:
        settings: of the run.
        group: the device of the plan.

    Raises:
        ConfigError: if the config of a model cannot be found.
    """

    def __init__(self, settings: TrainSettings, group: PlanGroup) -> None:
        self.settings, self.group, self.spec = settings, group, settings.spec
        self.policy = policy_config(settings)
        check_context_length(settings, self.policy)
        data, strategy, self.lora = settings.data, settings.strategy, settings.lora
        self.device = _device(settings, group)
        self.world = settings.trainer.world_size
        self.shards = (strategy.shard_over or self.world) if strategy.name == "fsdp" else 1
        mixed = settings.trainer.precision == "bf16-mixed"
        rounded = self.shards > 1 and strategy.compute_dtype == "bfloat16"
        self.arithmetic: Arithmetic = "mixed" if mixed else "bf16" if rounded else "fp32"
        self.frozen: Arithmetic = "mixed" if mixed else "fp32"
        self.wide = 4 if self.arithmetic == "fp32" else 2
        key = "max_prompt_length" if self.spec.rolls_out else "max_length"
        self.prompt, self.response = int(data.arguments[key]), 0
        if self.spec.rolls_out:
            self.response = int(settings.all_hparams["sampling"].max_new_tokens)
        self.length = -(-(self.prompt + self.response) // BUCKET) * BUCKET
        self.paired = settings.sequences_per_row
        self.rows = self.paired * -(-data.num_rows // self.world)
        self.step_rows = -(-self.rows // settings.passes[1])
        self.vocabulary = int(self.policy.get_text_config().vocab_size)
        targets = "all-linear" if self.lora is None else self.lora.target_modules
        self.counts = count_weights(self.policy, targets)
        kinds = [POLICY] if self.spec.trains_policy else [SCALAR]
        kinds += [SCALAR] if hasattr(settings.hparams, "value_learning_rate") else []
        self.trained = {kind: self._trained(kind) for kind in kinds}

    @cached_property
    def memory(self) -> int | None:
        """The memory of one device, as given or as this machine has it; None if unknown."""
        if self.group.device_memory is not None:
            return self.group.device_memory
        if self.device == "cuda":
            here = torch.cuda.is_available()
            return torch.cuda.get_device_properties(0).total_memory if here else None
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // self.world

    @cached_property
    def models(self) -> Parts:
        """The bytes of each model's weights."""
        counts, own = self.counts, "" if self.lora is None else "'s adapter"
        found: Parts = {}
        if self.lora is not None:
            found["frozen base"] = counts.held(self.frozen, nf4=self.lora.quantization == "nf4")
        for kind, number in self.trained.items():
            name = "value model" if self.spec.rolls_out else "reward model"
            found[("policy" if kind == POLICY else name) + own] = 4 * number
        if self.spec.rolls_out and self.lora is None:
            found["reference"] = counts.held(self.frozen)
        teacher = self.settings.module.get("teacher")
        if teacher is not None and "://" not in teacher:
            found["teacher"] = count_weights(_config_at(teacher, self.policy)).held(self.frozen)
        if self.spec.rolls_out and self.settings.scorer is not None:
            for holds, size in self._scorers(self.settings.scorer.read("scorer")):
                name = "reward models" if holds == "model" else "reward adapters"
                found[name] = found.get(name, 0) + size
        return {name: -(-size // self.shards) for name, size in found.items()}

    @cached_property
    def phases(self) -> dict[str, Parts]:
        """The bytes of each part at the peak of each phase."""
        held = {"weights": sum(self.models.values()), "optimizer": self._share(memory.ADAM)}
        found: dict[str, Parts] = {}
        if self.spec.rolls_out:
            found["generate"] = held | self._generation(self.rows, self.response)
            held |= self._kept(found["generate"])
            scored = self._forward(self._together(self.rows), self.response)
            found["score"] = held | scored | self._sampler_weights()
        found["update"] = held | self._update(held)
        if not self.spec.rolls_out:
            found["validate"] = held | self._forward(self._validated(), self.prompt)
        asked, count = self.settings.evaluation, num_answered(self.settings)
        rows, tokens = min(asked.batch_size, count), asked.max_new_tokens
        if rows:
            held = {"weights": held["weights"]}  # the optimizer's state is dropped before
            if not self.spec.rolls_out and self.lora is None:  # the policy that it started from
                held["weights"] += self.counts.held(self.frozen) // self.shards
            if not self.spec.rolls_out and self.spec.is_scored and self.settings.scorer is not None:
                judges = self._scorers(self.settings.scorer.read("scorer"))  # whole on every rank
                held["weights"] += sum(size for _, size in judges)
            largest = self._generation(rows, tokens)
            if self.spec.trains_policy:
                compared = self._forward(self._together(rows), tokens)
                largest = max(largest, compared, key=lambda parts: sum(parts.values()))
            found["evaluate"] = held | largest
        runtime = {"runtime": CUDA_RUNTIME if self.device == "cuda" else 0}
        return {
            phase: {part: size for part in PARTS if (size := (parts | runtime).get(part))}
            for phase, parts in found.items()
        }

    @property
    def peak(self) -> str:
        """The phase that takes most."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def total(self) -> int:
        """The bytes of that phase."""
        return sum(self.phases[self.peak].values())

    def _sampler_weights(self) -> Parts:
        """Return the sharded policy as it is gathered to sample; a server gets it by layers."""
        if self.shards == 1 or self._is_served():
            return self._gathered(1)
        return {"gathered": self.wide * self.counts.total}

    def _is_served(self) -> bool:
        return getattr(self.settings.rollout.read("rollout").call, "sends_weights", False)

    def _trained(self, kind: str) -> int:
        width = 0 if kind == POLICY else int(self.policy.get_text_config().hidden_size)
        if self.lora is not None:
            return self.lora.r * self.counts.sides + width
        return self.counts.total + (0 if kind == POLICY else width - self.counts.own_head)

    def _share(self, size: int) -> int:
        return -(-size * sum(self.trained.values()) // self.shards)

    def _scorers(self, node: Node) -> Iterator[tuple[str, int]]:
        """Yield what each scorer of a sum holds: a model or an adapter, and its bytes."""
        parts = node.arguments.get("scorers")
        for part in parts.values() if isinstance(parts, Mapping) else ():
            yield from self._scorers(part)
        given, holds = node.arguments, getattr(node.call, "holds", None)
        if holds == "adapter":
            yield "adapter", 4 * self._trained(SCALAR)
        for source in given.get("sources", [given.get("source")]) if holds == "model" else ():
            counts = count_weights(_config_at(source, self.policy))
            follows = isinstance(given.get("load"), Node)
            arithmetic: Arithmetic = "bf16" if given.get("dtype") == "bfloat16" else "fp32"
            yield "model", counts.held(self.frozen if follows else arithmetic, trunk=True)

    def _together(self, rows: int) -> int:
        """Return how many of so many rows go through a model together."""
        asked = self.settings.hparams.micro_batch_size
        default = rows if self.device == "cpu" else max(TOKENS // self.length, 1)
        return min(asked * self.paired if asked else default, rows)

    def _validated(self) -> int:
        data, rows = self.settings.data, self.settings.data.get("validation_batch_size")
        rows = rows or 2 * max(data.batch_size // self.world, 1)
        return self.paired * min(int(rows), int(data.get("max_validation_rows") or rows))

    def _update(self, held: Parts) -> Parts:
        """Return what the last backward holds, or the optimizer step."""
        kernels = self.settings.model.kernels == "auto" and self.policy.model_type in KNOWN
        fuses = self.device == "cuda" and kernels
        each = memory.activation_bytes(
            self.policy,
            self.arithmetic,
            fused=("norms", "MLPs")[: fuses + (fuses and has_liger())],
            checkpointing=self.settings.model.activation_checkpointing,
        )
        rows = self._together(self.step_rows)
        everything = self._share(memory.GRADIENT)
        # A single micro-batch has those of models before the last, when that begins its backward.
        before = everything * (len(self.trained) - 1) // len(self.trained)
        parts = {"gradients": everything if rows < self.step_rows else before}
        parts |= self._gathered(3 if self.lora is None else 1)
        if self.arithmetic == "mixed" and self.device == "cuda" and self.lora is None:
            parts["copies"] = memory.COPY * self.counts.matrices * len(self.trained)
        if POLICY in self.trained:
            logits = rows * (self.response or self.prompt) * self.vocabulary
            # Of a frozen head there is a bf16 copy alone; a sharded one is among what is gathered.
            head = 0 if self.shards > 1 else self.counts.head // (1 if self.lora is None else 3)
            parts["logits"] = memory.head_bytes(logits, head, device=self.device)
        tokens = rows * self.length
        if self.settings.hparams.micro_batch_size is None and self.device == "cuda" and self.memory:
            room = memory.USABLE * (self.memory - CUDA_RUNTIME)
            room -= sum(held.values()) + sum(parts.values())
            tokens = max(min(tokens, int(room / each)), self.length)  # as `tokens_that_fit`
        parts["activations"] = tokens * each
        return max(parts, {"gradients": everything}, key=lambda part: sum(part.values()))

    def _generation(self, rows: int, tokens: int) -> Parts:
        """Return what sampling so many responses holds, or what sending the weights does."""
        counts, parts = self.counts, self._sampler_weights()
        if self._is_served():
            return parts
        each = memory.cache_bytes(self.policy, self.arithmetic)
        parts["cache"] = rows * (self.prompt + tokens) * each
        if self.device == "cpu":
            parts["copies"] = self.wide * (counts.matrices + counts.head)
        elif self.arithmetic == "mixed":
            whole = counts.matrices if self.lora is None else 0
            parts["copies"] = memory.COPY * (counts.head + whole)
        at_once = int(self.settings.rollout.get("prefill_tokens", TOKENS))
        read = min(rows * self.prompt, max(at_once, self.prompt))
        each = memory.forward_bytes(self.policy, self.arithmetic, self.prompt)
        # Logits, and sampling: their widened copy, probabilities and sums.
        logits = rows * self.vocabulary * (self.wide + 12)
        return parts | {"activations": read * each, "logits": logits}

    def _kept(self, generated: Parts) -> Parts:
        """Return what a captured generator keeps: its cache, and its copies of weights."""
        call, size = self.settings.rollout.read("rollout").call, generated.get("cache", 0)
        size += generated.get("copies", 0)
        is_small = self.shards == 1 and size <= KEPT_SHARE * (self.memory or 80 * GIB)
        captures = self.device == "cuda" and call is CapturedGenerator and is_small
        return {"captured": size} if captures and why_not_captured(self.policy) is None else {}

    def _forward(self, rows: int, asked: int) -> Parts:
        """Return what a forward without a graph holds: its widest layer, or its logits."""
        each = memory.forward_bytes(self.policy, self.arithmetic, self.length)
        parts = {"activations": rows * self.length * each}
        if self.spec.trains_policy:
            logits = rows * asked * self.vocabulary
            size = memory.head_bytes(logits, self.counts.head // 3, device=self.device, tables=2)
            parts = max(parts, {"logits": size}, key=lambda part: sum(part.values()))
        return parts | self._gathered(1)

    def _gathered(self, times: int) -> Parts:
        """Return what FSDP2 holds whole: all but the layers, and two of those.

        Args:
            times: bf16 weights are one, their gradients in fp32 two more.
        """
        if self.shards == 1:
            return {}
        layers = self.counts.layer * int(self.policy.get_text_config().num_hidden_layers)
        outside = self.counts.total - layers
        return {"gathered": times * self.wide * (outside + 2 * self.counts.layer)}


def policy_config(settings: TrainSettings) -> PretrainedConfig:
    """Return the config of the policy: of the model's shape, else of the folder it starts from.

    Raises:
        ConfigError: if there is none, or if transformers does not know it.
    """
    model, start, key = settings.model, settings.start, settings.spec.starts_from
    fields = dict(model.shape or {})
    if fields.get("vocab_size") == "???" and model.tokenizer is not None:
        fields["vocab_size"] = len(model.tokenizer.build())
    try:
        if model.shape is None and start is not None and (Path(start) / "config.json").is_file():
            return _read_config(start)
        if model.shape is not None:
            return AutoConfig.for_model(**fields)
    except (OSError, KeyError, ValueError, TypeError, AttributeError) as error:
        place = "model.shape" if model.shape else f"{start}/config.json"
        raise ConfigError(f"{place} makes no config of transformers: {error}") from error
    named = ", ".join(name for name in choices("model") if name not in ("pretrained", "demo"))
    raise ConfigError(
        f"model={model.name or '?'} has no shape, and artifacts.{key}={start} is no local folder "
        f"with a config.json: use model=NAME (one of {named}), a folder, or model.shape"
    )


def _config_at(source: Any, policy: PretrainedConfig) -> PretrainedConfig:
    """Return the config of a local folder; the policy's where there is none yet."""
    is_there = source is not None and (Path(source) / "config.json").is_file()
    return _read_config(source) if is_there else policy


def _read_config(folder: str | Path) -> PretrainedConfig:
    offline: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    config: PretrainedConfig = AutoConfig.from_pretrained(folder, **offline)
    return config


def _device(settings: TrainSettings, group: PlanGroup) -> str:
    if group.device != "auto":
        return group.device
    accelerator = settings.trainer.accelerator
    asked = accelerator in ("gpu", "cuda") or group.device_memory is not None
    return "cuda" if accelerator != "cpu" and (asked or torch.cuda.is_available()) else "cpu"


def _smaller(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Yield settings that need less memory, the least intrusive first, and the plan with them."""
    rows = plan._together(plan.step_rows) // plan.paired
    key = f"module.{plan.settings.stage}.micro_batch_size"
    changes: dict[str, dict[str, Any]] = {
        f"{key}={max(rows // 2, 1)}": {key: max(rows // 2, 1)},
        "model.activation_checkpointing=true": {"model.activation_checkpointing": True},
    }
    if plan.lora is None:
        changes["lora=lora"] = {"lora": {"_target_": "rlhf_lightning.LoraHparams"}}
    if plan.device == "cuda":
        sharded = {"strategy.name": "fsdp", "trainer.devices": 8, "trainer.precision": "32-true"}
        changes["strategy=fsdp trainer.devices=8 trainer.precision=32-true"] = sharded
    for words, change in changes.items():
        with suppress(ConfigError):  # such as a batch that so many devices cannot share
            other = Plan(plan.settings.updated(change), plan.group)
            if other.total < 0.99 * plan.total:
                yield words, other


def as_dict(plan: Plan) -> dict[str, Any]:
    """Return a plan for programs: bytes by model and by phase, the peak, and what needs less."""
    return {
        "device": plan.device,
        "num_devices": plan.world,
        "device_memory": plan.memory,
        "models": plan.models,
        "phases": plan.phases,
        "peak_phase": plan.peak,
        "total": plan.total,
        "runtime": CUDA_RUNTIME if plan.device == "cuda" else 0,
        "fits": None if plan.memory is None else plan.total <= plan.memory,
        "choices": {settings: other.total for settings, other in _smaller(plan)},
    }


def print_plan(plan: Plan, *, title: str) -> None:
    """Print what takes how much when, whether it fits, and what would need less."""
    console = Console(highlight=False, soft_wrap=True)
    lengths = f"{plan.prompt} + {plan.response}" if plan.response else plan.prompt
    trained = f"{plan.settings.title}, {plan.policy.model_type}"
    console.print(
        f"{title}: {trained} of {plan.counts.total:,} "
        f"weights; {plan.rows:,} rows of up to {lengths} tokens on each of {plan.world} devices "
        f"({plan.device}), {plan._together(plan.step_rows):,} at once, {plan.arithmetic}"
    )
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("GiB on each device, at the peak of a phase", no_wrap=True)
    for name in plan.phases:
        table.add_column(name + (" *" if name == plan.peak else ""), justify="right")
    for part in PARTS:
        sizes = [parts.get(part, 0) for parts in plan.phases.values()]
        if any(sizes):
            table.add_row(part, *(f"{size / GIB:,.2f}" if size else "" for size in sizes))
        for model, size in plan.models.items() if part == "weights" else ():
            table.add_row(f"  {model}", f"{size / GIB:,.2f}", style="dim")
    totals = (sum(parts.values()) for parts in plan.phases.values())
    table.add_row("total (* the peak)", *(f"{t / GIB:,.2f}" for t in totals), style="bold")
    console.print(table)
    total = readable(plan.total)
    if plan.memory is not None:
        fits = "fits" if plan.total <= plan.memory else "does not fit"
        total += f" of {readable(plan.memory)} (it {fits})"
    console.print(f"\n{plan.peak} takes {total} on each device. Less with")
    for settings, other in _smaller(plan):
        console.print(f"  {settings}: {readable(other.total)} ({other.peak})")


def readable(size: int) -> str:
    """Return `1.25 GiB`, or `300 MiB` below one."""
    return f"{size / 2**20:,.0f} MiB" if abs(size) < GIB else f"{size / GIB:,.2f} GiB"


def _show(settings: PlanSettings) -> None:
    quieten_transformers()
    plan = Plan(settings, settings.plan)
    if settings.plan.format == "json":
        say(json.dumps(as_dict(plan), indent=2))
    else:
        print_plan(plan, title=" ".join(sys.argv[1:]))


def main() -> None:
    """Run the command line."""
    run_command("plan", _show, config="train")
