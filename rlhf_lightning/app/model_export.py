"""The folder that leaves a run: weights, tokenizer, adapter, model card and configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

from rlhf_lightning.app.config.groups import DatasetSettings, Target
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.config.targets import nodes
from rlhf_lightning.app.stages.spec import find_stage
from rlhf_lightning.models.adapter_files import CONFIG as ADAPTER_CONFIG
from rlhf_lightning.models.adapter_files import EXTRA as ADAPTER_EXTRA
from rlhf_lightning.models.loading import loading_options
from rlhf_lightning.models.ppo_models import ADAPTER
from rlhf_lightning.models.rounding import DTYPES, Rounding
from rlhf_lightning.modules.export import Trained
from rlhf_lightning.runs.atomic import write_text
from rlhf_lightning.runs.hub import base_licence, hub_base
from rlhf_lightning.runs.model_card import CONFIG, CardFacts, plain, write_model_card
from rlhf_lightning.runs.public_config import public_config, without_folders
from rlhf_lightning.runs.reading import read_json
from rlhf_lightning.runs.summary import GateResult, installed_versions
from rlhf_lightning.text.tokenizers import as_saved

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
    stage, start = settings.spec, settings.start
    facts = CardFacts(
        stage=stage.name,
        run=outcome.run,
        base=start,
        data=settings.dataset.name,
        licence=base_licence(settings.model.license, start),
        hub_base=hub_base(start, settings.model.source),
        datasets=_hub_data(settings.dataset),
        settings=_settings(public),
        metrics={k: v for k, v in outcome.metrics.items() if v is not None},
        gates=outcome.gates,
        versions=installed_versions(),
        checkpoint=outcome.checkpoint,
        reward={} if stage.trains_policy or is_adapter else _reward_facts(folder),
        is_adapter=is_adapter,
        against=_against(settings.scorer) if stage.rolls_out else None,
        needs=_needs(folder) if is_adapter else None,
        rounding=rounding,
        title=settings.title,
        is_reward=not stage.trains_policy,
    )
    write_model_card(folder, facts)


def _against(scorer: Target | None) -> str:
    """Return what scored the responses."""
    if scorer is None:
        return "scores of no scorer"
    words = getattr(scorer.read().call, "words", None)  # a user's class may have any
    words = words if isinstance(words, str) else f"scores of {scorer.class_name}"
    words = words.replace("{number}", str(len(scorer.get("sources") or ())))
    return words.replace("{function}", without_folders(str(scorer.get("function"))))


def _needs(folder: Path) -> str:
    """Return the base that an adapter needs, without folders of the machine."""
    config = read_json(folder / ADAPTER_CONFIG)
    base, revision = config["base_model_name_or_path"], config.get("revision")
    if not Path(base).is_dir():
        return f"It needs its base, {plain(base)} of the hub" + (
            f" at {plain(revision)}." if revision else "."
        )
    found = read_json(folder / ADAPTER_EXTRA)["base_fingerprint"]
    return (
        f"It needs its base, the folder {plain(without_folders(base))} (fingerprint {found[:12]}), "
        f"which `{ADAPTER_CONFIG}` names by its whole path on the machine of the run. Elsewhere, "
        "copy that folder too and write its place there as `base_model_name_or_path`."
    )


def _reward_facts(folder: Path) -> dict[str, Any]:
    config = read_json(folder / "config.json")
    tokenizer = as_saved(str(folder), loading_options(folder))
    return {"reward_offset": config["reward_offset"], "pad_token": tokenizer.pad_token}


def _hub_data(dataset: DatasetSettings) -> tuple[str, ...]:
    """Return the hub names of datasets that `dataset` reads, of every one of several sources."""
    calls = nodes(dataset.source.read())
    named = [one.arguments.get("name") for one in calls if getattr(one.call, "on_hub", False)]
    names = [dataset.hub_name, *named]
    found = [str(name) for name in names if name and _HUB_DATA.fullmatch(str(name))]
    return tuple(dict.fromkeys(name for name in found if not Path(name).exists()))


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters that decide what was learnt, flat."""
    module = config["module"]
    stage = find_stage(config["stage"], module["_target_"]).settings
    groups = {
        stage: module.get(stage),
        "sampling": module.get("sampling"),
        "lora": config.get("lora"),
        "optimizer": config.get("optimizer"),
        "scheduler": config.get("scheduler"),
    }
    data, trainer = config.get("data") or {}, config.get("trainer") or {}
    names = ("batch_size", "max_length", "max_prompt_length", "num_epochs", "num_iterations")
    flat = {f"data.{name}": data[name] for name in names if data.get(name) is not None}
    flat |= {"seed": config.get("seed"), "trainer.precision": trainer.get("precision")}
    for group, values in groups.items():
        for name, value in (values or {}).items():
            if not name.startswith("_") and value is not None:
                flat[f"{group}.{name}"] = value
    return flat
