"""No stage starts from the adapter of another base."""

from __future__ import annotations

import pytest

from rlhf_lightning.app.build import assemble
from rlhf_lightning.hparams import LoraHparams
from rlhf_lightning.models.adapter_files import save_adapter
from rlhf_lightning.models.factory import load_base
from rlhf_lightning.models.lora import add_policy
from rlhf_lightning.models.ppo_models import ADAPTER
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.manifest import source_fingerprint
from tests.builders.runs import settings_for


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
