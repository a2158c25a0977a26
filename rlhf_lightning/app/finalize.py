"""The end of a stage: final figures, gates, export, artefact."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.app.config.compose import plain
from rlhf_lightning.app.model_export import Outcome, publishes, write_model_folder
from rlhf_lightning.app.stages.spec import Parts, find_stage, start_of
from rlhf_lightning.callbacks.iterations import current_iteration
from rlhf_lightning.callbacks.wandb_content import (
    Origin,
    log_lineage,
    log_samples,
    records_fingerprint,
    wandb_loggers,
)
from rlhf_lightning.data.summary import data_counts
from rlhf_lightning.distributed.collectives import full_state
from rlhf_lightning.evaluation.final_metrics import (
    Findings,
)
from rlhf_lightning.evaluation.gates import check_gates
from rlhf_lightning.evaluation.safety import required_measures
from rlhf_lightning.models.heads import PolicyModel, ScalarHeadModel
from rlhf_lightning.models.lora import AdaptedPolicy, AdaptedScalarModel
from rlhf_lightning.models.precision import release_freed_memory
from rlhf_lightning.runs.folder import RunFolder, SamplesAppender
from rlhf_lightning.runs.lock import artifact_lock
from rlhf_lightning.runs.manifest import (
    ManifestError,
    fingerprint,
    publish_artifact,
    read_manifest,
    source_fingerprint,
)
from rlhf_lightning.runs.summary import GateResult, Summary

logger = logging.getLogger(__name__)
ModelT = TypeVar("ModelT", bound=nn.Module)
MOST_TRAINING_PAIRS = 1000  # that are scored once more, to hold against held-out ones


def finish(
    cfg: DictConfig, folder: RunFolder, parts: Parts
) -> tuple[Findings, tuple[GateResult, ...]]:
    """Measure, hold against the gates, export and publish what a stage has trained.

    Every rank measures the same; the first alone writes.
    """
    stage = find_stage(cfg.stage)
    _let_go(parts)
    begun = time.perf_counter()
    with _precision(parts):
        findings = stage.finish(cfg, folder, parts)
    findings.metrics.update(data_counts(list(parts.data.summaries.values())))
    measured = time.perf_counter()
    required = required_measures((cfg.get("safety") or {}).get("prompts"))
    gates = check_gates(plain(cfg.gates), findings.metrics, required=required)
    model = getattr(parts.module, stage.trained)
    state = full_state(model)  # every rank takes part in gathering it
    if isinstance(model, AdaptedPolicy | AdaptedScalarModel):
        model.base.drop_weights()  # it is about to be read once more
        release_freed_memory()
    if parts.trainer.is_global_zero:
        _write_samples(folder, current_iteration(parts.trainer), findings)
        outcome = Outcome(folder.name, findings.metrics, gates)
        _export(cfg, folder, (model, parts.tokenizer, state), outcome)
    findings.seconds = {"measure": measured - begun, "export": time.perf_counter() - measured}
    return findings, gates


def _let_go(parts: Parts) -> None:
    """Free what only training needed: measuring may read one more model."""
    for optimizer in parts.trainer.optimizers:
        optimizer.zero_grad(set_to_none=True)
        optimizer.state.clear()
    release_freed_memory()


def _write_samples(folder: RunFolder, iteration: int, findings: Findings) -> None:
    samples = SamplesAppender(folder.samples)
    samples.drop("baseline_response")  # of a run that was killed after this and resumed
    if findings.samples:
        samples.append(iteration, findings.samples)


def _export(
    cfg: DictConfig,
    folder: RunFolder,
    trained: tuple[PolicyModel | ScalarHeadModel, PreTrainedTokenizerBase, dict[str, Tensor]],
    outcome: Outcome,
) -> None:
    """Write `export/`, and publish the same weights in fp32, which are written once."""
    full = folder.path / ".full_precision"
    shutil.rmtree(full, ignore_errors=True)  # of a run that was killed here and resumed
    try:
        write_model_folder(
            cfg, folder.export, *trained, outcome, full=full if publishes(cfg) else None
        )
        if publishes(cfg):
            _publish(cfg, folder, full if full.is_dir() else folder.export, outcome)
    finally:
        shutil.rmtree(full, ignore_errors=True)


def _publish(cfg: DictConfig, folder: RunFolder, source: Path, outcome: Outcome) -> None:
    target = Path(cfg.artifacts.publish)
    with _publishing(target):
        publish_artifact(
            source,
            target,
            stage=find_stage(cfg.stage).name,
            run=str(folder.path),
            metrics=outcome.metrics,
            gates=outcome.gates,
            base=start_of(cfg),
        )


@contextmanager
def _publishing(target: Path) -> Iterator[None]:
    # A parent process that waits for this artefact holds the folder's own lock.
    with artifact_lock(target.with_name(f"{target.name}.publish")):
        yield


@contextmanager
def _precision(parts: Parts) -> Iterator[None]:
    """The precision of training, for what happens after `fit`."""
    with parts.trainer.strategy.precision_plugin.forward_context():
        yield


def finish_tracking(
    cfg: DictConfig, folder: RunFolder, parts: Parts, findings: Findings, summary: Summary
) -> None:
    """Show the end of a run in W&B, if it is shown there, and close it."""
    for logger in wandb_loggers(parts.trainer):
        if findings.samples:
            iteration = current_iteration(parts.trainer)
            log_samples(logger, iteration, "held_out", findings.samples)
        logger.guarded(
            lambda logger=logger: log_lineage(
                logger, used_by(cfg, parts), made_by(cfg, folder, summary)
            )
        )
        logger.finish(summary.metrics, summary.gates)


def used_by(cfg: DictConfig, parts: Parts) -> Iterator[Origin]:
    """Yield the records that a stage was trained on and the models that it started from."""
    data = parts.data
    records = data.source.records(data.kind, "train")
    yield Origin(
        role="data",
        name=f"{cfg.dataset.name}-{data.kind}",
        kind="dataset",
        fingerprint=records_fingerprint(records),
        metadata={"records": len(records), "kind": data.kind},
    )
    for role in ("base", "sft", "reward", "ppo"):
        source = cfg.artifacts[role]
        if source is not None and role in find_stage(cfg.stage).uses:
            revision = cfg.model.get("revision")
            yield Origin(
                role, artifact_name(source), "model", source_fingerprint(source, revision), {}
            )


def made_by(cfg: DictConfig, folder: RunFolder, summary: Summary) -> Iterator[Origin]:
    """Yield the model that a stage has made."""
    if not (folder.export / "config.json").is_file():
        return  # an adapter alone, or several models
    target = cfg.artifacts.publish
    metadata: dict[str, Any] = {
        "stage": summary.stage,
        "passed": summary.passed,
        "metrics": {k: v for k, v in summary.metrics.items() if v is not None},
    }
    name = f"{cfg.dataset.name}-{cfg.name}" if target is None else artifact_name(target)
    yield Origin(cfg.name, name, "model", _fingerprint(cfg, folder), metadata)


def _fingerprint(cfg: DictConfig, folder: RunFolder) -> str:
    """Return that of what later stages load: an export may be rounded."""
    if publishes(cfg):
        with suppress(ManifestError):
            manifest = read_manifest(cfg.artifacts.publish, verify=False)
            if manifest.run == str(folder.path):
                return manifest.fingerprint
    return fingerprint(folder.export)


def artifact_name(source: str) -> str:
    """Return what a model is called in W&B: the last two parts of its folder, or of a hub name."""
    return "-".join(Path(source).parts[-2:])
