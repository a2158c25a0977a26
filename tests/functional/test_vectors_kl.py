import pytest
import torch

from rlhf_lightning.functional.kl import adapted_kl_coef, kl_k1, kl_k2, kl_k3
from rlhf_lightning.functional.masked import masked_mean, zero_off_mask
from tests.vectors.cases import DTYPES, Case, assert_matches, cases


@pytest.mark.parametrize("case", cases("kl"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_kl_estimators_match_the_vectors(case: Case, dtype: torch.dtype):
    if case.name == "expectations_categorical":
        assert_matches(case, expectations(case, dtype), dtype)
        return
    logprobs = case.tensor("logp", dtype).requires_grad_()
    reference, mask = case.tensor("ref_logp", dtype), case.mask()
    estimates = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}
    estimates = {k: zero_off_mask(f(logprobs, reference), mask) for k, f in estimates.items()}
    computed = {key: value.detach() for key, value in estimates.items()}
    for key, value in estimates.items():
        (gradient,) = torch.autograd.grad(value.sum(), logprobs)
        assert gradient.isfinite().all()
        if case.name == "estimators":
            computed[f"grad_{key}"] = gradient
    if case.name == "estimators":
        computed["k1_seq_sum"] = computed["k1"].sum(-1)
        computed["k1_seq_sum_mean"] = computed["k1"].sum(-1).mean()
        computed["k1_token_mean"] = masked_mean(kl_k1(logprobs, reference).detach(), mask)
        computed["k3_token_mean"] = masked_mean(kl_k3(logprobs, reference).detach(), mask)
    if case.name == "extreme":
        computed["k3_clamped"] = computed.pop("k3")
    assert_matches(case, computed, dtype)


def expectations(case: Case, dtype: torch.dtype):
    """Expectations over all tokens, and what each estimator's gradient is on average."""
    logits = case.tensor("logits", dtype).requires_grad_()
    logprobs = logits.log_softmax(-1)
    reference = case.tensor("ref_logits", dtype).log_softmax(-1)
    p = logprobs.exp()

    def gradient(value: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    k1, k2, k3 = (f(logprobs, reference) for f in (kl_k1, kl_k2, kl_k3))
    kl = (p * (logprobs - reference)).sum()
    computed = {
        "kl": kl.detach(),
        "E_k3_swapped": (p * kl_k3(reference, logprobs)).sum().detach(),
        "grad_true": gradient(kl),
        "grad_reverse_KL_ref_pi": gradient((reference.exp() * (reference - logprobs)).sum()),
    }
    for name, k in (("k1", k1), ("k2", k2), ("k3", k3)):
        mean = (p * k).sum().detach()
        computed[f"E_{name}"] = mean
        computed[f"E_grad_{name}_in_loss"] = gradient((p.detach() * k).sum())
        computed[f"E_score_grad_{name}_in_reward"] = gradient((p * k.detach()).sum())
        if name != "k2":
            computed[f"var_{name}"] = (p * (k - mean).square()).sum().detach()
    return computed


@pytest.mark.parametrize("case", cases("kl_bandit"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_optimum_of_the_bandit_matches_the_vectors(case: Case, dtype: torch.dtype):
    beta, rewards = case.inputs["beta"], case.tensor("rewards", dtype)
    reference = case.tensor("ref_logits", dtype).log_softmax(-1)
    optimum = (reference + rewards / beta).log_softmax(-1)
    p = optimum.exp()
    kl = (p * kl_k1(optimum, reference)).sum()
    computed = {
        "pi_star": p,
        "expected_reward": (p * rewards).sum(),
        "kl": kl,
        "objective": (p * rewards).sum() - beta * kl,
        "beta_logZ": beta * (reference + rewards / beta).logsumexp(-1),
    }
    assert_matches(case, computed, dtype)


@pytest.mark.parametrize("case", cases("kl_controller"))
def test_kl_controller_matches_the_vectors(case: Case):
    inputs = case.inputs
    kl_coef, trajectory = inputs["init"], []
    settings = {
        "target": inputs["target"],
        "horizon": inputs["horizon"] or 10000,
        "num_episodes": inputs["n_steps"],
    }
    if case.name == "n_larger_than_horizon":
        with pytest.raises(ValueError, match="kl_horizon=100 must be more than") as error:
            adapted_kl_coef(kl_coef, inputs["kl"][0], **settings)
        assert "num_episodes=600" in str(error.value)
    else:
        for observed in inputs["kl"]:
            kl_coef = adapted_kl_coef(kl_coef, observed, **settings)
            trajectory.append(kl_coef)
    computed = {"beta": trajectory} if trajectory else {}
    assert_matches(case, computed, torch.float64, tolerance=1e-12)


def test_k3_of_identical_policies_is_exactly_zero():
    logprobs = -torch.rand(100, generator=torch.Generator().manual_seed(0)) * 20
    for estimator in (kl_k1, kl_k2, kl_k3):
        assert torch.equal(estimator(logprobs, logprobs), torch.zeros(100))


def test_k3_pulls_a_token_back_however_far_the_policy_has_left_the_reference():
    d = torch.tensor([-30.0, -8.0, 0.5, 2.7, 8.0, 30.0], dtype=torch.float64)
    logprobs = (-d - 40).requires_grad_()
    kl_k3(logprobs, torch.full_like(d, -40)).sum().backward()
    expected = 1 - d.clamp(-20, 20).exp()
    torch.testing.assert_close(logprobs.grad, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("observed", "changed", "message"),
    [
        (float("nan"), {}, "observed_kl=nan must be a number"),
        (1.0, {"target": 0.0}, "kl_target=0.0 must be positive"),
        (1.0, {"horizon": 0}, "kl_horizon=0 must be positive"),
        (1.0, {"horizon": 100, "num_episodes": 500}, "kl_horizon=100 must be more than"),
    ],
)
def test_impossible_controllers_are_refused(observed, changed, message):
    settings = {"target": 6.0, "horizon": 10000, "num_episodes": 64} | changed
    with pytest.raises(ValueError, match=message):
        adapted_kl_coef(0.05, observed, **settings)


def test_the_largest_allowed_step_keeps_the_coefficient_positive():
    settings = {"target": 6.0, "horizon": 100, "num_episodes": 499}
    assert adapted_kl_coef(0.05, 0.0, **settings) > 0
