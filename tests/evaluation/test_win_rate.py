import pytest
import torch

from rlhf_lightning.evaluation.win_rate import win_rate
from tests.vectors.cases import Case, assert_matches, cases


@pytest.mark.parametrize("case", cases("win_rate"))
def test_win_rate_matches_the_vectors(case: Case):
    inputs = case.inputs
    result = win_rate(inputs["a"], inputs["b"], confidence=0.95, tolerance=inputs["tol"])
    computed = {
        "wins": result.wins,
        "losses": result.losses,
        "ties": result.ties,
        "n": result.wins + result.ties + result.losses,
        "win_rate": result.rate,
        "wilson95": [result.low, result.high],
    }
    assert_matches(case, computed, torch.float64)
