"""A tiny policy whose answers differ in length from the first iteration on."""

from __future__ import annotations

from pathlib import Path

import torch

from rlhf_lightning.data.demo.vocabulary import demo_tokenizer
from rlhf_lightning.models.export import export_model
from rlhf_lightning.models.factory import load_policy

LOUDER = 12.0  # how much more than other tokens EOS depends on what stands before it


def make_start(folder: Path) -> Path:
    """Write a random policy with the built-in world's tokenizer, whose EOS is common."""
    tokenizer = demo_tokenizer()
    stop = int(tokenizer.eos_token_id)
    fields = {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 128,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": stop,
        "pad_token_id": tokenizer.pad_token_id,
    }
    policy = load_policy(from_scratch=fields)
    with torch.no_grad():
        policy.model.get_output_embeddings().weight[stop] *= LOUDER
    export_model(policy, tokenizer, folder, policy.state_dict(), stop_ids=[stop])
    return folder
