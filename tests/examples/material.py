"""A tiny model on disk, and files of records, for the examples."""

from __future__ import annotations

import json
from pathlib import Path

from tests.tiny import VOCABULARY, tiny_policy, tiny_tokenizer

NUM_ROWS = 60


def words(row: int, count: int) -> str:
    """Return a text of words that differ from row to row."""
    return " ".join(f"w{2 + (row * 7 + i * 5) % (VOCABULARY - 2)}" for i in range(count))


def write_material(folder: Path) -> dict[str, Path]:
    """Write a policy and files of demonstrations, pairs and prompts; return their paths."""
    policy = folder / "policy"
    tiny_policy("llama", max_position_embeddings=2048).model.save_pretrained(policy)
    tiny_tokenizer().save_pretrained(policy)
    rows = {
        "demonstrations": lambda i: {"prompt": words(i, 3), "completion": words(i + 1, 4)},
        "pairs": lambda i: {
            "prompt": words(i, 3),
            "chosen": f"{words(i, 3)} w3",
            "rejected": f"{words(i, 3)} w4",
        },
        "prompts": lambda i: {"prompt": words(i, 3)},
    }
    made = {"policy": policy}
    for name, row in rows.items():
        made[name] = folder / f"{name}.jsonl"
        made[name].write_text("".join(json.dumps(row(i)) + "\n" for i in range(NUM_ROWS)))
    return made
