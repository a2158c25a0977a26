"""A recipe of a pretrained model runs from its hub folder to PPO, as its commands say."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from tests.builders.tokenizers import CHATML, build_tokenizer
from tests.entry.test_train import summary, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
DATASET = ["dataset=files", "dataset.path=pairs.jsonl", "dataset.name=mine"]
FEW = ["logger=none", "debug=fast", "data.batch_size=16", "evaluation.num_prompts=16"]
SHORT = "evaluation.max_new_tokens=12"


def write_hub_folder(folder: Path) -> None:
    """A small Llama with a chat template, whose pad token is its EOS."""
    tokenizer = build_tokenizer(template=CHATML)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_pairs(path: Path) -> None:
    draw = random.Random(0)
    rows = []
    for number in range(200):
        question = {"role": "user", "content": f"number {number}"}
        answers = [f"yes {draw.randrange(9)}", f"no {draw.randrange(9)} no"]
        sides = [[question, {"role": "assistant", "content": answer}] for answer in answers]
        rows.append(json.dumps({"chosen": sides[0], "rejected": sides[1]}))
    path.write_text("\n".join(rows))


@pytest.mark.parametrize("lora", ["none", "lora"])
def test_three_commands_lead_from_a_checkpoint_to_a_ppo_policy(tmp_path, lora):
    write_hub_folder(tmp_path / "hub")
    write_pairs(tmp_path / "pairs.jsonl")
    few = ["model=smollm2_135m", f"lora={lora}", *DATASET, *FEW]
    kept = "smollm2_135m" + ("_lora" if lora == "lora" else "")
    train(tmp_path, "+experiment=sft", *few, SHORT, "artifacts.base=hub", timeout=600)
    normalize = "module.reward.normalization_samples=16"
    train(tmp_path, "+experiment=reward", *few, SHORT, normalize, timeout=600)
    room = ["module.sampling.max_new_tokens=12", "module.ppo.micro_batch_size=4"]
    train(tmp_path, "+experiment=ppo", *few, *room, timeout=600)
    for stage in ("sft", "reward", "ppo"):
        assert summary(tmp_path, f"{stage}_smollm2_135m")["status"] == "completed"
        # debug=fast keeps its artefacts apart
        folder = tmp_path / "artifacts" / "debug_fast" / kept / "mine" / stage
        assert json.loads((folder / "manifest.json").read_text())
        assert "chat_template" in "".join(p.name for p in folder.iterdir())
