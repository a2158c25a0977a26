"""No stage starts from a model that is not whole, or not what its manifest says."""

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
from rlhf_lightning.models.factory import load_base
from rlhf_lightning.models.lora import add_policy
from rlhf_lightning.models.ppo_models import ADAPTER
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.manifest import source_fingerprint, write_manifest
from tests.builders.runs import settings_for

VICTIM = "model.layers.0.mlp.up_proj.weight"


def lose_a_tensor(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors[VICTIM]
    save_file(tensors, file, metadata={"format": "pt"})


def flip_a_bit(folder: Path) -> None:
    write_manifest(folder, stage="sft", run="r")
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def break_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("{")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("stage", "damage", "message"),
    [
        ("sft", flip_a_bit, r"is not what its manifest\.json says"),
        ("reward", break_the_manifest, r"manifest\.json is damaged"),
        ("ppo", lose_a_tensor, rf"its weights lack {VICTIM}"),
    ],
)
def test_no_stage_starts_from_a_damaged_model(
    tmp_path: Path, start: Path, stage: str, damage: Callable[[Path], None], message: str
) -> None:
    damaged = Path(shutil.copytree(start, tmp_path / "damaged" / start.name))
    damage(damaged)

    def begin() -> None:
        parts: Any = assemble(settings_for(stage, damaged), RunFolder(tmp_path / "run"))
        parts.trainer.fit(parts.module, datamodule=parts.data)

    with pytest.raises((ValueError, RuntimeError), match=message):
        begin()
    assert not (tmp_path / "run" / "metrics.csv").exists()


@pytest.mark.thorough
def test_a_policys_adapter_of_another_base_is_refused_with_both(tmp_path, start):
    policy = add_policy(load_base(start, LoraHparams(r=4)), "policy", seed=0)
    lora = ("lora=lora", "lora.r=4", f"artifacts.ppo={tmp_path / 'last'}")

    def assembled(base_fingerprint: str) -> None:
        folder = tmp_path / "last" / ADAPTER
        save_adapter(
            policy, folder, policy.state_dict(), base="elsewhere", base_fingerprint=base_fingerprint
        )
        assemble(settings_for("ppo", start, *lora), RunFolder(tmp_path / "run"))

    own = source_fingerprint(start)
    wanted = rf"last/adapter was trained on elsewhere and not on policy=.*{start}"
    with pytest.raises(ValueError, match=wanted):
        assembled("f" * 64)
    assembled(own)
