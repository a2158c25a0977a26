"""Default learning rates by the size of a model.

docs/models.md says where the numbers come from.
"""

from __future__ import annotations

from math import exp, log
from typing import Literal, NamedTuple

import numpy as np

Kind = Literal["sft", "reward", "policy", "value"]
LORA_FACTOR = 10  # Schulman et al. 2025, "LoRA Without Regret"


class Rates(NamedTuple):
    """Peak learning rates where every weight of a model of this size is trained."""

    num_parameters: int
    sft: float
    reward: float
    policy: float
    value: float


# The first row is the built-in world's model, with the rates of its experiments.
TABLE = (
    Rates(664_192, 1e-3, 5e-4, 4e-4, 1e-3),
    Rates(134_515_008, 3e-5, 3e-5, 1e-5, 1e-5),
    Rates(361_821_120, 2e-5, 2e-5, 6e-6, 1e-5),
    Rates(494_032_768, 2e-5, 1.5e-5, 5e-6, 1e-5),
    Rates(596_049_920, 2e-5, 1.5e-5, 4.5e-6, 1e-5),
    Rates(1_235_814_400, 1.5e-5, 1e-5, 3e-6, 1e-5),
    Rates(7_615_616_512, 1e-5, 9e-6, 1e-6, 1e-5),
)


def default_learning_rate(kind: Kind, num_parameters: int, *, lora: bool) -> float:
    """Return the learning rate of a model by its size, to two digits.

    Between two rows of the table log rate is linear in log size; smaller models than the first and
    larger ones than the last have the rate of that row. An adapter has ten times the rate.

    Args:
        kind: kind of model that is trained.
        num_parameters: weights of the causal language model, frozen ones too.
        lora: whether adapters are trained instead of all weights.

    Raises:
        ValueError: if there is no weight.
    """
    if num_parameters < 1:
        raise ValueError(f"num_parameters={num_parameters} must be at least 1")
    sizes = [log(row.num_parameters) for row in TABLE]
    rates = [log(getattr(row, kind)) for row in TABLE]
    rate = exp(np.interp(log(num_parameters), sizes, rates))
    return float(f"{rate * (LORA_FACTOR if lora else 1):.1e}")
