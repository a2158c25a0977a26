"""An evaluation at bf16, also with Llama's layer as transformers wrote it.

Every other command at bf16: tests/multiprocess/test_every_command.py.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from rlhf_lightning.app.evaluate import run as run_evaluate
from rlhf_lightning.data.demo.vocabulary import demo_tokenizer
from rlhf_lightning.models import cpu
from rlhf_lightning.models.factory import load_policy, load_scalar_model
from rlhf_lightning.modules.export import save_hf_model
from rlhf_lightning.runs.folder import RunFolder
from tests.builders.command_lines import settings_of
from tests.models.test_architectures import ARCHITECTURES

EVALUATE = [
    "evaluation.num_prompts=6",
    "evaluation.max_new_tokens=4",
    "evaluation.batch_size=6",
]


def evaluated(folder: Path, policy: Path, reward: Path, *more: str) -> Any:
    given = [f"policy={policy}", f"baseline={policy}", f"artifacts.reward={reward}", *EVALUATE]
    given += [f"scorer.policy={policy}", *more]
    return run_evaluate(settings_of(*given, entry="evaluate"), RunFolder(folder), given).metrics


@pytest.mark.thorough
@pytest.mark.timeout(200)
@pytest.mark.parametrize(("kind", "fused"), [("qwen2", True), ("llama", False)])
def test_an_evaluation_runs_at_bf16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, fused: bool
) -> None:
    if not fused:
        monkeypatch.setattr(cpu, "use_fused_layers", lambda model: None)
    tokenizer = demo_tokenizer()
    eos = int(tokenizer.eos_token_id)  # type: ignore[arg-type]
    fields = {"vocab_size": len(tokenizer), "eos_token_id": eos, "max_position_embeddings": 128}
    start, reward = tmp_path / "start", tmp_path / "reward"
    policy = load_policy(from_scratch=ARCHITECTURES[kind] | fields)
    save_hf_model(policy, tokenizer, start, policy.state_dict(), stop_ids=[eos])
    scalar = load_scalar_model(start, head="reward")
    save_hf_model(scalar, tokenizer, reward, scalar.state_dict(), stop_ids=[eos])
    found = evaluated(tmp_path / "bf16", start, reward, "trainer.precision=bf16-mixed")
    plain = evaluated(tmp_path / "fp32", start, reward)
    assert found["val/kl_per_token"] == 0
    assert all(math.isfinite(value) for value in found.values())
    assert found["val/score"] != plain["val/score"], "bf16 rounds"
