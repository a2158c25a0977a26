"""KTO's loss next to the formula of its paper in plain Python, with values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_lightning.functional.preference_losses import kto_loss
from tests.vectors.cases import DTYPES, Case, assert_matches, cases

POLICY = [-3.0, -7.5, -1.25, -20.0, -4.0]
REF = [-4.0, -6.0, -1.25, -11.0, -9.0]
LABEL = [True, False, True, True, False]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def of_the_paper(z0: float, beta: float, desirable: float, undesirable: float) -> float:
    """Equation 8: the mean of `lambda_y - v(x, y)`."""
    total = 0.0
    for policy, ref, label in zip(POLICY, REF, LABEL, strict=True):
        r = policy - ref
        if label:
            total += desirable - desirable * sigmoid(beta * (r - z0))
        else:
            total += undesirable - undesirable * sigmoid(beta * (z0 - r))
    return total / len(POLICY)


def ours(dtype: torch.dtype = torch.float64, **options: float):
    policy = torch.tensor(POLICY, dtype=dtype, requires_grad=True)
    given = {"kl": 0.0, "beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}
    found = kto_loss(
        policy,
        torch.tensor(REF, dtype=dtype),
        torch.tensor(LABEL),
        num_rows=None,
        **(given | options),
    )
    return policy, found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", cases("kto"))
def test_loss_measures_and_gradient_match_the_vectors(case: Case, dtype: torch.dtype):
    policy = case.tensor("policy", dtype).requires_grad_()
    numbers = ("kl", "beta", "desirable_weight", "undesirable_weight")
    found = kto_loss(
        policy,
        case.tensor("ref", dtype),
        case.mask("label"),
        num_rows=None,
        **{name: case.inputs[name] for name in numbers},
    )
    found.loss.backward()
    assert_matches(case, found._asdict() | {"grad_policy": policy.grad}, dtype)


@pytest.mark.parametrize(
    ("z0", "beta", "desirable", "undesirable", "value"),
    [
        (0.0, 0.1, 1.0, 1.0, 0.5541999602),
        (0.7, 0.1, 1.0, 1.0, 0.5572414702),
        (0.7, 0.5, 1.0, 2.0, 0.8664475012),
        (2.5, 0.3, 1.5, 0.25, 0.7232474179),
    ],
)
def test_the_loss_is_that_of_the_paper(z0, beta, desirable, undesirable, value):
    _, found = ours(kl=z0, beta=beta, desirable_weight=desirable, undesirable_weight=undesirable)
    assert float(found.loss) == pytest.approx(of_the_paper(z0, beta, desirable, undesirable), 1e-12)
    assert float(found.loss) == pytest.approx(value, rel=1e-8)
    assert found.rewards.tolist() == pytest.approx(
        [beta * (p - r) for p, r in zip(POLICY, REF, strict=True)]
    )


def test_its_gradient_is_that_of_the_formula_and_leaves_the_reference_point_alone():
    kl = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    policy, found = ours(kl=kl, beta=0.5, undesirable_weight=2.0)
    found.loss.backward()
    assert kl.grad is None
    for got, p, ref, label in zip(policy.grad.tolist(), POLICY, REF, LABEL, strict=True):
        s = sigmoid(0.5 * (p - ref - 0.7))
        slope = 0.5 * s * (1 - s) * (-1.0 if label else 2.0) / len(POLICY)
        assert got == pytest.approx(slope, rel=1e-9)


def test_a_row_is_right_on_its_side_of_the_reference_point_and_neither_on_it():
    assert float(ours(kl=0.0)[1].accuracy) == pytest.approx(2 / 5)  # rows 1 and 2; row 3 is on it
    assert float(ours(kl=1.5)[1].accuracy) == pytest.approx(1 / 5)  # row 2 alone


def test_parts_of_a_step_add_up_to_the_whole():
    _, whole = ours(kl=0.4)
    parts = [
        kto_loss(
            torch.tensor(POLICY[rows]),
            torch.tensor(REF[rows]),
            torch.tensor(LABEL[rows]),
            kl=0.4,
            beta=0.1,
            desirable_weight=1.0,
            undesirable_weight=1.0,
            num_rows=5.0,
        )
        for rows in (slice(0, 2), slice(2, 5))
    ]
    assert sum(float(part.loss) for part in parts) == pytest.approx(float(whole.loss), rel=1e-6)
