"""W&B content other than curves: histograms, samples, alerts, lineage.

Nothing here is bound to a service: a run without a W&B logger does none of it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
import wandb
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from rlhf_lightning.batches import RolloutBatch
from rlhf_lightning.callbacks.iterations import current_iteration
from rlhf_lightning.callbacks.samples import describe_rollout
from rlhf_lightning.callbacks.wandb_logger import IterationWandbLogger
from rlhf_lightning.modules.on_policy import OnPolicyModule
from rlhf_lightning.runs.folder import ITERATION, to_json
from rlhf_lightning.runs.stopping import RunStoppedError

NUM_BINS = 64
LONGEST_TEXT = 2000  # characters of a cell

# Column of a table -> key of a sample. The held-out ones also have an answer of the SFT policy.
_ANSWER = {"prompt": "prompt", "response": "response"}
_FIGURES = {"KL": "kl", "length": "length", "domain": "domain"}
COLUMNS = {**_ANSWER, "score": "score", **_FIGURES}
_BASELINE = {"SFT response": "baseline_response", "score": "score", "SFT score": "baseline_score"}
HELD_OUT_COLUMNS = {**_ANSWER, **_BASELINE, **_FIGURES}


class WandbContent(Callback):
    """Show rollouts in W&B, and send an alert when a run ends early.

    Histograms `histograms/<name>` every iteration: scores and response lengths by row, advantages
    by token, of the first process; probability ratios of the updates by token, of all. Tables
    `samples/best` and `samples/worst` by score every few iterations, of the first process.

    Args:
        every_n_iterations: iterations between two tables; the first iteration also has them.
        num_samples: rows of each table.
    """

    def __init__(self, *, every_n_iterations: int = 10, num_samples: int = 8) -> None:
        self.every_n_iterations = every_n_iterations
        self.num_samples = num_samples

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Show the rollout that the step returned, if it returned one."""
        rollout = outputs.get("rollout") if isinstance(outputs, Mapping) else None
        if rollout is None or not trainer.is_global_zero:
            return
        iteration = current_iteration(trainer)
        for logger in wandb_loggers(trainer):
            histograms = rollout_histograms(rollout, outputs.get("ratio_counts"))
            logger.log_row(iteration, {f"histograms/{k}": v for k, v in histograms.items()})
            if iteration == 1 or iteration % self.every_n_iterations == 0:
                module = cast(OnPolicyModule, pl_module)
                log_samples(logger, iteration, "best", self._ends(rollout, module, best=True))
                log_samples(logger, iteration, "worst", self._ends(rollout, module, best=False))

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Send an alert that says why the run ended early, and close it."""
        _alert_end(trainer, exception)

    def _ends(
        self, rollout: RolloutBatch, module: OnPolicyModule, *, best: bool
    ) -> list[dict[str, Any]]:
        scored = rollout[~rollout.known_scores.isnan()]
        order = scored.scores.float().cpu().argsort(descending=best, stable=True)
        rows, skip = scored[order[: self.num_samples]], module.sampling.skip_special_tokens
        return describe_rollout(rows, module.tokenizer, len(rows), skip_special_tokens=skip)


def wandb_loggers(trainer: Trainer) -> Iterator[IterationWandbLogger]:
    """Yield the W&B loggers of a Trainer."""
    for logger in trainer.loggers:
        if isinstance(logger, IterationWandbLogger):
            yield logger


@contextmanager
def early_end_alerted(trainer: Trainer) -> Iterator[None]:
    """Do for what happens behind `fit` as `WandbContent.on_exception` does within it."""
    try:
        yield
    except BaseException as error:
        _alert_end(trainer, error)
        raise


def _alert_end(trainer: Trainer, error: BaseException) -> None:
    stopped = isinstance(error, RunStoppedError | KeyboardInterrupt)
    cause = " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST_TEXT]
    for logger in wandb_loggers(trainer):
        title = f"the run {'was stopped' if stopped else 'failed'}"
        logger.alert(title, cause, "WARN" if stopped else "ERROR")
        logger.finish(exit_code=1)


def log_samples(
    logger: IterationWandbLogger,
    iteration: int,
    table: str,
    samples: Sequence[Mapping[str, Any]],
) -> None:
    """Write `samples/<table>`, one row a sample, as `samples.jsonl` has them.

    Args:
        logger: logger of the run.
        iteration: iteration of the policy that responded.
        table: held_out, best or worst.
        samples: their number and texts are bounded here: nothing else keeps a run small.
    """
    columns = HELD_OUT_COLUMNS if table == "held_out" else COLUMNS
    rows = [[iteration, *(_cell(s.get(key)) for key in columns.values())] for s in samples[:100]]
    if rows:
        content = wandb.Table(columns=[ITERATION, *columns], data=rows, allow_mixed_types=True)
        logger.log_row(iteration, {f"samples/{table}": content})


def rollout_histograms(
    rollout: RolloutBatch, ratio_counts: Tensor | None = None
) -> dict[str, wandb.Histogram]:
    """Return the histograms of a rollout: scores, lengths, advantages and, where known, ratios.

    Args:
        rollout: rollout of this process.
        ratio_counts: how often the updates saw a ratio, by equal bins over [0, 2]; None if there
            were none.
    """
    mask = rollout.response_mask
    values = {
        "scores": rollout.known_scores,
        "advantages": rollout.advantages[mask],
        "lengths": mask.sum(1),
    }
    found = {}
    for name, tensor in values.items():
        numbers = tensor.detach().float().cpu()
        numbers = numbers[numbers.isfinite()]
        if numbers.numel():
            found[name] = _histogram(numbers)
    if ratio_counts is not None and int(ratio_counts.sum()):
        found["ratios"] = _shown(ratio_counts, 0.0, 2.0)
    return found


def _histogram(numbers: Tensor) -> wandb.Histogram:
    low, high = float(numbers.min()), float(numbers.max())
    if not high > low:
        low, high = low - 0.5, high + 0.5
    return _shown(torch.histc(numbers, bins=NUM_BINS, min=low, max=high), low, high)


def _shown(counts: Tensor, low: float, high: float) -> wandb.Histogram:
    edges = np.linspace(low, high, len(counts) + 1)
    return wandb.Histogram(np_histogram=(counts.long().cpu().numpy(), edges))


def _cell(value: Any) -> Any:
    if isinstance(value, str):
        return value[:LONGEST_TEXT].encode("utf-8", "replace").decode("utf-8")
    return value


_NOT_A_NAME = re.compile(r"[^A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class Origin:
    """A model or a set of records.

    Args:
        role: what the run used or made it as: base, sft, reward, data, ...
        name: the same in every run that refers to it.
        kind: kind of artifact, `model` or `dataset`.
        fingerprint: fingerprint of its content.
        metadata: plain values that W&B shows beside it.
    """

    role: str
    name: str
    kind: str
    fingerprint: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


def records_fingerprint(records: Iterable[object]) -> str:
    """Return a SHA-256 over records, which are dataclasses of plain values, in their order."""
    digest = hashlib.sha256()
    for record in records:
        digest.update(repr(record).encode("utf-8", "backslashreplace") + b"\0")
    return digest.hexdigest()


def log_lineage(
    logger: IterationWandbLogger, used: Iterable[Origin], made: Iterable[Origin]
) -> None:
    """Record in W&B what a run used and what it made.

    Both are in the configuration as `lineage.used` and `lineage.made`, by role. What was made is an
    artifact too, and online so is what was used; offline W&B cannot mark an artifact as used, and
    the configuration alone says it.
    """
    used, made = list(used), list(made)
    logger.add_config({"lineage": {"used": _by_role(used), "made": _by_role(made)}})
    run = logger.experiment
    if not hasattr(run, "log_artifact"):  # a run that records nothing
        return
    for origin in made:
        logger.guarded(lambda origin=origin: run.log_artifact(as_artifact(origin)))
    if not getattr(run, "offline", True):
        for origin in used:
            logger.guarded(lambda origin=origin: run.use_artifact(as_artifact(origin)))


def as_artifact(origin: Origin) -> wandb.Artifact:
    """Return the artifact of an origin; equal fingerprints give equal digests."""
    name = _NOT_A_NAME.sub("-", origin.name).strip("-") or origin.kind
    artifact = wandb.Artifact(name[:120], type=origin.kind, metadata=dict(origin.metadata))
    with artifact.new_file("fingerprint.json", mode="w", encoding="utf-8") as file:
        file.write(to_json({"fingerprint": origin.fingerprint}) + "\n")
    return artifact


def _by_role(origins: Iterable[Origin]) -> dict[str, dict[str, str]]:
    return {o.role: {"artifact": o.name, "fingerprint": o.fingerprint} for o in origins}
