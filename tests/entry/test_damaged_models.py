"""Every command refuses a model that is not whole, or not what its manifest says."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from rlhf_lightning.app.build import assemble
from rlhf_lightning.hparams import LoraHparams
from rlhf_lightning.models.adapter_files import save_adapter
from rlhf_lightning.models.factory import load_base, load_scalar_model
from rlhf_lightning.models.lora import add_policy
from rlhf_lightning.models.ppo_models import ADAPTER
from rlhf_lightning.modules.export import save_hf_model
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.manifest import source_fingerprint, write_manifest
from rlhf_lightning.text.tokenizers import load_tokenizer
from tests.builders.runs import settings_for

VICTIM = "model.layers.0.mlp.up_proj.weight"


def lose_a_tensor(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors[VICTIM]
    save_file(tensors, file, metadata={"format": "pt"})


def flip_a_bit(folder: Path) -> None:
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def break_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("{")


# What was done to a folder, whether it is an artefact of ours, and what is said of it.
DAMAGES: dict[str, tuple[Callable[[Path], None], bool, str]] = {
    "tensor": (lose_a_tensor, False, rf"its weights lack {VICTIM}"),
    "bit": (flip_a_bit, True, r"is not what its manifest\.json says"),
    "manifest": (break_the_manifest, True, r"manifest\.json is damaged"),
}


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory, start: Path) -> Path:
    folder = tmp_path_factory.mktemp("models") / "reward"
    model, tokenizer = load_scalar_model(start, head="reward"), load_tokenizer(start)
    save_hf_model(model, tokenizer, folder, model.state_dict(), stop_ids=[1])
    return folder


@pytest.fixture
def damaged(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Path], tuple[Path, str]]:
    """What damages a copy of a folder, and returns it and what is said of it."""
    damage, ours, message = DAMAGES[request.param]

    def of(folder: Path) -> tuple[Path, str]:
        copy = Path(shutil.copytree(folder, tmp_path / "damaged" / folder.name))
        if ours:
            write_manifest(copy, stage="sft", run="r")
        damage(copy)
        return copy, message

    return of


def begin(stage: str, start: Path, folder: Path, *overrides: str) -> None:
    parts: Any = assemble(settings_for(stage, start, *overrides), RunFolder(folder))
    parts.trainer.fit(parts.module, datamodule=parts.data)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("stage", "damaged"),
    [("sft", "bit"), ("reward", "manifest"), ("ppo", "tensor")],
    indirect=["damaged"],
)
def test_no_stage_starts_from_a_damaged_model(tmp_path, start, damaged, stage):
    folder, message = damaged(start)
    with pytest.raises((ValueError, RuntimeError), match=message):
        begin(stage, folder, tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.csv").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("stage", ["ppo", "grpo"])
def test_a_policys_adapter_of_another_base_is_refused_with_both(tmp_path, start, stage):
    policy = add_policy(load_base(start, LoraHparams(r=4)), "policy", seed=0)
    lora = ("lora=lora", "lora.r=4", f"artifacts.ppo={tmp_path / 'last'}")

    def assembled(base_fingerprint: str) -> None:
        folder = tmp_path / "last" / ADAPTER
        save_adapter(
            policy, folder, policy.state_dict(), base="elsewhere", base_fingerprint=base_fingerprint
        )
        assemble(settings_for(stage, start, *lora), RunFolder(tmp_path / "run"))

    own = source_fingerprint(start)
    wanted = rf"last/adapter was trained on elsewhere and not on policy=.*{start}"
    with pytest.raises(ValueError, match=wanted):
        assembled("f" * 64)
    assembled(own)
