"""The end of a stage: final figures, gates, export, artifact."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.evaluation import gates_of, placed, validate
from rlhf_lightning.app.model_export import Outcome, write_model_folder
from rlhf_lightning.app.stages.spec import TrainingComponents
from rlhf_lightning.callbacks.iterations import current_iteration
from rlhf_lightning.callbacks.wandb_logger import (
    Origin,
    log_lineage,
    log_samples,
    records_fingerprint,
    wandb_loggers,
)
from rlhf_lightning.distributed.collectives import full_state
from rlhf_lightning.evaluation.final_metrics import Findings, trained_findings
from rlhf_lightning.models.lora import AdaptedPolicy, AdaptedScalarModel
from rlhf_lightning.models.precision import release_freed_memory
from rlhf_lightning.modules.export import Trained
from rlhf_lightning.runs.folder import RunFolder, read_metrics
from rlhf_lightning.runs.lock import artifact_lock
from rlhf_lightning.runs.manifest import (
    ManifestError,
    fingerprint,
    publish_artifact,
    read_manifest,
    source_fingerprint,
)
from rlhf_lightning.runs.publish import replacing_folder
from rlhf_lightning.runs.summary import GateResult, Summary


def finish(
    settings: TrainSettings, folder: RunFolder, parts: TrainingComponents
) -> tuple[Findings, tuple[GateResult, ...]]:
    """Measure the trained model, check its gates, export and publish it.

    Every rank measures the same; the first alone writes.
    """
    stage = settings.spec
    release_freed_memory()  # of the optimizer: measuring may read one more model
    begun = time.perf_counter()
    with cast(Any, parts.trainer.strategy.precision_plugin).forward_context():  # that of training
        shown = _shown(settings, folder, parts)
        findings = stage.finish(settings, folder, parts)
    findings.metrics = {**shown.metrics, **findings.metrics}
    findings.values = findings.values or shown.values
    measured = time.perf_counter()
    gates = gates_of(settings, findings.metrics)
    model = getattr(parts.module, stage.trained)
    state = full_state(model)  # every rank takes part in gathering it
    if isinstance(model, AdaptedPolicy | AdaptedScalarModel):
        model.base.drop_weights()  # it is about to be read once more
        release_freed_memory()
    if parts.trainer.is_global_zero:
        findings.write(folder, current_iteration(parts.trainer))
        outcome = Outcome(folder.name, findings.metrics, gates)
        trained = Trained(
            model,
            parts.tokenizer,
            state,
            cast(Any, parts.module).source,
            trust_remote_code=settings.model.trust_remote_code,
        )
        _export(settings, folder, trained, outcome)
    findings.seconds = {"measure": measured - begun, "export": time.perf_counter() - measured}
    return findings, gates


def _shown(settings: TrainSettings, folder: RunFolder, parts: TrainingComponents) -> Findings:
    """Return the metrics of all held-out records, and what else the training shows by itself."""
    metrics = {} if settings.spec.rolls_out else validate(parts)
    rows = read_metrics(folder.metrics) if parts.trainer.is_global_zero else []
    model = getattr(parts.module, settings.spec.trained)
    placed(parts, model)
    batch_size = settings.evaluation.batch_size
    found = trained_findings(parts.module, parts.data, rows, batch_size=batch_size)
    found.metrics = metrics | found.metrics
    return found


def _export(settings: TrainSettings, folder: RunFolder, trained: Trained, outcome: Outcome) -> None:
    """Write `export/`, and publish the same weights in fp32, which are written once."""
    full = folder.path / ".full_precision"
    shutil.rmtree(full, ignore_errors=True)  # of a run that was killed here and resumed
    try:
        with replacing_folder(folder.export, ours=True) as staging:
            kept = full if settings.publishes else None
            write_model_folder(settings, staging, trained, outcome, full=kept)
        if settings.publishes:
            target = Path(str(settings.artifacts.publish))
            # A parent process that waits for this artifact holds the folder's own lock.
            with artifact_lock(target.with_name(f"{target.name}.publish")):
                publish_artifact(
                    full if full.is_dir() else folder.export,
                    target,
                    stage=settings.spec.name,
                    run=str(folder.path),
                    metrics=outcome.metrics,
                    gates=outcome.gates,
                    base=settings.start,
                )
    finally:
        shutil.rmtree(full, ignore_errors=True)


def finish_tracking(
    settings: TrainSettings,
    folder: RunFolder,
    parts: TrainingComponents,
    findings: Findings,
    summary: Summary,
) -> None:
    """Show the end of a run in W&B, if it is shown there, and close it."""
    for logger in wandb_loggers(parts.trainer):
        if findings.samples:
            log_samples(logger, current_iteration(parts.trainer), "held_out", findings.samples)
        logger.guarded(
            lambda logger=logger: log_lineage(
                logger, used_by(settings, parts), made_by(settings, folder, summary)
            )
        )
        logger.finish(summary.metrics, summary.gates)


def used_by(settings: TrainSettings, parts: TrainingComponents) -> Iterator[Origin]:
    """Yield the records that a stage was trained on and the models that it started from."""
    data = parts.data
    records = data.source.records(data.kind, "train")
    yield Origin(
        role="data",
        name=f"{settings.dataset.name}-{data.kind}",
        kind="dataset",
        fingerprint=records_fingerprint(records),
        metadata={"records": len(records), "kind": data.kind},
    )
    for role, source in settings.artifacts.models().items():
        if role in settings.spec.uses:
            print_ = source_fingerprint(source, settings.model.revision)
            yield Origin(role, artifact_name(source), "model", print_, {})


def made_by(settings: TrainSettings, folder: RunFolder, summary: Summary) -> Iterator[Origin]:
    """Yield the model that a stage has made."""
    if not (folder.export / "config.json").is_file():
        return  # an adapter alone, or several models
    target = settings.artifacts.publish
    metadata: dict[str, Any] = {
        "stage": summary.stage,
        "passed": summary.passed,
        "metrics": {k: v for k, v in summary.metrics.items() if v is not None},
    }
    name = f"{settings.dataset.name}-{settings.name}" if target is None else artifact_name(target)
    # Of what later stages load: an export may be rounded.
    print_ = fingerprint(folder.export)
    with suppress(ManifestError):  # another run may have published over it
        loaded = read_manifest(str(target), verify=False) if settings.publishes else None
        if loaded is not None and loaded.run == str(folder.path):
            print_ = loaded.fingerprint
    yield Origin(settings.name, name, "model", print_, metadata)


def artifact_name(source: str) -> str:
    """Return what a model is called in W&B: the last two parts of its folder, or of a hub name."""
    return "-".join(Path(source).parts[-2:])
