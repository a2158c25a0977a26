"""Folders of models: artifacts, which a `manifest.json` describes, fingerprints, and adapters."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from rlhf_lightning.runs.atomic import write_text
from rlhf_lightning.runs.folder import RunFolder, near_run, to_json
from rlhf_lightning.runs.lock import replacing_folder
from rlhf_lightning.runs.reading import parse, read_json
from rlhf_lightning.runs.summary import GateResult

MANIFEST = "manifest.json"
ADAPTER_CONFIG = "adapter_config.json"
_CHUNK_BYTES = 1 << 22
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_FIX = "make it with the experiment that publishes it: rlhf-train +experiment=NAME"


class ManifestError(RuntimeError):
    """An artifact is missing, damaged, or not what its manifest says."""


class ModelError(ValueError):
    """A folder or hub name is no model that can be loaded."""


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`, which describes the model folder it is in.

    Args:
        stage: `base`, `sft`, `reward`, `ppo` or `grpo`.
        fingerprint: result of `fingerprint(folder)` when the manifest was written.
        metrics: the final metrics of the run that made it.
        gates: the verdicts of that run.
        run: path of the run folder, relative to the working folder unless it was given as absolute.
        base: folder or hub name of the model it was trained from, None if from scratch.
        created: time of writing, UTC, ISO 8601.
        adapter: fingerprint of the files in `adapter/`; None without an adapter.
    """

    stage: str
    fingerprint: str
    metrics: Mapping[str, float | None]
    gates: tuple[GateResult, ...]
    run: str
    base: str | None
    created: str
    adapter: str | None = None


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
        raise ManifestError(f"{folder} has no config.json, or no *.safetensors: {_FIX}")
    files = (folder / "config.json", folder / "tokenizer.json", *weights)
    return _hash_of((path for path in files if path.is_file()), below=folder)


def content_digest(path: Path) -> str:
    """Return a SHA-256 of the content of a file, or the fingerprint of a model's folder.

    Of another folder it is over the names and contents of its files, those in its subfolders
    included. Links to folders and hidden folders are not entered.

    Raises:
        ManifestError: if a model is not what its manifest says.
    """
    if not path.is_dir():
        return _hash_of([path])
    if has_manifest(path) or any(path.glob("*.safetensors")):
        return source_fingerprint(str(path))
    inside = []
    for place, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inside += [file for name in names if (file := Path(place, name)).is_file()]
    return _hash_of(sorted(inside), below=path)


def has_manifest(folder: Path | str) -> bool:
    """Return whether `folder` is an artifact of ours, intact or not; False for a hub name."""
    return (Path(folder) / MANIFEST).is_file()


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
        adapter=_adapter_hash(Path(folder)),
    )
    write_text(Path(folder) / MANIFEST, to_json(asdict(manifest), indent=2) + "\n")
    return manifest


def read_manifest(folder: Path | str, *, verify: bool = True) -> Manifest:
    """Return the manifest of an artifact folder, after checking its weights against it.

    Args:
        folder: folder of the artifact.
        verify: False skips the fingerprint, which reads every weight once.

    Raises:
        ManifestError: if the manifest is missing or damaged, or if the files are not those it was
            written for; the message names the command that makes the artifact again.
    """
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise ManifestError(f"{folder} has no {MANIFEST}: {_FIX}")
    try:
        manifest = parse(Manifest, path.read_bytes())
    except ValueError as error:
        raise ManifestError(f"{path} is damaged ({error}): {_FIX}") from error
    if verify and (
        fingerprint(folder) != manifest.fingerprint
        or (manifest.adapter and _adapter_hash(path.parent) != manifest.adapter)
    ):
        raise ManifestError(f"{folder} is not what its {MANIFEST} says (SHA-256): {_FIX}")
    return manifest


def _adapter_hash(folder: Path) -> str | None:
    files = [p for p in folder.glob("adapter/*") if p.suffix in (".json", ".safetensors")]
    return _hash_of(sorted(files), below=folder / "adapter") if files else None


def _hash_of(paths: Iterable[Path], *, below: Path | None = None) -> str:
    """Return a SHA-256 over contents, and with `below` over sizes and names below that folder.

    A process reads the same files once: policy, reference and value model often share a source.
    """
    files = []
    for path in paths:
        name = "" if below is None else path.relative_to(below).as_posix()
        files.append((path.absolute(), name, path.stat().st_size, path.stat().st_mtime_ns))
    return _hash(tuple(files))


@functools.lru_cache(maxsize=1024)
def _hash(files: tuple[tuple[Path, str, int, int], ...]) -> str:
    digest = hashlib.sha256()
    for path, name, size, _ in files:
        if name:
            digest.update(f"{name}\0{size}\0".encode())
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def publish_artifact(source: Path | str, target: Path | str, **described: Any) -> Manifest:
    """Put a model folder where later stages look, in place of what is there.

    Weights are linked, not copied, where both folders are on one file system. The copy and its
    manifest are complete before the name changes hands, so a reader or a kill at any instant meets
    the former artifact or the new one. Hold `artifact_lock(target)` if others may publish too.

    Args:
        source: folder of the model.
        target: folder of the artifact.
        described: keyword arguments of `write_manifest`.

    Raises:
        ManifestError: if `source` holds no model.
        FolderTakenError: if `target` is something other than an artifact.
    """
    source = Path(source)
    fingerprint(source)  # fail before anything is copied
    with replacing_folder(target) as staging:
        shutil.copytree(source, staging, copy_function=_link_or_copy)
        manifest = write_manifest(staging, **described)
        for path in (path for path in staging.rglob("*") if path.is_file()):
            with path.open("rb") as file:
                os.fsync(file.fileno())
    return manifest


def _link_or_copy(source: str, target: str) -> None:
    """Make `target` a hard link to a file of weights, or a copy of a file."""
    if source.endswith(".safetensors"):
        with suppress(OSError):  # another file system, or one without hard links
            os.link(source, target, follow_symlinks=True)
            return
    shutil.copy2(source, target)


def source_fingerprint(source: str, revision: str | None = None) -> str:
    """Return the fingerprint of a folder, or the commit of a hub name.

    Of a name that can be loaded neither from the hub nor from its cache it is the name itself.

    Raises:
        ManifestError: if the folder is no model, or is not what its manifest says.
    """
    if not Path(source).is_dir():
        from rlhf_lightning.runs.hub import hub_commit  # the hub's library takes a while to import

        return hub_commit(source, revision) or source
    return read_manifest(source).fingerprint if has_manifest(source) else fingerprint(source)


@dataclass(frozen=True)
class Source:
    """A folder or hub name, and the model that was there when it was first read.

    Args:
        name: folder or hub name.
        fingerprint: result of `source_fingerprint`.
        key: configuration key that names it, for the message.
        revision: branch, tag or commit of a hub name.
    """

    name: str
    fingerprint: str
    key: str = "source"
    revision: str | None = None

    @classmethod
    def of(cls, name: str | Path, key: str = "source", revision: str | None = None) -> Self:
        """Return the source as it is now."""
        return cls(str(name), source_fingerprint(str(name), revision), key, revision)

    def state_dict(self) -> dict[str, Any]:
        """Return the fingerprint, for a checkpoint."""
        return {"fingerprint": self.fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Compare it with that of a checkpoint.

        Raises:
            ValueError: if the checkpoint was trained with another model.
        """
        if (former := state["fingerprint"]) != self.fingerprint:
            now = f"{self.key}={self.name} is {self.fingerprint[:12]}"
            raise ValueError(f"the checkpoint was trained with {self.key} {former[:12]}, and {now}")

    def check(self) -> None:
        """Check that the model which is loaded now is the one that was resolved.

        Raises:
            ManifestError: if another one was put in its place.
        """
        now = source_fingerprint(self.name, self.revision)
        if now != self.fingerprint:
            what = f"{self.key}={self.name} is another model now"
            raise ManifestError(f"{what}, {now[:12]}: put {self.fingerprint[:12]} back and resume")


def is_adapter(folder: Path | str) -> bool:
    """Return whether a folder holds an adapter of PEFT and no model."""
    folder = Path(folder)
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


def is_available(source: str) -> bool:
    """Return whether a folder holds a model, or the text can be a hub name."""
    folder = Path(source)
    if folder.is_dir():
        return (folder / "config.json").is_file() or is_adapter(folder)  # named when it is loaded
    # A hub name: transformers looks for it, in its cache first.
    return bool(_HUB_NAME.fullmatch(source)) and not folder.parent.exists()


def no_model(source: str, fix: str) -> str:
    """Return why `is_available` does not take a source, what to give, and what is near to it."""
    what = "has no config.json" if Path(source).is_dir() else "does not exist"
    return f"{source} {what}: {fix}{near_run(Path(source), RunFolder.export / 'config.json')}"


def of_adapter(folder: Path) -> str:
    """Return what an adapter's folder is, and how one gets the model."""
    try:
        base = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{folder / ADAPTER_CONFIG} is damaged: copy it again") from error
    fix = "merge it by peft's merge_and_unload() and save_pretrained(FOLDER), and give that folder"
    exported = ("config.json", "training_config.yaml")  # an export of ours has it in adapter/
    if all((folder.parent / name).is_file() for name in exported):
        fix = f"give {folder.parent}, where it is merged"
    return f"{folder} is an adapter on {base}, and not a model: {fix}"
