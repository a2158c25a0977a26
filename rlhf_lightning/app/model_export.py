"""The folder that leaves a run: weights, tokenizer, adapter, model card and configuration."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import get_local_safetensors_metadata

from rlhf_lightning.app.build import make_tokenizer, with_vocabulary
from rlhf_lightning.app.config.commands import ExportSettings
from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.app.config.groups import DatasetSettings, Target
from rlhf_lightning.app.config.saved import best_of_early_stopping, read_saved, working_folder
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.config.targets import nodes
from rlhf_lightning.app.evaluation import TrainingComponents
from rlhf_lightning.distributed.checkpoint import read_full
from rlhf_lightning.distributed.collectives import full_state
from rlhf_lightning.evaluation.final_metrics import Findings
from rlhf_lightning.models.adapter_files import CONFIG as ADAPTER_CONFIG
from rlhf_lightning.models.adapter_files import EXTRA as ADAPTER_EXTRA
from rlhf_lightning.models.adapter_files import WEIGHTS as ADAPTER_WEIGHTS
from rlhf_lightning.models.factory import load_policy, load_scalar_model
from rlhf_lightning.models.heads import PolicyModel, ScalarHeadModel
from rlhf_lightning.models.loading import loading_options
from rlhf_lightning.models.lora import AdaptedPolicy, AdaptedScalarModel
from rlhf_lightning.models.ppo_models import ADAPTER
from rlhf_lightning.models.precision import DTYPES, Rounding, release_freed_memory
from rlhf_lightning.modules.checkpoint_state import KEY, check_adapters
from rlhf_lightning.modules.export import TrainedModel
from rlhf_lightning.runs.atomic import write_text
from rlhf_lightning.runs.doctor_log import alerts_of, read_events
from rlhf_lightning.runs.folder import RunFolder, read_metrics
from rlhf_lightning.runs.hub import base_licence, hub_base
from rlhf_lightning.runs.lock import artifact_lock, replacing_folder
from rlhf_lightning.runs.manifest import Source, publish_artifact
from rlhf_lightning.runs.model_card import CONFIG, CardFacts, plain, write_model_card
from rlhf_lightning.runs.public_config import public_config, without_folders
from rlhf_lightning.runs.reading import read_json
from rlhf_lightning.runs.resume import checkpoint_iteration, read_checkpoint
from rlhf_lightning.runs.summary import GateResult, installed_versions, read_summary
from rlhf_lightning.runs.verdict import doubt_of
from rlhf_lightning.text.tokenizers import as_saved

_HUB_DATA = re.compile(r"[\w.-]+/[\w.-]+")
_DTYPES = {"F32": "fp32", "BF16": "bf16"}  # as safetensors calls them, and we


def export_trained(
    parts: TrainingComponents, findings: Findings, gates: tuple[GateResult, ...], warning: str
) -> None:
    """Write `export/` of a run that has ended, and publish the same weights in fp32.

    Every rank calls it, to gather the weights; the first writes. The card has the warning.
    """
    settings, folder = parts.settings, parts.folder
    module: Any = parts.module
    model, state = module.trained, full_state(module.trained)
    own = {"trust_remote_code": settings.model.trust_remote_code}
    trained = TrainedModel(model, module.tokenizer, state, module.source, **own)
    if isinstance(model, AdaptedPolicy | AdaptedScalarModel):
        model.base.drop_weights()  # it is about to be read once more
        release_freed_memory()
    if not parts.trainer.is_global_zero:
        return
    told = f"{warning} {doubt_of(alerts_of(read_events(folder.doctor)))}".strip()
    card = card_facts(settings, folder.name, findings.metrics, gates, doubts=told)
    with replacing_folder(folder.export, ours=True) as staging:
        rounding = write_model_folder(settings, staging, trained, card)
    if not settings.publishes:
        return
    whole, target = folder.export, Path(str(settings.artifacts.publish))
    try:
        if rounding is not None:
            whole = folder.path / ".full_precision"
            shutil.rmtree(whole, ignore_errors=True)  # of a run that was killed here and resumed
            write_model_folder(settings, whole, trained, card, dtype="fp32")
        # A parent process that waits for this artifact holds the folder's own lock.
        with artifact_lock(target.with_name(f"{target.name}.publish")):
            publish_artifact(
                whole,
                target,
                stage=settings.stage,
                run=str(folder.path),
                metrics=findings.metrics,
                gates=gates,
                base=settings.start,
            )
    finally:
        if whole != folder.export:
            shutil.rmtree(whole, ignore_errors=True)


def write_model_folder(
    settings: TrainSettings,
    folder: Path,
    trained: TrainedModel,
    card: CardFacts,
    *,
    dtype: str | None = None,
) -> Rounding | None:
    """Write what a run has trained as a Hugging Face folder, with its card and configuration.

    Args:
        settings: settings of the run.
        folder: a new folder.
        trained: the trained model.
        card: from `card_facts`.
        dtype: dtype of the weights: fp32, bf16, or auto, which is that of the start if the fp32
            weights are published as well, and else fp32; None takes that of the configuration.

    Returns:
        The cost of rounding; None where the weights are in fp32.

    Raises:
        ManifestError: if the adapter's base has been replaced by another model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    named = dtype or settings.export.dtype
    auto = "auto" if settings.publishes else torch.float32
    rounding = trained.write(folder, dtype=DTYPES.get(named, auto))  # type: ignore[arg-type]
    _describe(settings, folder, replace(card, rounding=rounding))
    if (folder / ADAPTER).is_dir():
        _describe(settings, folder / ADAPTER, card)
    return rounding


def _describe(settings: TrainSettings, folder: Path, card: CardFacts) -> None:
    """Write the card and the public configuration beside a model or an adapter alone."""
    public = public_config(settings.resolved, settings.written)
    write_text(folder / CONFIG, yaml.safe_dump(public, sort_keys=False, allow_unicode=True))
    if (folder / ADAPTER_CONFIG).is_file():
        card = replace(card, is_adapter=True, needs=_needs(folder))
    elif card.is_reward:
        offset = read_json(folder / "config.json")["reward_offset"]
        pad = as_saved(str(folder), loading_options(folder)).pad_token
        card = replace(card, reward={"reward_offset": offset, "pad_token": pad})
    write_model_card(folder, card)


def card_facts(
    settings: TrainSettings,
    run: str,
    metrics: Mapping[str, float | None],
    gates: Sequence[GateResult] = (),
    checkpoint: str | None = None,
    doubts: str = "",
) -> CardFacts:
    """Return what a card says of a run's model, whichever folder it stands in.

    Args:
        settings: settings of the run.
        run: name of the run folder.
        metrics: final metrics of the run.
        gates: outcomes of its gates.
        checkpoint: says which checkpoint it is, for one that is not the end of a finished run.
        doubts: what speaks against the metrics.
    """
    module, start = settings.spec, settings.start
    return CardFacts(
        stage=settings.stage,
        run=run,
        base=start,
        data=settings.dataset.name,
        licence=base_licence(settings.model.license, start),
        hub_base=hub_base(start, settings.model.source),
        datasets=_hub_data(settings.dataset),
        settings=_hyperparameters(settings),
        metrics={k: v for k, v in metrics.items() if v is not None},
        gates=gates,
        versions=installed_versions(),
        checkpoint=checkpoint,
        doubts=doubts,
        against=_against(settings.scorer) if module.rolls_out else None,
        title=settings.title,
        is_reward=not module.trains_policy,
    )


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


def _hub_data(dataset: DatasetSettings) -> tuple[str, ...]:
    """Return the hub names of datasets that `dataset` reads, of every one of several sources."""
    calls = nodes(dataset.source.read())
    named = [one.arguments.get("name") for one in calls if getattr(one.call, "on_hub", False)]
    names = dict.fromkeys(str(name) for name in (dataset.hub_name, *named) if name)
    return tuple(n for n in names if _HUB_DATA.fullmatch(n) and not Path(n).exists())


def _hyperparameters(settings: TrainSettings) -> dict[str, Any]:
    """Return the hyper-parameters that decide what was learnt, flat."""
    config = public_config(settings.resolved, settings.written)
    module, data, stage = config["module"], config["data"], settings.stage
    names = ("batch_size", "max_length", "max_prompt_length", "num_epochs", "num_iterations")
    groups: dict[str, Any] = {
        "data": {name: data.get(name) for name in names},
        "trainer": {"precision": config["trainer"]["precision"]},
        stage: module[stage],
        "sampling": module.get("sampling"),
        **{group: config.get(group) for group in ("lora", "optimizer", "scheduler")},
    }
    return {"seed": config["seed"]} | {
        f"{group}.{name}": value
        for group, values in groups.items()
        for name, value in (values or {}).items()
        if not name.startswith("_") and value is not None
    }


def export_checkpoint(
    asked: ExportSettings, folder: RunFolder, checkpoint: Path, target: Path
) -> str:
    """Write the model of a checkpoint as a folder, in one step, replacing an earlier one.

    A run folder may come from another machine, so its configuration is data: it is validated again,
    and only our loaders are built by name, from plain values.

    Args:
        asked: settings of the command.
        folder: folder of the run.
        checkpoint: checkpoint of the run.
        target: folder of the model.

    Returns:
        What it is and what takes it, in lines for people.

    Raises:
        ConfigError: if the configuration is not allowed, or if there is no model that the
            checkpoint fits.
    """
    try:
        settings = with_vocabulary(_saved_settings(folder))
    except ConfigError as error:
        raise ConfigError(f"{folder.config}: {error}") from error
    try:
        trained = _trained_model(settings, checkpoint)
        card = _card_of_checkpoint(settings, folder, checkpoint, trained)
        with replacing_folder(target, ours=True) as staging:
            if asked.adapter_only:
                trained.write_adapter(staging)
                _describe(settings, staging, card)
            else:
                write_model_folder(settings, staging, trained, card, dtype=asked.dtype)
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot export {checkpoint}: {error}") from error
    return _next_steps(settings, folder, checkpoint, target)


def _next_steps(settings: TrainSettings, run: RunFolder, checkpoint: Path, target: Path) -> str:
    """Return what was exported and what takes it, a line each."""
    place, is_adapter = shlex.quote(str(target)), (target / ADAPTER_CONFIG).is_file()
    counts = get_local_safetensors_metadata(target / ADAPTER_WEIGHTS if is_adapter else target)
    weights = " and ".join(
        f"{count:,} weights in {_DTYPES.get(dtype, dtype)}"
        for dtype, count in sorted(counts.parameter_count.items())
    )
    ended = f"{settings.title} after iteration {checkpoint_iteration(checkpoint)}"
    loader = f"Auto{'Peft' if is_adapter else ''}ModelFor"
    loader += "CausalLM" if settings.spec.trains_policy else "SequenceClassification"
    lines = [
        f"run    {run.path}: {ended}, {weights}",
        f"load   {loader}.from_pretrained({str(target)!r})",
    ]
    if settings.spec.trains_policy and not is_adapter:
        installed = "after pip install 'transformers[serving]'"
        lines += [
            f"talk   rlhf-chat {place}",
            f"serve  vllm serve {place}",
            f"       or transformers serve {place}, {installed}",
        ]
    elif not is_adapter:
        lines.append(f"train  rlhf-train ppo MODEL FILE --reward-model {place}")
    return "\n".join(lines) + "\n"


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
        told = "would run code that the run folder names: only its own run exports such a model"
        raise ConfigError(f"{key}={code[key]} {told}")
    there = working_folder(folder) / (start or "")
    if start is not None and there.exists() and there.resolve() != Path(start).resolve():
        # The run was started in another folder than this command, which may hold another model.
        settings = settings.updated({f"artifacts.{settings.spec.starts_from}": str(there)})
    return settings


def _trained_model(settings: TrainSettings, checkpoint: Path) -> TrainedModel:
    """Return the trained model, built by our own loaders, with the checkpoint's weights."""
    content = read_full(checkpoint) if checkpoint.is_dir() else read_checkpoint(checkpoint)
    module, node, lora, start = settings.spec, settings.module, settings.lora, settings.start
    prefix = "policy." if module.trains_policy else "model."
    state = {
        k.removeprefix(prefix): v for k, v in content["state_dict"].items() if k.startswith(prefix)
    }
    if not state:
        raise ValueError(f"it holds no weights whose names begin with {prefix}")
    source: Any = None
    revision = settings.model.revision
    if start is not None:
        place = f"artifacts.{module.starts_from}"
        source = Source(start, str(content.get(KEY, "")), place, revision)
    given: dict[str, Any] = {
        "seed": settings.seed,
        "revision": revision,
        # The adapter is the same on a base in full precision, which needs no CUDA.
        "lora": None if lora is None else replace(lora, quantization="none"),
    }
    model: PolicyModel | ScalarHeadModel
    if module.trains_policy:
        model = load_policy(start, from_scratch=node.get("from_scratch"), **given)
    else:
        dropout = node.get("dropout", 0.0)
        model = load_scalar_model(start, head="reward", dropout=dropout, **given)
    if source is not None and (lora is not None or KEY in content):
        source.check()  # an export has its config and its tokenizer
    check_adapters(content, model)
    model.load_state_dict(state)
    return TrainedModel(model, make_tokenizer(settings), dict(model.state_dict()), source)


def _card_of_checkpoint(
    settings: TrainSettings, folder: RunFolder, checkpoint: Path, trained: TrainedModel
) -> CardFacts:
    """Return what is known of a checkpoint; the end of a finished run is as the run left it."""
    iteration, best = checkpoint_iteration(checkpoint), best_of_early_stopping(folder)
    rows = {int(row["iteration"]): row for row in read_metrics(folder.metrics)}
    summary = read_summary(folder) if folder.summary.is_file() else None
    finished = summary is not None and summary.status == "completed"
    last = max(rows, default=iteration) if best is None else checkpoint_iteration(best)
    is_reward = isinstance(trained.model, ScalarHeadModel)
    if summary is not None and finished and iteration == last:
        metrics = summary.metrics
        mean, std = (metrics.get(f"reward/sample_{name}") for name in ("mean", "std"))
        if isinstance(trained.model, ScalarHeadModel) and mean is not None and std is not None:
            trained.model.normalize(mean, std)
        told = f"{summary.warning} {doubt_of(summary.alerts)}".strip()
        return card_facts(settings, folder.name, metrics, summary.gates, doubts=told)
    of = "before the end of its run" if finished else "of a run that has not finished"
    note = f"A checkpoint {of}, after iteration {iteration}. No gate has checked it."
    note += " Its scores are not normalized." if is_reward else ""
    left_out = ("time/", "throughput/", "iteration")
    measured = {k: v for k, v in rows.get(iteration or 0, {}).items() if not k.startswith(left_out)}
    return card_facts(settings, folder.name, measured, checkpoint=note)
