"""A model that is another one than at the start is refused where it is loaded again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from rlhf_lightning import LoraHparams, SFTModule, export_model
from rlhf_lightning.runs.manifest import ManifestError
from tests.builders.models import tiny_policy, tiny_tokenizer

LORA = LoraHparams(r=2, alpha=4)


def swap(folder: Path) -> None:
    weights = {k: v * 1.25 for k, v in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def start(tmp_path: Path) -> Path:
    folder = tmp_path / "start"
    tiny_policy("llama").model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_weights_of_another_model_than_the_tokenizer_are_refused(start):
    module = SFTModule.from_pretrained(start)
    swap(start)
    with pytest.raises(ManifestError, match="another model now"):
        module.configure_model()


def test_export_model_merges_no_adapter_into_another_base(start, tmp_path):
    module = SFTModule.from_pretrained(start, lora=LORA)
    module.configure_model()
    swap(start)
    with pytest.raises(ManifestError, match="another model now"):
        export_model(module, tmp_path / "export")
    assert not (tmp_path / "export").exists()
    shutil.rmtree(start)
    with pytest.raises((ManifestError, ValueError)):
        export_model(module, tmp_path / "export")
