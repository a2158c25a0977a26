"""KTO's loss against the vectors, the point of reference, and what is right."""

from __future__ import annotations

import pytest
import torch

from rlhf_lightning.functional.preference_losses import kto_loss
from tests.vectors.cases import DTYPES, Case, assert_matches, cases


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


def test_a_row_is_right_on_its_side_of_a_reference_point_that_gets_no_gradient():
    policy = torch.tensor([-3.0, -7.5, -1.25, -20.0, -4.0], requires_grad=True)
    ref = torch.tensor([-4.0, -6.0, -1.25, -11.0, -9.0])
    label = torch.tensor([True, False, True, True, False])
    weights = {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}
    # Rows 1 and 2, and row 3 is on the point; beyond 1.5, row 2 alone.
    for point, right in ((0.0, 2 / 5), (1.5, 1 / 5)):
        kl = torch.tensor(point, requires_grad=True)
        found = kto_loss(policy, ref, label, kl=kl, num_rows=None, **weights)
        assert float(found.accuracy) == pytest.approx(right)
        found.loss.backward()
        assert kl.grad is None
