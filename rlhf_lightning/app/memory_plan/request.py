"""From a training configuration to what a plan of its memory needs to know."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlhf_lightning.app.config.compose import ConfigError, choices, conf_dir, did_you_mean, plain
from rlhf_lightning.app.memory_plan.run import (
    Evaluation,
    Run,
    Scoring,
    Shape,
    ShapeError,
    Style,
    read_shape,
)
from rlhf_lightning.app.memory_plan.sizes import parse_bytes
from rlhf_lightning.app.stages.spec import find_stage, start_of
from rlhf_lightning.hparams import LoraHparams


@dataclass(frozen=True)
class Request:
    """A run to plan, and what had to be assumed of it."""

    run: Run
    notes: tuple[str, ...]


def read_run(cfg: DictConfig, settings: Mapping[str, Any]) -> Request:
    """Return the run that `cfg` describes.

    Args:
        cfg: composed training configuration, checked.
        settings: of the plan.

    Raises:
        ConfigError: if the shape of a model, or a number that matters, cannot be found.
    """
    notes: list[str] = []
    try:
        shape = policy_shape(cfg)
        scoring = _scoring(cfg, settings, notes)
    except ShapeError as error:
        raise ConfigError(str(error)) from error
    device = _device(cfg, settings)
    num_devices = _num_devices(cfg, notes)
    stage = find_stage(cfg.stage)
    settings_of_stage, rolls_out = cfg.module[stage.settings], stage.rolls_out
    minibatches = stage.minibatches
    run = Run(
        stage=cfg.stage,
        shape=shape,
        style=_style(cfg),
        device=device,
        strategy=_strategy(cfg, num_devices),
        num_devices=num_devices,
        batch_size=int(cfg.data.batch_size),
        micro_batch_size=settings_of_stage.micro_batch_size,
        prompt_length=int(cfg.data.max_prompt_length if rolls_out else cfg.data.max_length),
        response_length=int(cfg.module.sampling.max_new_tokens) if rolls_out else 0,
        num_minibatches=1 if minibatches is None else int(settings_of_stage[minibatches.count]),
        with_entropy=settings_of_stage.get("entropy_coef", 0) > 0,
        scoring=scoring,
        validation_rows=_validation_rows(cfg, num_devices),
        evaluation=_evaluation(cfg, num_devices),
        read_at_once=int(cfg.rollout.get("prefill_tokens", Run.read_at_once)),
        optimizer=instantiate(cfg.optimizer),
        shard_over=cfg.strategy.get("shard_over"),
    )
    if cfg.strategy.get("cpu_offload"):
        notes.append("strategy.cpu_offload is counted as if nothing were offloaded")
    if not str(cfg.rollout.get("_target_", "")).endswith("CachedGenerator"):
        notes.append("generation is counted as rollout=cached does it")
    return Request(run, tuple(notes))


def device_bytes(run: Run, settings: Mapping[str, Any]) -> int | None:
    """Return the memory of one device, as given or as this machine has it; None if unknown.

    Raises:
        ConfigError: if what was given is no size.
    """
    given = settings["device_memory"]
    if given is not None:
        try:
            return parse_bytes(given)
        except ValueError as error:
            raise ConfigError(f"plan.device_memory={error}") from error
    if run.device == "cuda":
        available = torch.cuda.is_available()
        return torch.cuda.get_device_properties(0).total_memory if available else None
    # All processes of a machine share it.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // run.num_devices


def policy_shape(cfg: DictConfig) -> Shape:
    """Return the shape of the policy: of the model's config, else of the folder it starts from.

    Raises:
        ShapeError: if it is none that transformers knows.
        ConfigError: if there is none.
    """
    fields = cfg.model.get("shape")
    if fields is not None:
        return _completed(cfg.model, plain(fields))
    start, key = start_of(cfg), find_stage(cfg.stage).starts_from
    if start is not None and (Path(start) / "config.json").is_file():
        return read_shape(Path(start))
    named = ", ".join(name for name in choices("model") if name not in ("pretrained", "demo"))
    raise ConfigError(
        f"model={cfg.model.get('name', '?')} carries no shape, and "
        f"artifacts.{key}={start} is no local folder with a config.json: use "
        f"model=NAME (one of {named}), a local folder, or give the fields of its config.json as "
        "model.shape"
    )


def named_shape(name: str) -> Shape:
    """Return the shape of one of `conf/model`, or of a local folder.

    Raises:
        ShapeError: if the shape is none that transformers knows.
        ConfigError: if there is no such name.
    """
    if (Path(name) / "config.json").is_file():
        return read_shape(Path(name))
    file = conf_dir() / "model" / f"{name}.yaml"
    model: Any = OmegaConf.load(file) if file.is_file() else OmegaConf.create()
    if model.get("shape") is None:
        known = choices("model")
        raise ConfigError(
            f"plan.reward_model={name}{did_you_mean(name, known)}: give one of conf/model that "
            f"carries a shape ({', '.join(known)}), or a local folder with a config.json"
        )
    return _completed(OmegaConf.create({"model": model}).model, plain(model.shape))


def _completed(model: DictConfig, fields: dict[str, Any]) -> Shape:
    """Fill in the vocabulary of a tokenizer that is made for the model."""
    if fields.get("vocab_size") == "???" and model.get("tokenizer") is not None:
        fields["vocab_size"] = len(instantiate(model.tokenizer))
    return Shape(fields)


def _style(cfg: DictConfig) -> Style:
    lora = cfg.get("lora")
    values = {} if lora is None else {k: v for k, v in plain(lora).items() if k != "_target_"}
    dtype = cfg.strategy.get("compute_dtype")
    return Style(
        precision=str(cfg.trainer.precision),
        compute_dtype=None if dtype is None else getattr(torch, dtype),
        lora=None if lora is None else LoraHparams(**values),
        activation_checkpointing=bool(cfg.model.get("activation_checkpointing", False)),
    )


def _device(cfg: DictConfig, settings: Mapping[str, Any]) -> Literal["cpu", "cuda"]:
    wanted = settings["device"]
    if wanted not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"plan.device={wanted} must be auto, cpu or cuda")
    if wanted != "auto":
        return cast(Literal["cpu", "cuda"], wanted)
    accelerator = cfg.trainer.accelerator
    if accelerator == "cpu":
        return "cpu"
    given = settings["device_memory"] is not None
    gpu = accelerator in ("gpu", "cuda") or torch.cuda.is_available() or given
    return "cuda" if gpu else "cpu"


def _num_devices(cfg: DictConfig, notes: list[str]) -> int:
    devices = cfg.trainer.devices
    if OmegaConf.is_list(devices):
        return len(devices) * int(cfg.trainer.num_nodes)
    if str(devices) in ("auto", "-1"):
        count = max(torch.cuda.device_count(), 1)
        notes.append(f"trainer.devices={devices} is counted as the {count} of this machine")
        return count * int(cfg.trainer.num_nodes)
    return int(devices) * int(cfg.trainer.num_nodes)


def _strategy(cfg: DictConfig, num_devices: int) -> str:
    name = str(cfg.strategy.name)
    return "ddp" if name == "auto" and num_devices > 1 else name


def _scoring(cfg: DictConfig, settings: Mapping[str, Any], notes: list[str]) -> Scoring:
    if not find_stage(cfg.stage).rolls_out:
        return Scoring()
    node = plain(cfg.scorer)
    named = settings["reward_model"]
    shape = None if named is None else named_shape(str(named))
    found = [_one_scorer(part, shape) for part in _scorers(node)]
    models = [scoring for scoring in found if scoring.kind == "model"]
    if len(models) > 1:
        notes.append(f"{len(models)} reward models are counted as one")
    if models and shape is None:
        notes.append("the reward model has the policy's shape (plan.reward_model=NAME: another)")
    adapters = [scoring for scoring in found if scoring.kind == "adapter"]
    return next(iter(models + adapters), Scoring())


def _scorers(node: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    parts = node.get("scorers")
    if isinstance(parts, Mapping):
        return [leaf for part in parts.values() for leaf in _scorers(part)]
    return [node]


def _one_scorer(node: Mapping[str, Any], shape: Shape | None) -> Scoring:
    name = str(node.get("_target_", "")).rpartition(".")[2]
    rows = node.get("micro_batch_size")
    if name == "RewardAdapterScorer":
        return Scoring("adapter", micro_batch_size=rows)
    if name == "RewardModelScorer":
        precision = node.get("load", {}).get("precision")
        dtype = torch.float32 if precision is None else None
        return Scoring("model", shape, dtype, rows)
    if name == "TextRewardModelScorer":
        dtype = torch.bfloat16 if node.get("dtype") == "bfloat16" else torch.float32
        return Scoring("model", shape, dtype, rows, node.get("max_length"))
    return Scoring()


def _validation_rows(cfg: DictConfig, num_devices: int) -> int:
    stage = find_stage(cfg.stage)
    if not stage.validates:
        return 0
    rows = cfg.data.get("validation_batch_size")
    rows = 2 * max(int(cfg.data.batch_size) // num_devices, 1) if rows is None else int(rows)
    rows = min(rows, int(cfg.data.get("max_validation_rows") or rows))
    return stage.sequences_per_row * rows


def _evaluation(cfg: DictConfig, num_devices: int) -> Evaluation | None:
    stage = find_stage(cfg.stage)
    count = stage.num_answered(cfg)
    if not count:
        return None
    rows = min(int(cfg.evaluation.batch_size), count)
    if not stage.trains_policy:  # training prompts, dealt to all devices
        rows = -(-rows // num_devices)
    try:
        tokens = int(cfg.evaluation.max_new_tokens)
    except OmegaConfBaseException as error:
        raise ConfigError("evaluation.max_new_tokens is not set") from error
    during = stage.rolls_out and cfg.evaluation.every_n_iterations is not None
    return Evaluation(rows, cfg.evaluation.micro_batch_size, tokens, during_training=during)
