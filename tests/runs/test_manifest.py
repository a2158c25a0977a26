from __future__ import annotations

import hashlib
import multiprocessing
import os
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf_lightning.runs.lock import artifact_lock
from rlhf_lightning.runs.manifest import (
    ManifestError,
    content_digest,
    fingerprint,
    publish_artifact,
    read_manifest,
    write_manifest,
)
from rlhf_lightning.runs.summary import GateResult

# Only the kernel and the file system are under test, and fork starts at once.
fork = multiprocessing.get_context("fork")


def make_model(folder: Path, value: float = 1.0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"hidden_size": 4}')
    (folder / "tokenizer.json").write_text('{"model": {}}')
    save_file({"weight": torch.full((1000,), value)}, folder / "model.safetensors")
    return folder


def test_a_manifest_is_read_back_and_vouches_for_the_files(tmp_path):
    folder = make_model(tmp_path / "sft")
    gates = [GateResult("win rate", 0.6, 0.7, False, "too few wins")]
    written = write_manifest(
        folder, stage="sft", run="2026-11-21_10-00", metrics={"val/loss": 1.5}, gates=gates
    )
    assert read_manifest(folder) == written


def test_the_fingerprint_changes_with_config_tokenizer_and_weights_and_nothing_else(tmp_path):
    folder = make_model(tmp_path / "sft")
    before = fingerprint(folder)
    (folder / "README.md").write_text("a model card")
    (folder / "generation_config.json").write_text("{}")
    assert fingerprint(folder) == before
    assert fingerprint(make_model(tmp_path / "same")) == before
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content + b" ")
        assert fingerprint(folder) != before, name
        (folder / name).write_bytes(content)
    save_file({"w": torch.zeros(1)}, folder / "value_head.safetensors")
    assert fingerprint(folder) != before


def test_a_folder_of_files_counts_with_its_subfolders_their_names_and_contents(tmp_path):
    folder = tmp_path / "records"
    (folder / "year" / ".cache").mkdir(parents=True)
    (folder / "a.jsonl").write_text("{}")
    flat = content_digest(folder)
    assert flat == hashlib.sha256(b"a.jsonl\x002\x00{}").hexdigest()
    found = {flat}
    for name, text in (("b", "1"), ("b", "2"), ("c", "2")):
        for file in (folder / "year").glob("?.jsonl"):
            file.unlink()
        (folder / "year" / f"{name}.jsonl").write_text(text)
        found.add(content_digest(folder))
    assert len(found) == 4
    (folder / "year" / ".cache" / "of_a_tool").write_text("0")
    assert content_digest(folder) in found


def test_an_artefact_that_is_missing_damaged_or_changed_names_the_command(tmp_path):
    fix = r"rlhf-train \+experiment=NAME"
    folder = tmp_path / "sft"
    with pytest.raises(ManifestError, match=rf"no manifest\.json.*{fix}"):
        read_manifest(folder)
    make_model(folder)
    (folder / "manifest.json").write_text('{"stage": "sft"}')
    with pytest.raises(ManifestError, match=rf"damaged.*{fix}"):
        read_manifest(folder)
    write_manifest(folder, stage="sft", run="r")
    save_file({"weight": torch.zeros(1000)}, folder / "model.safetensors")
    with pytest.raises(ManifestError, match=rf"not what its manifest\.json says.*{fix}"):
        read_manifest(folder)
    assert read_manifest(folder, verify=False).stage == "sft"
    (folder / "model.safetensors").unlink()
    with pytest.raises(ManifestError, match=r"no config\.json"):
        fingerprint(folder)


def test_publishing_replaces_the_former_artefact_wholly(tmp_path):
    target = tmp_path / "artifacts" / "sft"
    (make_model(tmp_path / "first") / "old_only.txt").write_text("x")
    first = publish_artifact(tmp_path / "first", target, stage="sft", run="first")
    assert read_manifest(target) == first
    second = publish_artifact(
        make_model(tmp_path / "second", 2.0), target, stage="sft", run="second", base="abc"
    )
    assert read_manifest(target) == second != first
    assert not (target / "old_only.txt").exists()
    assert load_file(target / "model.safetensors")["weight"].tolist() == [2.0] * 1000
    assert [p.name for p in target.parent.iterdir()] == ["sft"]
    with pytest.raises(ManifestError, match=r"no config\.json"):
        publish_artifact(tmp_path / "nothing", target, stage="sft", run="third")
    assert read_manifest(target) == second


def _publish_for_ever(sources: list[Path], target: Path) -> None:
    while True:
        for source in sources:
            publish_artifact(source, target, stage="sft", run=source.name)


def test_a_reader_never_meets_half_an_artefact_not_even_after_a_kill(tmp_path):
    sources = [make_model(tmp_path / str(i), float(i)) for i in (1, 2)]
    target = tmp_path / "sft"
    publish_artifact(sources[0], target, stage="sft", run="1")
    writer = fork.Process(target=_publish_for_ever, args=(sources, target), daemon=True)
    writer.start()
    seen = set()
    deadline = time.monotonic() + 20
    while len(seen) < 2 and time.monotonic() < deadline:
        seen.add(read_manifest(target, verify=False).run)
        assert (target / "model.safetensors").exists()
    writer.kill()
    writer.join()
    assert seen == {"1", "2"}
    assert read_manifest(target).run in seen


def _hold(folder: Path, held: object, release: object) -> None:
    with artifact_lock(folder):
        if not os.fork():  # as a pool of a reward function does, whose processes outlive a kill
            os._exit(not release.wait(30))  # type: ignore[attr-defined]
        held.set()  # type: ignore[attr-defined]
        release.wait(30)  # type: ignore[attr-defined]


@pytest.mark.parametrize("ending", ["release", "kill"])
def test_a_waiter_says_so_and_goes_on_when_the_holder_ends_in_any_way(tmp_path, ending):
    folder = tmp_path / "artifacts" / "sft"
    held, release = fork.Event(), fork.Event()
    holder = fork.Process(target=_hold, args=(folder, held, release), daemon=True)
    holder.start()
    assert held.wait(20)
    said = []

    def report(message: str) -> None:
        said.append(message)
        (release.set if ending == "release" else holder.kill)()

    begun = time.monotonic()
    with artifact_lock(folder, report=report):
        assert time.monotonic() - begun < 20
        holder.join(20)
        assert not holder.is_alive()
    assert len(said) == 1
    assert f"process {holder.pid}" in said[0]
    assert str(folder) in said[0]
