"""The folder that leaves a run: weights, tokenizer, adapter, model card and configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

from rlhf_lightning.app.build import make_tokenizer, with_vocabulary
from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.app.config.groups import DatasetSettings, Target
from rlhf_lightning.app.config.saved import best_of_early_stopping, read_saved, working_folder
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.config.targets import nodes
from rlhf_lightning.distributed.checkpoint import read_full
from rlhf_lightning.models.adapter_files import CONFIG as ADAPTER_CONFIG
from rlhf_lightning.models.adapter_files import EXTRA as ADAPTER_EXTRA
from rlhf_lightning.models.factory import load_policy, load_scalar_model
from rlhf_lightning.models.heads import PolicyModel, ScalarHeadModel
from rlhf_lightning.models.loading import loading_options
from rlhf_lightning.models.lora import AdaptedPolicy, AdaptedScalarModel
from rlhf_lightning.models.ppo_models import ADAPTER
from rlhf_lightning.models.rounding import DTYPES, Rounding
from rlhf_lightning.modules.checkpoint_state import KEY, check_adapters
from rlhf_lightning.modules.export import Trained
from rlhf_lightning.runs.atomic import write_text
from rlhf_lightning.runs.folder import RunFolder, read_metrics
from rlhf_lightning.runs.hub import base_licence, hub_base
from rlhf_lightning.runs.manifest import ManifestError, Source
from rlhf_lightning.runs.model_card import CONFIG, CardFacts, plain, write_model_card
from rlhf_lightning.runs.public_config import public_config, without_folders
from rlhf_lightning.runs.publish import replacing_folder
from rlhf_lightning.runs.reading import read_json
from rlhf_lightning.runs.resume import CheckpointError, checkpoint_iteration, read_checkpoint
from rlhf_lightning.runs.summary import GateResult, installed_versions, read_summary
from rlhf_lightning.text.tokenizers import as_saved

Model = PolicyModel | ScalarHeadModel
_HUB_DATA = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Outcome:
    """The end of a run, for the model card.

    Args:
        run: name of the run folder.
        metrics: final metrics of the run.
        gates: outcomes of its gates.
        checkpoint: name of the checkpoint, for a model that is not the end of a finished run.
    """

    run: str
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    gates: tuple[GateResult, ...] = ()
    checkpoint: str | None = None


def write_model_folder(
    settings: TrainSettings,
    folder: Path,
    trained: Trained,
    outcome: Outcome,
    *,
    adapter_only: bool = False,
    dtype: str | None = None,
    full: Path | None = None,
) -> None:
    """Write what a run has trained as a Hugging Face folder, with its card and configuration.

    Args:
        settings: settings of the run.
        folder: a new folder.
        trained: the trained model.
        outcome: end of the run, for the card.
        adapter_only: write the adapter and nothing of its base.
        dtype: dtype of the weights: fp32, bf16 or auto; None takes that of the configuration.
        full: gets the same in fp32, if `folder` is not.

    Raises:
        ValueError: if only an adapter is requested and none was trained.
        ManifestError: if the adapter's base has been replaced by another model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if adapter_only:
        trained.write_adapter(folder, alone=True)
        _describe(settings, folder, outcome, is_adapter=True)
        return
    cost = trained.write(folder, dtype=export_dtype(settings, dtype), full=full)
    _describe(settings, folder, outcome, rounding=cost)
    if full is not None and full.is_dir():
        _describe(settings, full, outcome)
    for place in filter(Path.is_dir, (folder / ADAPTER, *([full / ADAPTER] if full else ()))):
        _describe(settings, place, outcome, is_adapter=True)


def export_dtype(
    settings: TrainSettings, asked: str | None = None
) -> torch.dtype | Literal["auto"]:
    """Return the dtype of the exported weights.

    `auto` is that of the start if the fp32 weights are published as well; else fp32.
    """
    named = asked or settings.export.dtype
    if named != "auto":
        return DTYPES[named]
    return "auto" if settings.publishes else torch.float32


def _describe(
    settings: TrainSettings,
    folder: Path,
    outcome: Outcome,
    *,
    is_adapter: bool = False,
    rounding: Rounding | None = None,
) -> None:
    public = public_config(settings.resolved, settings.written)
    write_text(folder / CONFIG, yaml.safe_dump(public, sort_keys=False, allow_unicode=True))
    module, start = settings.spec, settings.start
    facts = CardFacts(
        stage=settings.stage,
        run=outcome.run,
        base=start,
        data=settings.dataset.name,
        licence=base_licence(settings.model.license, start),
        hub_base=hub_base(start, settings.model.source),
        datasets=_hub_data(settings.dataset),
        settings=_hyperparameters(public),
        metrics={k: v for k, v in outcome.metrics.items() if v is not None},
        gates=outcome.gates,
        versions=installed_versions(),
        checkpoint=outcome.checkpoint,
        reward={} if module.trains_policy or is_adapter else _reward_facts(folder),
        is_adapter=is_adapter,
        against=_against(settings.scorer) if module.rolls_out else None,
        needs=_needs(folder) if is_adapter else None,
        rounding=rounding,
        title=settings.title,
        is_reward=not module.trains_policy,
    )
    write_model_card(folder, facts)


def _against(scorer: Target | None) -> str:
    """Return what scored the responses."""
    if scorer is None:
        return "scores of no scorer"
    words = getattr(scorer.read().call, "words", None)
    if not isinstance(words, str):  # a user's class may have any
        words = f"scores of {scorer.class_name}"
    words = words.replace("{number}", str(len(scorer.get("sources") or ())))
    return words.replace("{function}", without_folders(str(scorer.get("function"))))


def _needs(folder: Path) -> str:
    """Return the base that an adapter needs, without folders of the machine."""
    config = read_json(folder / ADAPTER_CONFIG)
    base, revision = config["base_model_name_or_path"], config.get("revision")
    if not Path(base).is_dir():
        at = f" at {plain(revision)}" if revision else ""
        return f"It needs its base, {plain(base)} of the hub{at}."
    found = read_json(folder / ADAPTER_EXTRA)["base_fingerprint"]
    return (
        f"It needs its base, the folder {plain(without_folders(base))} (fingerprint {found[:12]}): "
        f"where that has moved, write its place as `base_model_name_or_path` of `{ADAPTER_CONFIG}`."
    )


def _reward_facts(folder: Path) -> dict[str, Any]:
    config = read_json(folder / "config.json")
    tokenizer = as_saved(str(folder), loading_options(folder))
    return {"reward_offset": config["reward_offset"], "pad_token": tokenizer.pad_token}


def _hub_data(dataset: DatasetSettings) -> tuple[str, ...]:
    """Return the hub names of datasets that `dataset` reads, of every one of several sources."""
    calls = nodes(dataset.source.read())
    named = [one.arguments.get("name") for one in calls if getattr(one.call, "on_hub", False)]
    names = dict.fromkeys(str(name) for name in (dataset.hub_name, *named) if name)
    return tuple(n for n in names if _HUB_DATA.fullmatch(n) and not Path(n).exists())


def _hyperparameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters that decide what was learnt, flat."""
    module, data = config["module"], config.get("data") or {}
    stage = config["stage"]
    names = ("batch_size", "max_length", "max_prompt_length", "num_epochs", "num_iterations")
    groups: dict[str, Any] = {
        "data": {name: data.get(name) for name in names},
        "trainer": {"precision": (config.get("trainer") or {}).get("precision")},
        stage: module.get(stage),
        "sampling": module.get("sampling"),
        **{group: config.get(group) for group in ("lora", "optimizer", "scheduler")},
    }
    return {"seed": config.get("seed")} | {
        f"{group}.{name}": value
        for group, values in groups.items()
        for name, value in (values or {}).items()
        if not name.startswith("_") and value is not None
    }


def reexport(
    folder: RunFolder,
    checkpoint: Path,
    target: Path,
    *,
    adapter_only: bool,
    dtype: str | None = None,
) -> None:
    """Write the model of a checkpoint as a folder, in one step, replacing an earlier one.

    A run folder may come from another machine, so its configuration is data: it is validated again,
    and only our loaders are built by name, from plain values.

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
        settings = with_vocabulary(_saved_settings(folder))
        tokenizer = make_tokenizer(settings)
        content = read_full(checkpoint) if checkpoint.is_dir() else read_checkpoint(checkpoint)
        start, key = settings.start, f"artifacts.{settings.spec.starts_from}"
        source: Any = start and Source(
            start, str(content.get(KEY, "")), key, settings.model.revision
        )
        model = _model(settings, content, source)
        outcome = _outcome(folder, checkpoint, model)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    except ConfigError as error:
        raise ConfigError(f"{folder.config}: {error}") from error
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot load the model of {checkpoint}: {error}") from error
    trained = Trained(model, tokenizer, dict(model.state_dict()), source)
    how: dict[str, Any] = {"adapter_only": adapter_only, "dtype": dtype}
    try:
        with replacing_folder(target, ours=True) as staging:
            write_model_folder(settings, staging, trained, outcome, **how)
    except (ValueError, ManifestError) as error:
        raise ConfigError(f"{checkpoint}: {error}") from error


def _saved_settings(folder: RunFolder) -> TrainSettings:
    """Return the run's settings, without code, with the place where its start is found now."""
    settings = read_saved(TrainSettings, folder.config)
    model, node, start = settings.model, settings.module, settings.start
    code = {"trust_remote_code": model.trust_remote_code or node.get("trust_remote_code")}
    if start is None and model.tokenizer is not None:
        code |= model.tokenizer.read("model.tokenizer").named_again
    func = getattr(node.read("module").call, "__func__", None)
    if func is None or not func.__module__.startswith("rlhf_lightning."):
        code["module._target_"] = node.path
    for key in filter(code.get, code):
        raise ConfigError(
            f"{key}={code[key]} would run code that the run folder names: such a model is exported "
            "by its own run only"
        )
    there = working_folder(folder) / (start or "")
    if start is not None and there.exists() and there.resolve() != Path(start).resolve():
        # The run was started in another folder than this command, which may hold another model.
        settings = settings.updated({f"artifacts.{settings.spec.starts_from}": str(there)})
    return settings


def _model(settings: TrainSettings, checkpoint: Mapping[str, Any], source: Source | None) -> Model:
    """Return the trained model, built by our own loaders, with the checkpoint's weights."""
    trains_policy, node, lora = settings.spec.trains_policy, settings.module, settings.lora
    name, content = "policy" if trains_policy else "model", checkpoint["state_dict"]
    prefix = f"{name}."
    state = {k.removeprefix(prefix): v for k, v in content.items() if k.startswith(prefix)}
    if not state:
        raise ValueError(f"it holds no weights of a {name}")
    start = node.get("policy") or node.get("source")
    given: dict[str, Any] = {
        "seed": settings.seed,
        "revision": node.get("revision"),
        # The adapter is the same on a base in full precision, which needs no CUDA.
        "lora": None if lora is None else replace(lora, quantization="none"),
    }
    model: Model
    if trains_policy:
        model = load_policy(start, from_scratch=node.get("from_scratch"), **given)
    else:
        given["dropout"] = node.get("dropout", 0.0)
        model = load_scalar_model(start, head="reward", **given)
    adapted = isinstance(model, AdaptedPolicy | AdaptedScalarModel)
    if source is not None and (adapted or KEY in checkpoint):
        source.check()  # an export has its config and its tokenizer
    check_adapters(checkpoint, model)
    model.load_state_dict(state)
    return model


def _outcome(folder: RunFolder, checkpoint: Path, model: Model) -> Outcome:
    """Return what is known of the checkpoint; the end of a finished run is as the run left it."""
    iteration, best = checkpoint_iteration(checkpoint), best_of_early_stopping(folder)
    rows = {int(row["iteration"]): row for row in read_metrics(folder.metrics)}
    summary = read_summary(folder) if folder.summary.is_file() else None
    finished = summary is not None and summary.status == "completed"
    last = max(rows, default=iteration) if best is None else checkpoint_iteration(best)
    is_reward = isinstance(model, ScalarHeadModel)
    if summary is not None and finished and iteration == last:
        metrics = summary.metrics
        mean, std = (metrics.get(f"reward/sample_{name}") for name in ("mean", "std"))
        if isinstance(model, ScalarHeadModel) and mean is not None and std is not None:
            model.normalize(mean, std)
        return Outcome(folder.name, metrics, summary.gates)
    of = "before the end of its run" if finished else "of a run that has not finished"
    note = f"A checkpoint {of}, after iteration {iteration}. No gate has checked it."
    note += " Its scores are not normalized." if is_reward else ""
    left_out = ("time/", "throughput/", "iteration")
    measured = {k: v for k, v in rows.get(iteration or 0, {}).items() if not k.startswith(left_out)}
    return Outcome(folder.name, measured, checkpoint=note)
