import pytest
import torch

from rlhf_lightning.functional.masked import masked_mean, masked_var, masked_whiten
from tests.vectors.cases import DTYPES, Case, assert_matches, case, cases


@pytest.mark.parametrize("case", cases("masked_stats"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_masked_statistics_match_the_vectors(case: Case, dtype: torch.dtype):
    x, mask = case.tensor("x", dtype), case.mask()
    computed = {
        "mean": masked_mean(x, mask),
        "mean_rows": torch.stack([masked_mean(*row) for row in zip(x, mask, strict=True)]),
        "var_biased": masked_var(x, mask),
        "whiten": masked_whiten(x, mask),
    }
    # Reading values near 10000 into float32 already moves them by up to 5e-4.
    rounded_inputs = case.name == "large_offset" and dtype == torch.float32
    assert_matches(case, computed, dtype, tolerance=2e-3 if rounded_inputs else None)


def test_whitening_in_float32_survives_a_large_offset():
    large = case("masked_stats", "large_offset")
    x, mask = large.tensor("x", torch.float32), large.mask()
    exact = masked_whiten(x.double(), mask)
    torch.testing.assert_close(masked_whiten(x, mask).double(), exact, rtol=0, atol=1e-5)
    one_pass = masked_mean(x.square(), mask) - masked_mean(x, mask).square()
    assert (one_pass - masked_var(x, mask)).abs() > 0.1


@pytest.mark.parametrize("value", [0.1, -3.3, 1e6])
def test_equal_values_whiten_to_exact_zeros_in_float32(value: float):
    x = torch.full((7, 13), value)
    mask = torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) < 0.7
    assert torch.equal(masked_whiten(x, mask), torch.zeros_like(x))
    assert masked_var(x, mask) == 0


def test_values_off_the_mask_do_not_reach_value_or_gradient():
    x = torch.tensor([[1.0, 2.0, torch.inf], [torch.nan, 4.0, -torch.inf]], requires_grad=True)
    mask = torch.tensor([[True, True, False], [False, True, False]])
    for function in (masked_mean, masked_var, masked_whiten):
        result = function(x, mask)
        assert result.isfinite().all()
        (gradient,) = torch.autograd.grad(result.square().sum(), x)
        assert gradient.isfinite().all()
        assert torch.equal(gradient[~mask], torch.zeros(3))


def test_half_precision_is_widened():
    x = torch.full((1, 4096), 1.0, dtype=torch.bfloat16)
    mask = torch.ones_like(x, dtype=torch.bool)
    assert masked_mean(x, mask) == 1
    assert masked_whiten(x, mask).dtype == torch.float32
