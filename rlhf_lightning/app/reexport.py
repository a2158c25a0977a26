"""Write a model folder from a checkpoint.

A run folder may come from another machine, so its configuration is data: it is validated again, and
only our loaders are built by name, from plain values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_lightning.app.build import make_tokenizer, with_vocabulary
from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.app.config.saved import best_of_early_stopping, read_saved, working_folder
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.model_export import Outcome, write_model_folder
from rlhf_lightning.distributed.checkpoint import read_full
from rlhf_lightning.models.factory import load_policy, load_scalar_model
from rlhf_lightning.models.heads import PolicyModel, ScalarHeadModel
from rlhf_lightning.models.lora import AdaptedPolicy, AdaptedScalarModel
from rlhf_lightning.modules.checkpoint_state import KEY, check_adapters
from rlhf_lightning.modules.export import Trained
from rlhf_lightning.runs.folder import RunFolder, read_metrics
from rlhf_lightning.runs.manifest import ManifestError
from rlhf_lightning.runs.publish import replacing_folder
from rlhf_lightning.runs.resume import CheckpointError, checkpoint_iteration, read_checkpoint
from rlhf_lightning.runs.source import Source
from rlhf_lightning.runs.summary import read_summary

Model = PolicyModel | ScalarHeadModel


def reexport(
    folder: RunFolder,
    checkpoint: Path,
    target: Path,
    *,
    adapter_only: bool,
    dtype: str | None = None,
) -> None:
    """Write the model of a checkpoint as a folder, in one step, replacing an earlier one.

    Args:
        folder: folder of the run.
        checkpoint: checkpoint of the run.
        target: folder of the model.
        adapter_only: the adapter of a LoRA run without its base.
        dtype: dtype of the weights; None keeps that of the run's configuration.

    Raises:
        ConfigError: if the configuration is not allowed, or if there is no model that the
            checkpoint fits.
    """
    try:
        settings = _settings(folder)
        tokenizer = _tokenizer(settings)
        settings = with_vocabulary(settings)
        content = read_full(checkpoint) if checkpoint.is_dir() else read_checkpoint(checkpoint)
        source: Any = _start(settings, content)
        model = _model(settings, content, source)
        outcome = _outcome(folder, checkpoint, model)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    except ConfigError as error:
        raise ConfigError(f"{folder.config}: {error}") from error
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot load the model of {checkpoint}: {error}") from error
    trained = Trained(model, tokenizer, dict(model.state_dict()), source)
    try:
        with replacing_folder(target, ours=True) as staging:
            write_model_folder(
                settings, staging, trained, outcome, adapter_only=adapter_only, dtype=dtype
            )
    except (ValueError, ManifestError) as error:
        raise ConfigError(f"{checkpoint}: {error}") from error


def _settings(folder: RunFolder) -> TrainSettings:
    """Return the run's settings, checked, with the place where its start is found now."""
    settings = read_saved(TrainSettings, folder.config)
    _refuse_code(settings.model.trust_remote_code)
    start = settings.start
    if start is not None:
        there = working_folder(folder) / start
        if there.exists() and there.resolve() != Path(start).resolve():
            # The run was started in another folder than this command, which may hold another model.
            settings = settings.updated({f"artifacts.{settings.spec.starts_from}": str(there)})
    return settings


def _refuse_code(trusted: object) -> None:
    if trusted:
        raise ConfigError(
            "trust_remote_code=true would run code that the run folder names: such a model is "
            "exported by its own run only"
        )


def _tokenizer(settings: TrainSettings) -> PreTrainedTokenizerBase:
    tokenizer = settings.model.tokenizer
    if settings.start is None and tokenizer is not None:
        for key, value in tokenizer.read("model.tokenizer").named_again.items():
            raise ConfigError(
                f"{key}={value} would run code that the run folder names: such a model is exported "
                "by its own run only"
            )
    return make_tokenizer(settings)


def _model(settings: TrainSettings, checkpoint: Mapping[str, Any], source: Source | None) -> Model:
    """Return the trained model with the checkpoint's weights."""
    name = settings.spec.trained
    prefix = f"{name}."
    state = {
        key.removeprefix(prefix): value
        for key, value in checkpoint["state_dict"].items()
        if key.startswith(prefix)
    }
    if not state:
        raise ValueError(f"it holds no weights of a {name}")
    model = _untrained(settings)
    adapted = isinstance(model, AdaptedPolicy | AdaptedScalarModel)
    if source is not None and (adapted or KEY in checkpoint):
        source.check()  # an export has its config and its tokenizer
    check_adapters(checkpoint, model)
    model.load_state_dict(state)
    return model


def _start(settings: TrainSettings, checkpoint: Mapping[str, Any]) -> Source | None:
    """Return what the run started from, as it was then."""
    start, key = settings.start, f"artifacts.{settings.spec.starts_from}"
    if start is None:
        return None
    return Source(start, str(checkpoint.get(KEY, "")), key, settings.model.revision)


def _untrained(settings: TrainSettings) -> Model:
    """Return the model that the stage began with, built by our own loaders from plain values."""
    stage, node = settings.spec, settings.module
    func = getattr(node.read("module").call, "__func__", None)
    if func is None or not func.__module__.startswith("rlhf_lightning."):
        raise ConfigError(
            f"module._target_={node.path} builds the model, which is none of ours: such a model is "
            "exported by its own run only"
        )
    _refuse_code(node.get("trust_remote_code"))
    lora = settings.lora
    arguments = {
        "seed": settings.seed,
        "revision": node.get("revision"),
        # The adapter is the same on a base in full precision, which needs no CUDA.
        "lora": None if lora is None else replace(lora, quantization="none"),
    }
    source = node.get("policy") or node.get("source")
    if not stage.trains_policy:
        dropout = node.get("dropout", 0.0)
        return load_scalar_model(source, head="reward", dropout=dropout, **arguments)
    return load_policy(source, from_scratch=node.get("from_scratch"), **arguments)


def _outcome(folder: RunFolder, checkpoint: Path, model: Model) -> Outcome:
    """Return what is known of the checkpoint; the end of a finished run is as the run left it."""
    iteration = checkpoint_iteration(checkpoint)
    rows = {int(row["iteration"]): row for row in read_metrics(folder.metrics)}
    summary = read_summary(folder) if folder.summary.is_file() else None
    finished = summary is not None and summary.status == "completed"
    best = best_of_early_stopping(folder)
    last = max(rows, default=iteration) if best is None else checkpoint_iteration(best)
    if summary is not None and finished and iteration == last:
        metrics = summary.metrics
        mean, std = (metrics.get(f"reward/sample_{name}") for name in ("mean", "std"))
        if isinstance(model, ScalarHeadModel) and mean is not None and std is not None:
            model.normalize(mean, std)
        return Outcome(folder.name, metrics, summary.gates)
    of = "before the end of its run" if finished else "of a run that has not finished"
    note = f"A checkpoint {of}, after iteration {iteration}. No gate has checked it."
    if isinstance(model, ScalarHeadModel):
        note += " Its scores are not normalized."
    row = rows.get(iteration or 0, {})
    measured = {
        key: value
        for key, value in row.items()
        if not key.startswith(("time/", "throughput/")) and key != "iteration"
    }
    return Outcome(folder.name, measured, checkpoint=note)
