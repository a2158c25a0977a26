"""Model shapes and workloads, the same on every side of a comparison.

Nothing here needs more than the standard library, so that the peer's environment can import it.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

PAD, EOS, UNKNOWN = 0, 1, 2
FIRST_WORD = 3

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": None,
    "attention_dropout": 0.0,
}


def _llama(
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    intermediate: int,
    vocabulary: int,
    tied: bool,
) -> dict[str, Any]:
    return _LLAMA | {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": tied,
    }


# Fields of a Hugging Face config. "135m" is SmolLM2-135M, "0.5b" is Qwen2.5-0.5B, "1b" is
# Llama-3.2-1B.
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _llama(32, 2, 2, 1, 64, 128, True),
    "10m": _llama(256, 6, 4, 4, 1024, 8192, False),
    "135m": _llama(576, 30, 9, 3, 1536, 49152, True),
    "0.5b": _llama(896, 24, 14, 2, 4864, 151936, True) | {"model_type": "qwen2"},
    "1b": _llama(2048, 16, 32, 8, 8192, 128256, True),
}


@dataclass(frozen=True)
class Workload:
    """One PPO iteration.

    Args:
        num_prompts: rows of the rollout.
        shortest_prompt, longest_prompt: tokens; the lengths between are spread evenly.
        new_tokens: length of every response; nothing stops earlier.
        num_ppo_epochs: passes over the rollout, one optimizer step each.
        micro_batch_size: rows in one forward and backward of the update; on CUDA of the peer's
            alone, as this project's default there is a number of tokens.
    """

    num_prompts: int = 32
    shortest_prompt: int = 8
    longest_prompt: int = 32
    new_tokens: int = 32
    num_ppo_epochs: int = 4
    micro_batch_size: int = 8

    def as_dict(self) -> dict[str, int]:
        """Return the fields, for JSON."""
        return asdict(self)


WORKLOADS = {
    "cpu": Workload(),
    "cuda": Workload(num_prompts=64, shortest_prompt=16, longest_prompt=256, new_tokens=256),
    "quick": Workload(
        num_prompts=8,
        shortest_prompt=2,
        longest_prompt=6,
        new_tokens=4,
        num_ppo_epochs=2,
        micro_batch_size=4,
    ),
}


def spread(shortest: int, longest: int, count: int, *, seed: int) -> list[int]:
    """Return `count` lengths spread evenly over `shortest .. longest`, shuffled by `seed`."""
    steps = max(count - 1, 1)
    lengths = [shortest + round(i * (longest - shortest) / steps) for i in range(count)]
    random.Random(seed).shuffle(lengths)
    return lengths


def token_rows(lengths: list[int], vocabulary: int, *, seed: int) -> list[list[int]]:
    """Return rows of random words with these lengths: no padding, no EOS."""
    draw = random.Random(seed)
    return [[draw.randrange(FIRST_WORD, vocabulary) for _ in range(n)] for n in lengths]


def prompts(workload: Workload, vocabulary: int, iteration: int) -> list[list[int]]:
    """Return the prompts of an iteration; every side gets the same ones in the same order."""
    lengths = spread(
        workload.shortest_prompt, workload.longest_prompt, workload.num_prompts, seed=iteration
    )
    return token_rows(lengths, vocabulary, seed=1000 + iteration)
