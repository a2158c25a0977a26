"""Floating-point operations of a PPO update, by two counts.

Six operations for each weight of a matrix and token: two forward, four backward. Attention scores,
norms and the optimizer are not counted, nor is anything that is computed a second time.
"""

from __future__ import annotations

from typing import Any

from benchmarks.shapes import Workload, prompts


def trunk_weights(shape: dict[str, Any]) -> int:
    """Return the number of weights in the matrices of the decoder layers."""
    return shape["num_hidden_layers"] * sum(m * n for m, n in layer_matrices(shape))


def layer_matrices(shape: dict[str, Any]) -> list[tuple[int, int]]:
    """Return (inputs, outputs) of every matrix of one Llama decoder layer."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    head = hidden // shape["num_attention_heads"]
    keys = head * shape["num_key_value_heads"]
    attention = [(hidden, hidden), (hidden, keys), (hidden, keys), (hidden, hidden)]
    return [*attention, (hidden, inner), (hidden, inner), (inner, hidden)]


def head_weights(shape: dict[str, Any]) -> int:
    """Return the number of weights of the language-model head."""
    return int(shape["hidden_size"] * shape["vocab_size"])


def update_flops(shape: dict[str, Any], workload: Workload) -> dict[str, float]:
    """Return what one iteration's updates of policy and value model cost.

    Returns:
        nominal: every row padded to the longest, the head at every position.
        needed: real tokens alone, the head at response positions alone.
    """
    trunk, head = trunk_weights(shape), head_weights(shape)
    rows, responses = workload.num_prompts, workload.num_prompts * workload.new_tokens
    padded = rows * (workload.longest_prompt + workload.new_tokens)
    real = responses + sum(map(len, prompts(workload, shape["vocab_size"], 0)))
    passes = 6.0 * workload.num_ppo_epochs
    return {
        "nominal": passes * padded * (2 * trunk + head),
        "needed": passes * (real * 2 * trunk + responses * head),
    }
