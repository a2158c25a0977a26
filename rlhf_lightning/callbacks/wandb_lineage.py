"""From which data and models a model was made: W&B artifacts that later runs refer to.

An artifact holds no weights. Its one file is the fingerprint of what it stands for, so that the run
that made a model and the run that starts from it name the same version, and W&B draws the line
between them: data -> SFT -> reward model -> policy.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import wandb

from rlhf_lightning.callbacks.wandb_logger import IterationWandbLogger
from rlhf_lightning.runs.folder import to_json

_NOT_A_NAME = re.compile(r"[^A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class Origin:
    """A model or a set of records.

    Args:
        role: what the run used or made it as: base, sft, reward, data, ...
        name: the same in every run that refers to it.
        kind: `model` or `dataset`.
        fingerprint: of its content.
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
    """Tell W&B what a run used and what it made.

    Both stand in the configuration as `lineage.used` and `lineage.made`, by role. What was made is
    an artifact too, and online so is what was used; offline W&B cannot mark an artifact as used,
    and the configuration alone says it.
    """
    used, made = list(used), list(made)
    logger.add_config(
        {"lineage": {"used": _by_role(used), "made": _by_role(made)}},
    )
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
