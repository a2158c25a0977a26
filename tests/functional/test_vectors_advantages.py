import pytest
import torch

from rlhf_lightning.functional import advantages as gae
from rlhf_lightning.functional.advantages import compute_gae
from rlhf_lightning.functional.masked import masked_whiten
from tests.vectors.cases import DTYPES, Case, assert_matches, case, cases


@pytest.mark.parametrize("case", cases("gae"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_gae_as_a_gpu_computes_it_matches_the_vectors(case: Case, dtype: torch.dtype, monkeypatch):
    monkeypatch.setattr(gae, "_by_columns", gae._by_doubling)
    test_gae_matches_the_vectors(case, dtype)


@pytest.mark.parametrize("case", cases("gae"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_gae_matches_the_vectors(case: Case, dtype: torch.dtype):
    inputs, mask = case.inputs, case.mask()
    result = compute_gae(
        case.tensor("rewards", dtype),
        case.tensor("values", dtype),
        mask,
        gamma=inputs["gamma"],
        gae_lambda=inputs["lam"],
        bootstrap=None if inputs["bootstrap"] is None else case.tensor("bootstrap", dtype),
    )
    computed = {
        "advantages": result.advantages,
        "returns": result.returns,
        "advantages_whitened": masked_whiten(result.advantages, mask),
    }
    assert_matches(case, computed, dtype)
    assert (result.advantages[~mask] == 0).all()
    assert (result.returns[~mask] == 0).all()


@pytest.mark.parametrize("columns", [1, 2, 37, 64])
def test_gae_of_a_gpu_is_that_of_a_cpu_with_holes_in_the_mask(columns: int):
    generator = torch.Generator().manual_seed(columns)
    rewards, values = torch.randn(2, 9, columns, generator=generator, dtype=torch.float64)
    mask = torch.rand(9, columns, generator=generator) < 0.7
    mask[0], mask[1] = False, True
    rewards, values = (x.masked_fill(~mask, torch.nan) for x in (rewards, values))
    bootstrap = torch.linspace(-1, 1, 9, dtype=torch.float64)
    for decay in (0.0, 0.95, 1.0, torch.linspace(0, 1, 9, dtype=torch.float64)):
        arguments = (rewards, values, mask, 0.99, decay, bootstrap)
        expected, got = gae._by_columns(*arguments), gae._by_doubling(*arguments)
        assert expected.isfinite().all()
        assert expected.abs().max() > 0.1
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_gae_ignores_rewards_and_values_after_eos():
    ragged = case("gae", "ragged_g1.0_l0.95")
    rewards, values = (ragged.tensor(key, torch.float64) for key in ("rewards", "values"))
    mask = ragged.mask()
    clean = compute_gae(rewards, values, mask, gamma=1.0, gae_lambda=0.95)
    for garbage in (1e30, torch.inf, torch.nan):
        dirty = compute_gae(
            rewards.masked_fill(~mask, garbage),
            values.masked_fill(~mask, garbage),
            mask,
            gamma=1.0,
            gae_lambda=0.95,
        )
        assert torch.equal(dirty.advantages, clean.advantages)
        assert torch.equal(dirty.returns, clean.returns)


def test_gae_has_no_graph_and_is_computed_in_float32():
    values = torch.randn(2, 3, dtype=torch.bfloat16, requires_grad=True)
    mask = torch.ones(2, 3, dtype=torch.bool)
    result = compute_gae(values, values, mask, gamma=1.0, gae_lambda=0.95)
    assert not result.advantages.requires_grad
    assert not result.returns.requires_grad
    assert result.advantages.dtype == result.returns.dtype == torch.float32
