"""Every command at bf16, on the common architectures, with Llama's layer as transformers wrote it.

In this process: a stage runs, what it exports is evaluated and exported again.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_lightning.app.config.commands import ExportSettings
from rlhf_lightning.app.config.saved import write_settings
from rlhf_lightning.app.evaluate import run as run_evaluate
from rlhf_lightning.app.export import run as run_export
from rlhf_lightning.app.train import run as run_train
from rlhf_lightning.data.demo.vocabulary import demo_tokenizer
from rlhf_lightning.models import cpu
from rlhf_lightning.models.factory import load_policy, load_scalar_model
from rlhf_lightning.modules.export import save_hf_model
from rlhf_lightning.runs.folder import RunFolder
from tests.builders.command_lines import overrides_of, settings_of
from tests.builders.runs import completed
from tests.models.test_architectures import ARCHITECTURES

pytestmark = pytest.mark.timeout(600)
BF16 = "trainer.precision=bf16-mixed"
KINDS = [("qwen2", True), ("gpt2", True), ("gemma3_text", True), ("llama", True), ("llama", False)]
EVALUATE = [
    "evaluation.num_prompts=6",
    "evaluation.max_new_tokens=4",
    "evaluation.batch_size=6",
]


def made(folder: Path, kind: str) -> Path:
    """Write a tiny policy of the built-in world's tokenizer."""
    tokenizer = demo_tokenizer()
    eos = int(tokenizer.eos_token_id)  # type: ignore[arg-type]
    size = "n_positions" if kind == "gpt2" else "max_position_embeddings"
    changes: dict[str, Any] = {"vocab_size": len(tokenizer), "eos_token_id": eos, size: 128}
    policy = load_policy(from_scratch=ARCHITECTURES[kind] | changes)
    save_hf_model(policy, tokenizer, folder, policy.state_dict(), stop_ids=[eos])
    return folder


def reward_of(policy: Path, folder: Path) -> Path:
    model = load_scalar_model(policy, head="reward")
    tokenizer = demo_tokenizer()
    eos = int(tokenizer.eos_token_id)  # type: ignore[arg-type]
    save_hf_model(model, tokenizer, folder, model.state_dict(), stop_ids=[eos])
    return folder


def evaluated(folder: Path, policy: Path, baseline: Path, reward: Path, *more: str) -> Any:
    given = [f"policy={policy}", f"baseline={baseline}", f"artifacts.reward={reward}", *EVALUATE]
    given += [f"scorer.policy={policy}", *more]
    return run_evaluate(settings_of(*given, entry="evaluate"), RunFolder(folder), given).metrics


def ppo_run(folder: Path, sft: Path, *more: str) -> RunFolder:
    own = [word for word in overrides_of("ppo", sft) if not word.startswith("scorer")]
    settings, made = settings_of(*own, *more), RunFolder(folder)
    made.config.parent.mkdir(parents=True)
    write_settings(made.config, settings)  # as Hydra does
    run_train(settings, made, [])
    return made


@pytest.fixture
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name, fused = request.param
    if not fused:
        monkeypatch.setattr(cpu, "use_fused_layers", lambda model: None)
    return str(name)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [("qwen2", True), ("llama", False)], indirect=True)
def test_an_evaluation_runs_at_bf16(tmp_path: Path, kind: str) -> None:
    start = made(tmp_path / "start", kind)
    reward = reward_of(start, tmp_path / "reward")
    found = evaluated(tmp_path / "bf16", start, start, reward, BF16)
    plain = evaluated(tmp_path / "fp32", start, start, reward)
    assert found["val/kl_per_token"] == 0
    assert all(math.isfinite(value) for value in found.values())
    assert found["val/score"] != plain["val/score"], "bf16 rounds"


@pytest.mark.slow
@pytest.mark.parametrize("lora", [(), ("lora=lora", "lora.r=4")], ids=["whole", "lora"])
@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_every_command_runs_at_bf16(tmp_path: Path, kind: str, lora: tuple[str, ...]) -> None:
    base = made(tmp_path / "base", kind)
    sft = completed(tmp_path / "sft", "sft", base, BF16, *lora).export
    reward = completed(tmp_path / "reward", "reward", sft, BF16, *lora).export
    scorer = "scorer=reward_adapter" if lora else "scorer=reward_model"
    ppo = ppo_run(tmp_path / "ppo", sft, f"artifacts.reward={reward}", scorer, BF16, *lora)
    measures = json.loads(ppo.summary.read_text())["metrics"]
    assert math.isfinite(measures["val/score"])
    found = evaluated(tmp_path / "evaluate", ppo.export, sft, reward, BF16)
    assert found["val/kl_per_token"] >= -1
    assert all(math.isfinite(value) for value in found.values())

    run_export(ExportSettings(run=ppo.path, to=tmp_path / "out"))
    exported, kept = load_policy(tmp_path / "out"), load_policy(ppo.export)
    for name, value in kept.state_dict().items():
        torch.testing.assert_close(exported.state_dict()[name], value, rtol=0, atol=1e-6)
