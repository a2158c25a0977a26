import pytest
import torch

from rlhf_lightning.functional.logprobs import token_entropy, token_logprobs
from rlhf_lightning.functional.masked import masked_mean, zero_off_mask
from tests.vectors.cases import DTYPES, Case, assert_matches, cases


@pytest.mark.parametrize("case", cases("seq_logprobs"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_logprobs_match_the_vectors(case: Case, dtype: torch.dtype):
    compute = {
        "top_k_3_mismatch": truncated_logprobs,
        "truncated_sampling_score_bias": gradients_under_truncated_sampling,
    }.get(case.name, logprobs_and_entropies)
    assert_matches(case, compute(case, dtype), dtype)


def logprobs_and_entropies(case: Case, dtype: torch.dtype):
    logits, mask = case.tensor("logits", dtype), case.mask()
    temperature = case.inputs["temperature"]
    logprobs = token_logprobs(logits, case.ids("tokens"), temperature=temperature)
    entropy = token_entropy(logits, temperature=temperature)
    rows = list(zip(logprobs, mask, strict=True))
    return {
        "logp": zero_off_mask(logprobs, mask),
        "seq_sum": zero_off_mask(logprobs, mask).sum(-1),
        "seq_mean": torch.stack([masked_mean(*row) for row in rows]),
        "entropy": zero_off_mask(entropy, mask),
        "entropy_token_mean": masked_mean(entropy, mask),
    }


def keep_top(logits: torch.Tensor, k: int) -> torch.Tensor:
    smallest_kept = logits.topk(k, dim=-1).values[..., -1:]
    return logits.masked_fill(logits < smallest_kept, -torch.inf)


def truncated_logprobs(case: Case, dtype: torch.dtype):
    logits, tokens = case.tensor("logits", dtype), case.ids("tokens")
    full = token_logprobs(logits, tokens, temperature=1.0)
    truncated = token_logprobs(keep_top(logits, case.inputs["k"]), tokens, temperature=1.0)
    return {
        "logp_full": full,
        "logp_truncated": truncated,
        "ratio_if_mixed": (full - truncated).exp(),
    }


def gradients_under_truncated_sampling(case: Case, dtype: torch.dtype):
    logits = case.tensor("logits", dtype).requires_grad_()
    tokens = torch.arange(len(logits))
    each = logits.expand(len(logits), -1)
    sampled_with = keep_top(logits.detach(), case.inputs["k"])
    expected_logprob = sampled_with.softmax(-1) @ token_logprobs(each, tokens, temperature=1.0)
    kept_mass = logits.softmax(-1)[sampled_with.isfinite()].sum()
    return {
        "E_grad_logp_under_truncated": torch.autograd.grad(expected_logprob, logits)[0],
        "grad_log_ZS": torch.autograd.grad(kept_mass.log(), logits)[0],
    }


def test_half_precision_logits_are_widened_before_the_softmax():
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0)).bfloat16() * 4
    tokens = torch.arange(4)
    exact = token_logprobs(logits.double(), tokens, temperature=0.7)
    widened = token_logprobs(logits, tokens, temperature=0.7)
    assert widened.dtype == torch.float32
    torch.testing.assert_close(widened.double(), exact, rtol=1e-5, atol=1e-5)
    entropy = token_entropy(logits, temperature=0.7)
    expected = token_entropy(logits.double(), temperature=0.7)
    torch.testing.assert_close(entropy.double(), expected, rtol=1e-5, atol=1e-5)
    assert ((logits / 0.7).log_softmax(-1).double()[tokens, tokens] - exact).abs().max() > 1e-3


def test_an_impossible_token_adds_nothing_to_entropy_and_gradient():
    logits = torch.tensor([0.3, -0.2, -torch.inf, 1.0], requires_grad=True)
    entropy = token_entropy(logits, temperature=1.0)
    possible = torch.tensor([0.3, -0.2, 1.0], requires_grad=True)
    expected = token_entropy(possible, temperature=1.0)
    torch.testing.assert_close(entropy, expected)
    (gradient,) = torch.autograd.grad(entropy, logits)
    torch.testing.assert_close(gradient[[0, 1, 3]], torch.autograd.grad(expected, possible)[0])
    assert gradient[2] == 0


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_that_is_not_positive_is_refused(temperature: float):
    with pytest.raises(ValueError, match=r"temperature=.* must be positive"):
        token_logprobs(torch.zeros(1, 3), torch.tensor([0]), temperature=temperature)
    with pytest.raises(ValueError, match=r"temperature=.* must be positive"):
        token_entropy(torch.zeros(1, 3), temperature=temperature)
