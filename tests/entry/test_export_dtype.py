"""In which dtype an export is, what later stages load, and that no weights are written twice."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rlhf_lightning.app.config.commands import ExportSettings
from rlhf_lightning.app.export import run
from rlhf_lightning.app.tracking import made_by
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.manifest import read_manifest
from rlhf_lightning.runs.summary import read_summary
from tests.builders.runs import completed, settings_for

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def bf16(start, tmp_path_factory):
    """The start as hubs have it, in bf16, and the SFT run that was published from it."""
    folder = tmp_path_factory.mktemp("bf16")
    shutil.copytree(start, folder / "start")
    weights = load_file(start / "model.safetensors")
    half = {name: value.to(torch.bfloat16) for name, value in weights.items()}
    save_file(half, folder / "start/model.safetensors", metadata={"format": "pt"})
    config = json.loads((start / "config.json").read_text()) | {"dtype": "bfloat16"}
    (folder / "start/config.json").write_text(json.dumps(config))
    published = f"artifacts.publish={folder}/published"
    completed(folder / "run", "sft", folder / "start", published)
    return folder


def test_an_export_has_the_dtype_of_its_base_and_what_later_stages_load_is_whole(bf16):
    exported, published = bf16 / "run/export", bf16 / "published"
    half, full = (load_file(f / "model.safetensors") for f in (exported, published))
    assert set(half) == set(full)
    for name, value in full.items():
        assert value.dtype == torch.float32
        assert torch.equal(half[name], value.to(torch.bfloat16)), name
    assert not torch.equal(value, half[name].float()), "nothing was rounded"
    assert AutoModelForCausalLM.from_pretrained(exported).dtype == torch.bfloat16
    assert read_manifest(published).run == str(bf16 / "run")
    assert not list((bf16 / "run").glob(".full*"))
    (origin,) = made_by(
        settings_for("sft", bf16 / "start", f"artifacts.publish={published}"),
        RunFolder(bf16 / "run"),
        read_summary(RunFolder(bf16 / "run")),
    )
    assert origin.fingerprint == read_manifest(published).fingerprint, "what the next stage loads"


def test_the_next_stage_knows_the_dtype_of_the_root_and_keeps_its_head_in_fp32(bf16, tmp_path):
    folder = completed(
        tmp_path / "run",
        "reward",
        bf16 / "published",
        f"artifacts.publish={tmp_path}/reward",
        "module.reward.learning_rate=1e-3",
    )
    half = load_file(folder.export / "model.safetensors")
    full = load_file(tmp_path / "reward/model.safetensors")
    assert torch.equal(half.pop("score.weight"), full.pop("score.weight"))
    assert {value.dtype for value in half.values()} == {torch.bfloat16}
    assert {value.dtype for value in full.values()} == {torch.float32}


def test_the_dtype_can_be_asked_for(bf16, tmp_path):
    run(ExportSettings(run=bf16 / "run", to=tmp_path / "out", dtype="fp32"))
    weights = load_file(tmp_path / "out/model.safetensors")
    full = load_file(bf16 / "published/model.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.float32}
    assert all(torch.equal(weights[name], value) for name, value in full.items())


def test_the_same_weights_are_written_once_and_a_later_run_leaves_the_artefact_alone(
    start, tmp_path
):
    places = (f"artifacts.publish={tmp_path}/published", "lora=lora", "lora.r=4")
    folder = completed(tmp_path / "run", "sft", start, *places)
    names = ("model.safetensors", "adapter/adapter_model.safetensors")
    for name in names:
        assert os.path.samefile(folder.export / name, tmp_path / "published" / name)
    before = read_manifest(tmp_path / "published").fingerprint
    run(ExportSettings(run=folder.path, dtype="bf16"))
    for name in names:
        assert not os.path.samefile(folder.export / name, tmp_path / "published" / name)
    assert read_manifest(tmp_path / "published").fingerprint == before


@pytest.mark.parametrize("dtype", ["auto", "bf16"])
def test_steps_that_bf16_would_undo_are_kept_in_fp32_unless_bf16_is_insisted_on(
    bf16, tmp_path, dtype
):
    folder = completed(
        tmp_path / "run",
        "sft",
        bf16 / "start",
        f"artifacts.publish={tmp_path}/published",
        f"export.dtype={dtype}",
        "module.sft.learning_rate=1e-7",
    )
    weights = load_file(folder.export / "model.safetensors")
    wanted = torch.float32 if dtype == "auto" else torch.bfloat16
    assert {value.dtype for value in weights.values()} == {wanted}
