"""From a configuration to objects: data, module, callbacks, logger, Trainer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.app.batch_arithmetic import batch_unit, minibatches_key
from rlhf_lightning.app.config.compose import ConfigError, plain
from rlhf_lightning.app.config.targets import did_you_mean
from rlhf_lightning.app.evaluation import check_context_length, context_length, safety_prompts
from rlhf_lightning.app.learning_rates import choose_rates
from rlhf_lightning.app.stages.spec import Parts, StageCallbacks, find_stage, start_of
from rlhf_lightning.callbacks.best_weights import BestWeights, PatientStopping
from rlhf_lightning.callbacks.checkpointing import AtomicCheckpointIO, IterationCheckpoint
from rlhf_lightning.callbacks.console import ProgressBar
from rlhf_lightning.callbacks.doctor.callback import Doctor
from rlhf_lightning.callbacks.doctor.records import Refusals
from rlhf_lightning.callbacks.faults import SaveFaultyBatch
from rlhf_lightning.callbacks.metrics_log import MetricsLog
from rlhf_lightning.callbacks.random_state import RandomState
from rlhf_lightning.callbacks.same_configuration import SameConfiguration
from rlhf_lightning.callbacks.tensorboard_logger import tensorboard_logger
from rlhf_lightning.callbacks.wandb_content import WandbContent
from rlhf_lightning.callbacks.wandb_logger import IterationWandbLogger, wandb_logger
from rlhf_lightning.data.batch_size import BatchSizeError, batch_that_fits
from rlhf_lightning.data.record_datamodule import RecordDataModule
from rlhf_lightning.distributed.launch import started
from rlhf_lightning.distributed.strategy import make_strategy
from rlhf_lightning.evaluation.generate import Sampling
from rlhf_lightning.models.tokenizers import load_tokenizer, stop_ids
from rlhf_lightning.rollout.scorers.base import Scorer
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.manifest import ManifestError, source_fingerprint
from rlhf_lightning.runs.public_config import public_config
from rlhf_lightning.runs.resume import config_hash
from rlhf_lightning.runs.summary import git_commit, installed_versions

KEYS = (
    "thresholds",
    "actions",
    "preflight",
    "second_scorer",
    "second_every_n_iterations",
    "harmful_domains",
    "refusals",
)


def make_doctor(cfg: DictConfig, folder: RunFolder) -> list[Doctor]:
    """Return the doctor of a PPO run; none with `doctor=none`.

    Raises:
        ConfigError: for an unknown key, a value that cannot be, gold as the second scorer, or a
            rollback without a best checkpoint.
    """
    if cfg.doctor is None:
        return []
    values = plain(cfg.doctor)
    for key in values:
        if key not in KEYS:
            raise ConfigError(f"unknown key doctor.{key}{did_you_mean(str(key), list(KEYS))}")
    _refuse_gold(cfg, values["second_scorer"])
    actions = None if values["actions"] is None else instantiate(cfg.doctor.actions)
    monitor = cfg.callbacks.checkpoint.monitor
    if actions is not None and actions.on_alarm == "rollback" and monitor is None:
        raise ConfigError(
            "doctor.actions.on_alarm=rollback goes back to the best checkpoint, and "
            "callbacks.checkpoint.monitor=null keeps none: set it to doctor/quality with "
            "callbacks.checkpoint.mode=max, as doctor=act does"
        )
    try:
        return [
            Doctor(
                folder,
                instantiate(cfg.doctor.thresholds),
                actions=actions,
                second_scorer=instantiate(cfg.doctor.second_scorer),
                second_every_n_iterations=values["second_every_n_iterations"],
                refusals=Refusals(
                    tuple(values["harmful_domains"] or ()), tuple(values["refusals"] or ())
                ),
                preflight=bool(values["preflight"]),
            )
        ]
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _refuse_gold(cfg: DictConfig, second_scorer: Any) -> None:
    """Gold chooses no setting and no checkpoint, and the doctor does both."""
    gold = OmegaConf.select(cfg, "evaluation.gold")
    known = set(_texts(plain(gold))) - {"hydra.utils.get_method"} if gold is not None else set()
    for text in _texts(second_scorer):
        if text in known or text.startswith("rlhf_lightning.data.demo.gold"):
            raise ConfigError(
                f"doctor.second_scorer reads {text}, the gold reward, which only evaluation may "
                "see: use a judge or another reward model"
            )


def _texts(node: Any) -> Iterator[str]:
    if isinstance(node, Mapping):
        for value in node.values():
            yield from _texts(value)
    elif isinstance(node, list | tuple):
        for value in node:
            yield from _texts(value)
    elif isinstance(node, str):
        yield node


NO_LOGGER = ("none", "csv")


def make_logger(cfg: DictConfig, folder: RunFolder) -> Any:
    """Return what `logger=` chose as a Lightning logger, or False where metrics.csv is enough."""
    if cfg.logger.kind in NO_LOGGER:
        return False
    if cfg.logger.kind == "tensorboard":
        return tensorboard_logger(folder)
    if cfg.logger.kind == "wandb":
        return _wandb(cfg, folder)
    raise ValueError(f"logger.kind={cfg.logger.kind!r} must be wandb, tensorboard, csv or none")


def sweep_group(name: str) -> str | None:
    """Return the name that the jobs of this sweep share, None outside of a multirun."""
    if not HydraConfig.initialized():
        return None
    config = HydraConfig.get()
    if config.mode != RunMode.MULTIRUN:
        return None
    return f"{name}/{Path(config.sweep.dir).name}"


def _wandb(cfg: DictConfig, folder: RunFolder) -> IterationWandbLogger:
    written = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=False))
    config = public_config(plain(cfg), written)
    config |= {
        "config_hash": config_hash(written),
        "git_commit": git_commit(),
        "versions": installed_versions(),
    }
    return wandb_logger(
        folder,
        project=cfg.logger.project,
        name=f"{cfg.name}/{folder.path.name}",
        group=cfg.logger.group or sweep_group(cfg.name),
        tags=list(cfg.logger.tags),
        config=config,
        mode=cfg.logger.mode,
    )


STOPS_BY = "val/loss"  # early stopping
ORIGIN: dict[str, Any] = {"revision": None, "trust_remote_code": False}


def assemble(cfg: DictConfig, folder: RunFolder) -> Parts:
    """Build what `cfg` describes; models are built later, in `configure_model`."""
    stage, start = find_stage(cfg.stage), start_of(cfg)
    tokenizer = make_tokenizer(cfg, start)
    check_context_length(cfg, context_length(cfg, start))
    rates = choose_rates(cfg, start)
    revision = cfg.model.get("revision")
    stops = stop_ids(tokenizer, start, revision=revision)
    generator = instantiate(cfg.rollout)(stops, tokenizer.pad_token_id)
    data = instantiate(cfg.data, _partial_=True)(tokenizer=tokenizer)
    read_records(cfg, data)
    extras: dict[str, Any] = {
        "optimizer": instantiate(cfg.optimizer),
        "schedule": instantiate(cfg.scheduler),
        "compute_dtype": _dtype(cfg.strategy.get("compute_dtype")),
        "fingerprint": "" if start is None else source_fingerprint(start, revision),
    }
    extras |= stage.arguments(cfg, tokenizer, generator, extras["fingerprint"])
    scorer: Scorer | None = extras.get("scorer")
    module = instantiate(cfg.module, _partial_=True)(**extras)
    sampling = Sampling(
        generator,
        tokenizer,
        temperature=cfg.evaluation.temperature,
        max_new_tokens=cfg.evaluation.max_new_tokens,
        micro_batch_size=cfg.evaluation.micro_batch_size,
    )
    if stage.trains_policy:
        safety_prompts(cfg, tokenizer)  # those of a file are asked at the end: fail before training
    own = stage.callbacks(cfg, folder, tokenizer, sampling, scorer)
    trainer = make_trainer(cfg, folder, data, tokenizer, own)
    return Parts(tokenizer, data, module, trainer, sampling, scorer, rates)


def read_records(cfg: DictConfig, data: RecordDataModule) -> None:
    """Read and encode the records.

    Raises:
        ConfigError: if they are fewer than a batch.
    """
    try:
        data.setup()
    except BatchSizeError as error:
        unit = batch_unit(plain(cfg))
        fits = batch_that_fits(error.num_rows, unit)
        devices = "fewer trainer.devices"
        minibatches = minibatches_key(find_stage(cfg.stage))
        fewer = devices if minibatches is None else f"{minibatches}=1 or {devices}"
        more = f"or give more {error.kind}"
        fix = f"use data.batch_size={fits}, {more}" if fits else f"use {fewer}, {more}"
        raise ConfigError(
            f"data.batch_size={error.batch_size} is more than the {error.num_rows:,} training "
            f"{error.kind}, so a batch would hold some of them several times: {fix}"
        ) from error


def make_tokenizer(cfg: DictConfig, start: str | None) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the start, or the one made for a model from scratch."""
    if start is not None:
        arguments = cfg.model.get("chat_template_arguments")
        return load_tokenizer(start, chat_template_arguments=arguments, **origin(cfg))
    tokenizer = instantiate(cfg.model.tokenizer)
    special = {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    for key, value in special.items():
        OmegaConf.update(cfg, f"model.from_scratch.{key}", value, force_add=True)
    return tokenizer


def origin(cfg: DictConfig) -> dict[str, Any]:
    """Return which version of the stage's start is loaded, and whether its code runs."""
    return {key: cfg.model.get(key) or default for key, default in ORIGIN.items()}


def scorer_fingerprints(scorer: Mapping[str, Any]) -> dict[str, str]:
    """Return the fingerprint of each model that a scorer loads, or that one inside it does.

    What is no model folder is left out: loading it says what is wrong.
    """
    found: dict[str, str] = {}
    for value in scorer.values():
        if isinstance(value, Mapping):
            found |= scorer_fingerprints(value)
    for source in (scorer.get("source"), *scorer.get("sources", ())):
        if not isinstance(source, str):
            continue
        with suppress(ManifestError):
            found[source] = source_fingerprint(source, scorer.get("revision"))
    return found


def make_trainer(
    cfg: DictConfig,
    folder: RunFolder,
    data: RecordDataModule,
    tokenizer: PreTrainedTokenizerBase,
    own: StageCallbacks,
) -> L.Trainer:
    """Return the Trainer: one epoch of `num_iterations` batches, our callbacks, our checkpoints."""
    total = data.num_iterations
    validates = find_stage(cfg.stage).validates and cfg.trainer.validations > 0
    limit = cfg.trainer.limit_train_batches
    total = total if limit is None else min(total, int(limit))
    trainer = L.Trainer(
        max_epochs=1,
        accelerator=cfg.trainer.accelerator,
        devices=cfg.trainer.devices,
        num_nodes=cfg.trainer.num_nodes,
        precision=cfg.trainer.precision,
        strategy=make_strategy(
            plain(cfg.strategy), num_devices=int(cfg.trainer.devices) * int(cfg.trainer.num_nodes)
        ),
        logger=make_logger(cfg, folder),
        callbacks=make_callbacks(cfg, folder, tokenizer, own),
        plugins=[AtomicCheckpointIO()],
        limit_train_batches=limit,
        limit_val_batches=cfg.trainer.limit_val_batches if validates else 0,
        val_check_interval=max(total // cfg.trainer.validations, 1) if validates else None,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        use_distributed_sampler=False,
        enable_model_summary=False,
        default_root_dir=folder.path,
    )
    # Lightning's handlers exchange data inside the handler, which hangs where one rank alone is
    # told, and put Slurm jobs back into the queue from a checkpoint of their own.
    cast(Any, trainer)._signal_connector.register_signal_handlers = lambda: None
    return trainer


def make_callbacks(
    cfg: DictConfig, folder: RunFolder, tokenizer: PreTrainedTokenizerBase, own: StageCallbacks
) -> list[L.Callback]:
    """Return our callbacks, those of the stage, and the user's."""
    settings = cfg.callbacks
    callbacks: list[L.Callback] = [
        *own.first,
        RandomState(),
        MetricsLog(folder),
        IterationCheckpoint(folder.checkpoints, **_kept(settings), started=started()),
        SaveFaultyBatch(folder, cast(Any, tokenizer)),
        WandbContent(folder, cast(Any, tokenizer), **settings.samples),
        ProgressBar(cfg.name),
        SameConfiguration(
            config_hash(cast(Any, OmegaConf.to_container(cfg, resolve=False))), str(folder.path)
        ),
        *own.last,
    ]
    if settings.early_stopping is not None:
        # Left to itself, Lightning looks at the end of the epoch where each iteration is validated.
        stops = {"check_on_train_epoch_end": False} | plain(settings.early_stopping)
        callbacks.append(PatientStopping(STOPS_BY, **stops))
        callbacks.append(BestWeights())
    return callbacks + [instantiate(node) for node in settings.extra.values()]


def _kept(settings: DictConfig) -> dict[str, Any]:
    """Return the settings of the checkpoints; early stopping needs a best one to end with."""
    kept = plain(settings.checkpoint)
    if settings.early_stopping is not None and kept.get("monitor") is None:
        kept |= {"monitor": STOPS_BY, "mode": settings.early_stopping.get("mode", "min")}
    return kept


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)
