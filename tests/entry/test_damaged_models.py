"""No stage starts from a model that is not what its manifest says, or an adapter of another."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from rlhf_lightning.app.build import assemble
from rlhf_lightning.hparams import LoraHparams
from rlhf_lightning.models.adapter_files import save_adapter
from rlhf_lightning.models.factory import load_base
from rlhf_lightning.models.lora import add_policy
from rlhf_lightning.models.ppo_models import ADAPTER
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.manifest import source_fingerprint, write_manifest
from tests.builders.runs import settings_for


@pytest.mark.thorough
def test_no_stage_starts_from_a_model_that_is_not_what_its_manifest_says(tmp_path, start):
    damaged = Path(shutil.copytree(start, tmp_path / "damaged"))
    write_manifest(damaged, stage="sft", run="r")
    content = bytearray((damaged / "model.safetensors").read_bytes())
    content[-5] ^= 1
    (damaged / "model.safetensors").write_bytes(content)

    def begin() -> None:
        parts: Any = assemble(settings_for("sft", damaged), RunFolder(tmp_path / "run"))
        parts.trainer.fit(parts.module, datamodule=parts.data)

    with pytest.raises((ValueError, RuntimeError), match=r"is not what its manifest\.json says"):
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
