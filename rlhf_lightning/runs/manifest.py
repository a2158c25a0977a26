"""Artefacts: model folders that later stages load, each vouched for by its `manifest.json`."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlhf_lightning.runs.atomic import replace_folder, write_text
from rlhf_lightning.runs.folder import to_json
from rlhf_lightning.runs.summary import GateResult

MANIFEST = "manifest.json"
_STAGES = ("base", "sft", "reward", "ppo")
_CHUNK_BYTES = 1 << 22


class ManifestError(RuntimeError):
    """An artefact is missing, damaged, or not what its manifest says."""


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` says about the model folder it stands in.

    Args:
        stage: `base`, `sft`, `reward` or `ppo`.
        fingerprint: of `fingerprint(folder)` when the manifest was written.
        metrics: the final metrics of the run that made it.
        gates: the verdicts of that run.
        run: name of the run folder.
        base: fingerprint of the artefact it was trained from, None if from scratch.
        created: UTC, ISO 8601.
    """

    stage: str
    fingerprint: str
    metrics: Mapping[str, float | None]
    gates: tuple[GateResult, ...]
    run: str
    base: str | None
    created: str

    def __post_init__(self) -> None:
        """Accept gates as mappings."""
        gates = tuple(g if isinstance(g, GateResult) else GateResult(**g) for g in self.gates)
        object.__setattr__(self, "gates", gates)

    @property
    def passed(self) -> bool:
        """Whether every gate of the run passed."""
        return all(gate.passed for gate in self.gates)


def fingerprint(folder: Path | str) -> str:
    """Return a SHA-256 over `config.json`, `tokenizer.json` and every safetensors file.

    Names count as well as contents. A missing tokenizer counts as such; generation settings,
    model cards and manifests do not count.

    Raises:
        ManifestError: if there is no `config.json` or no safetensors file.
    """
    folder = Path(folder)
    weights = sorted(folder.glob("*.safetensors"))
    if not (folder / "config.json").is_file() or not weights:
        raise ManifestError(
            f"{folder} is no model folder: it needs config.json and at least one *.safetensors; "
            + _fix(folder)
        )
    digest = hashlib.sha256()
    for path in (folder / "config.json", folder / "tokenizer.json", *weights):
        if path.is_file():
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    digest.update(chunk)
    return digest.hexdigest()


def write_manifest(
    folder: Path | str,
    *,
    stage: str,
    run: str,
    metrics: Mapping[str, float | None] | None = None,
    gates: Sequence[GateResult] = (),
    base: str | None = None,
) -> Manifest:
    """Write `manifest.json` into a model folder and return it; the weights must be there already.

    Raises:
        ManifestError: if `folder` holds no model.
    """
    manifest = Manifest(
        stage=stage,
        fingerprint=fingerprint(folder),
        metrics=dict(metrics or {}),
        gates=tuple(gates),
        run=run,
        base=base,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    write_text(Path(folder) / MANIFEST, to_json(asdict(manifest), indent=2) + "\n")
    return manifest


def read_manifest(folder: Path | str, *, verify: bool = True) -> Manifest:
    """Return the manifest of an artefact folder, after checking that the weights are those.

    Args:
        folder: the artefact.
        verify: False skips the fingerprint, which reads every weight once.

    Raises:
        ManifestError: if the manifest is missing or damaged, or if the files are not those it
            was written for; the message names the command that makes the artefact again.
    """
    folder = Path(folder)
    path = folder / MANIFEST
    if not path.is_file():
        raise ManifestError(f"{folder} has no {MANIFEST}: {_fix(folder)}")
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        manifest = Manifest(**{f.name: content[f.name] for f in fields(Manifest)})
    except (ValueError, TypeError, KeyError) as error:
        raise ManifestError(f"{path} is damaged ({error!r}): {_fix(folder)}") from error
    if verify and (found := fingerprint(folder)) != manifest.fingerprint:
        raise ManifestError(
            f"{folder} is not what its {MANIFEST} says: fingerprint {found[:12]}, expected "
            f"{manifest.fingerprint[:12]}; the files were changed or only partly copied: "
            + _fix(folder)
        )
    return manifest


def publish_artifact(
    source: Path | str,
    target: Path | str,
    *,
    stage: str,
    run: str,
    metrics: Mapping[str, float | None] | None = None,
    gates: Sequence[GateResult] = (),
    base: str | None = None,
) -> Manifest:
    """Put a model folder where later stages look, in place of what stands there.

    Weights are linked and not written once more, where both folders are on one file system.
    The copy and its manifest are complete before the name changes hands, so a reader or a kill
    at any instant meets the former artefact or the new one. Hold `artifact_lock(target)` if
    others may publish too.

    Raises:
        ManifestError: if `source` holds no model.
    """
    source, target = Path(source), Path(target)
    fingerprint(source)  # fail before anything is copied
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    shutil.rmtree(staging, ignore_errors=True)
    former: Path | None = None
    try:
        shutil.copytree(source, staging, copy_function=_link_or_copy)
        manifest = write_manifest(
            staging, stage=stage, run=run, metrics=metrics, gates=gates, base=base
        )
        _sync_files(staging)
        former = replace_folder(staging, target)
    finally:
        shutil.rmtree(former or staging, ignore_errors=True)
    return manifest


def _link_or_copy(source: str, target: str) -> None:
    if source.endswith(".safetensors"):
        try:
            os.link(source, target, follow_symlinks=True)
            return
        except OSError:  # another file system, or one without hard links
            Path(target).unlink(missing_ok=True)
    shutil.copy2(source, target)


def _sync_files(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _fix(folder: Path) -> str:
    stage = folder.name if folder.name in _STAGES else "<stage>"
    return f"make it with `python -m rlhf_lightning.train +experiment={stage}`"
