"""The folder that leaves a run: weights, tokenizer, adapter, model card and configuration."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.app.config.groups import DatasetSettings, Target
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.stages.spec import find_stage
from rlhf_lightning.models.adapter_files import CONFIG as ADAPTER_CONFIG
from rlhf_lightning.models.adapter_files import EXTRA as ADAPTER_EXTRA
from rlhf_lightning.models.adapter_files import merge_adapter, save_adapter
from rlhf_lightning.models.export import weights_by_file_name
from rlhf_lightning.models.factory import load_policy
from rlhf_lightning.models.heads import PolicyModel, ScalarHeadModel
from rlhf_lightning.models.loading import load_config, loading_options
from rlhf_lightning.models.lora import AdaptedPolicy, AdaptedScalarModel
from rlhf_lightning.models.ppo_models import ADAPTER
from rlhf_lightning.models.rounding import DTYPES, Rounding, base_dtype, measure_rounding
from rlhf_lightning.modules.export import export_tokenizer, save_hf_model
from rlhf_lightning.runs.atomic import write_text
from rlhf_lightning.runs.hub import base_licence, hub_base, hub_snapshot
from rlhf_lightning.runs.model_card import CONFIG, CardFacts, plain, write_model_card
from rlhf_lightning.runs.public_config import public_config, without_folders
from rlhf_lightning.runs.reading import read_json
from rlhf_lightning.runs.source import Source
from rlhf_lightning.runs.summary import GateResult, installed_versions
from rlhf_lightning.text.tokenizers import as_saved, stop_ids

logger = logging.getLogger(__name__)
LEAST_KEPT = 0.9  # of what training changed, that rounding must keep
_REWARD_MODELS = ("RewardModelScorer", "RewardAdapterScorer", "TextRewardModelScorer")
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
    model: PolicyModel | ScalarHeadModel,
    tokenizer: PreTrainedTokenizerBase,
    state: dict[str, Tensor],
    outcome: Outcome,
    source: Source | None,
    *,
    adapter_only: bool = False,
    dtype: str | None = None,
    full: Path | None = None,
) -> None:
    """Write the trained model of a run as a Hugging Face folder.

    An adapter is merged into its base, and also written alone to `adapter/`.

    Args:
        settings: settings of the run.
        folder: a new folder.
        model: the trained model.
        tokenizer: the one it was trained with.
        state: full state dict of `model`, on the CPU.
        outcome: end of the run, for the card.
        source: the model that the run started from; None for random weights.
        adapter_only: write the adapter and nothing of its base.
        dtype: dtype of the weights: fp32, bf16 or auto; None takes that of the configuration.
        full: gets the same in fp32, if `folder` is not.

    Raises:
        ValueError: if only an adapter is requested and none was trained.
        ManifestError: if the adapter's base has been replaced by another model.
    """
    start = settings.start
    adapted = model if isinstance(model, AdaptedPolicy | AdaptedScalarModel) else None
    if adapter_only and adapted is None:
        raise ValueError("the run trained the whole model and no adapter (lora: null)")
    folder.mkdir(parents=True, exist_ok=True)
    if adapted is not None and source is not None:  # which every adapter has
        base, revision = _base_of_adapter(str(start), settings.model.revision)
        save_adapter(
            adapted,
            folder if adapter_only else folder / ADAPTER,
            state,
            base=base,
            base_fingerprint=source.fingerprint,
            base_revision=revision,
        )
        if not adapter_only:
            # The base is read again, as what was trained on may be rounded.
            model = merge_adapter(adapted, state, load_policy(start, **settings.model.origin))
            state = model.state_dict()
        source.check()  # behind the load: it may take minutes
    if adapter_only:
        export_tokenizer(model, tokenizer, folder)
        _describe(settings, folder, start, outcome, is_adapter=True)
    else:
        _write_whole(settings, folder, (model, tokenizer, state), outcome, dtype, full)


def _write_whole(
    settings: TrainSettings,
    folder: Path,
    trained: tuple[PolicyModel | ScalarHeadModel, PreTrainedTokenizerBase, dict[str, Tensor]],
    outcome: Outcome,
    asked: str | None,
    full: Path | None,
) -> None:
    model, tokenizer, state = trained
    start, revision = settings.start, settings.model.revision
    stops = stop_ids(tokenizer, start, revision=revision)
    dtype, base_dtype = export_dtypes(settings, asked)
    cost: Rounding | None = None
    if dtype != torch.float32:
        weights = weights_by_file_name(model, state)
        cost = measure_rounding(weights, start, dtype, revision=revision)
        if cost.kept is not None and cost.kept < LEAST_KEPT:
            lost = f"bf16 keeps {100 * cost.kept:.0f} % of what training changed"
            if asked_dtype(settings, asked) == "auto":
                logger.warning("%s stays in fp32: %s (export.dtype=bf16 insists)", folder, lost)
                dtype, cost = torch.float32, None
            else:
                logger.warning("%s: %s, export.dtype=fp32 keeps all of it", folder, lost)
    options: dict[str, Any] = {"stop_ids": stops, "base_dtype": base_dtype}
    save_hf_model(model, tokenizer, folder, state, dtype=dtype, **options)
    _describe(settings, folder, start, outcome, is_adapter=False, rounding=cost)
    if dtype == torch.float32:
        return
    if full is not None:
        save_hf_model(model, tokenizer, full, state, dtype=torch.float32, **options)
        if (folder / ADAPTER).is_dir():
            shutil.copytree(folder / ADAPTER, full / ADAPTER)
        _describe(settings, full, start, outcome, is_adapter=False)


def asked_dtype(settings: TrainSettings, asked: str | None = None) -> str:
    """Return fp32, bf16 or auto: as asked, else as the configuration says."""
    return asked or settings.export.dtype


def export_dtypes(
    settings: TrainSettings, asked: str | None = None
) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtype of the exported weights, and that of the model at the root.

    `auto` is the latter if the fp32 weights are published as well; else fp32.
    """
    start = settings.start
    base = torch.float32
    if start is not None:
        base = base_dtype(load_config(start, loading_options(start, **settings.model.origin)))
    named = asked_dtype(settings, asked)
    if named != "auto":
        return DTYPES[named], base
    return (base if settings.publishes else torch.float32), base


def _base_of_adapter(start: str, revision: str | None) -> tuple[str, str | None]:
    """Return how an adapter names its base: on the hub with its commit, else a whole path.

    A relative one would lead elsewhere from another working folder.
    """
    if found := hub_snapshot(start):
        return found
    if Path(start).is_dir():
        return os.path.abspath(start), None
    return start, revision


def _describe(
    settings: TrainSettings,
    folder: Path,
    start: str | None,
    outcome: Outcome,
    *,
    is_adapter: bool,
    rounding: Rounding | None = None,
) -> None:
    public = public_config(settings.resolved, settings.written)
    write_text(folder / CONFIG, yaml.safe_dump(public, sort_keys=False, allow_unicode=True))
    stage = settings.spec
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
    name = scorer.class_name
    if name == "FunctionScorer":
        return f"a reward function ({without_folders(str(scorer.get('function')))})"
    if name == "RewardEnsembleScorer":
        return f"{len(scorer.get('sources') or ())} reward models"
    known = {"HttpScorer": "a reward service", "WeightedScorer": "a weighted sum of rewards"}
    return known.get(name, "a reward model" if name in _REWARD_MODELS else f"scores of {name}")


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
    """Return the hub names of datasets that `dataset` reads."""
    hub = dataset.source.class_name.endswith("HubSource")
    names = [dataset.hub_name, dataset.source.get("name") if hub else None]
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
