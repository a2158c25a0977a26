from __future__ import annotations

import warnings
from dataclasses import fields

import pytest

from rlhf_lightning.hparams import (
    GRPOHparams,
    PPOHparams,
    RewardHparams,
    SamplingHparams,
    SFTHparams,
    UnusualHparamWarning,
)

CLASSES = (SamplingHparams, SFTHparams, RewardHparams, PPOHparams, GRPOHparams)

ON_POLICY = (PPOHparams, GRPOHparams)

# class, field, values that cannot work, what the message wants
IMPOSSIBLE = [
    (SamplingHparams, "temperature", [0.009, 0.0, -1.0, 10.5], ">= 0.01 and <= 10"),
    (SamplingHparams, "max_new_tokens", [0, -3, 2**40], ">= 1 and <= 1000000000"),
    (SFTHparams, "learning_rate", [0.0, -1e-5, 1.0], "> 0 and < 1"),
    (SFTHparams, "micro_batch_size", [0], ">= 1"),
    *[(cls, "max_skipped_steps", [-1], ">= 0") for cls in (SFTHparams, RewardHparams, *ON_POLICY)],
    (SFTHparams, "max_grad_norm", [0.0, -1.0], "> 0"),
    (RewardHparams, "learning_rate", [0.0, 2.0], "> 0 and < 1"),
    (RewardHparams, "micro_batch_size", [0], ">= 1"),
    (RewardHparams, "max_grad_norm", [0.0], "> 0"),
    (RewardHparams, "label_smoothing", [-0.1, 0.5], ">= 0 and < 0.5"),
    (RewardHparams, "center_coef", [-0.01], ">= 0"),
    (RewardHparams, "normalization_samples", [-1, 10**12], ">= 0 and <= 1000000000"),
    *[(cls, "learning_rate", [0.0, 1.0], "> 0 and < 1") for cls in ON_POLICY],
    (PPOHparams, "value_learning_rate", [0.0, 1.0], "> 0 and < 1"),
    *[(cls, "kl_coef", [-0.1], ">= 0") for cls in ON_POLICY],
    *[(cls, "kl_target", [0.0, -6.0], "> 0") for cls in ON_POLICY],
    *[(cls, "kl_horizon", [0], ">= 1") for cls in ON_POLICY],
    *[(cls, "cliprange", [0.0, 1.1], "> 0 and <= 1") for cls in ON_POLICY],
    *[(cls, "cliprange_high", [0.0], "> 0") for cls in ON_POLICY],
    *[(cls, "dual_clip", [1.0, 0.5], "> 1") for cls in ON_POLICY],
    (PPOHparams, "cliprange_value", [0.0], "> 0"),
    (PPOHparams, "vf_coef", [-0.1], ">= 0"),
    (PPOHparams, "gamma", [-0.1, 1.01], ">= 0 and <= 1"),
    (PPOHparams, "gae_lambda", [-0.1, 1.01], ">= 0 and <= 1"),
    (PPOHparams, "gae_lambda_value", [-0.1, 1.01], ">= 0 and <= 1"),
    (PPOHparams, "gae_length_alpha", [0.0], "> 0"),
    (PPOHparams, "num_ppo_epochs", [0], ">= 1"),
    (PPOHparams, "num_value_epochs", [0], ">= 1"),
    (GRPOHparams, "num_epochs", [0], ">= 1"),
    (GRPOHparams, "max_resampling_rounds", [-1], ">= 0"),
    *[(cls, "overlong_buffer", [0], ">= 1") for cls in ON_POLICY],
    *[(cls, "num_minibatches", [0], ">= 1") for cls in ON_POLICY],
    *[(cls, "micro_batch_size", [0], ">= 1") for cls in ON_POLICY],
    *[(cls, "max_grad_norm", [0.0], "> 0") for cls in ON_POLICY],
    *[(cls, "missing_eos_penalty", [-1.0], ">= 0") for cls in ON_POLICY],
    *[(cls, "score_clip", [0.0], "> 0") for cls in ON_POLICY],
    *[(cls, "target_approx_kl", [0.0], "> 0") for cls in ON_POLICY],
    (PPOHparams, "critic_warmup_iterations", [-1], ">= 0"),
    *[(cls, "entropy_coef", [-0.1], ">= 0") for cls in ON_POLICY],
    *[(cls, "off_policy_cap", [0.9], ">= 1") for cls in ON_POLICY],
    *[(cls, "off_policy_low", [-0.1, 1.1], ">= 0 and <= 1") for cls in ON_POLICY],
    *[(cls, "off_policy_high", [0.9], ">= 1") for cls in ON_POLICY],
    *[(cls, "rollout_lag", [-1, 2], ">= 0 and <= 1") for cls in ON_POLICY],
    *[(cls, "teacher_coef", [-0.1], ">= 0") for cls in ON_POLICY],
]
UNLIMITED = {
    (RewardHparams, "use_margin"),
    (PPOHparams, "value_trainable"),
    *((SamplingHparams, name) for name in ("top_k", "top_p", "skip_special_tokens")),
}
NAMES = ("kl_in", "kl_estimator", "surrogate", "ratio_base", "loss_reduction", "off_policy")
NAMED = {
    *((cls, name) for cls in ON_POLICY for name in NAMES),
    (GRPOHparams, "baseline"),
    (GRPOHparams, "scale"),
}


@pytest.mark.parametrize("cls", CLASSES)
def test_the_defaults_are_usual_values(cls):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cls()


@pytest.mark.parametrize(("cls", "name", "values", "wanted"), IMPOSSIBLE)
def test_an_impossible_value_is_an_error_with_key_value_and_range(cls, name, values, wanted):
    for value in values:
        with pytest.raises(ValueError, match=rf"^{name}=") as error:
            cls(**{name: value})
        assert any(bound in str(error.value) for bound in wanted.split(" and "))


@pytest.mark.parametrize(("cls", "name"), sorted(NAMED, key=str))
def test_a_name_that_is_unknown_is_an_error_with_those_that_work(cls, name):
    with pytest.raises(ValueError, match=rf"^{name}='nosuch' must be '\w+'"):
        cls(**{name: "nosuch"})


def test_k3_in_the_loss_warns_of_its_other_optimum():
    with pytest.warns(UnusualHparamWarning, match="kl_estimator=k3 .* use k2"):
        GRPOHparams(kl_estimator="k3")


def test_a_kl_that_is_divided_by_its_own_spread_warns():
    with pytest.warns(UnusualHparamWarning, match="kl_in=reward with scale=group_std .*kl_in=loss"):
        GRPOHparams(kl_in="reward")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GRPOHparams(kl_in="reward", scale="none")
        GRPOHparams(kl_in="reward", scale="global_std")
        warnings.filterwarnings("ignore", "GRPOHparams.kl_coef=0 is outside")
        GRPOHparams(kl_in="reward", kl_coef=0.0)


@pytest.mark.parametrize("cls", ON_POLICY)
def test_the_usual_range_of_a_clip_range_is_that_of_its_surrogate(cls):
    published = {
        "ppo": {"cliprange": 0.2, "cliprange_high": 0.28},
        "gspo": {"cliprange": 3e-4, "cliprange_high": 4e-4},
        "cispo": {"cliprange": 1.0, "cliprange_high": 4.0},
        "masked_ratio": {"cliprange": 0.8, "cliprange_high": 3.0},
        "masked_probability": {"cliprange": 0.2, "cliprange_high": 0.2},
    }
    for surrogate, ranges in published.items():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            cls(surrogate=surrogate, **ranges)
        others = "gspo" if surrogate in ("ppo", "masked_probability") else "ppo"
        with pytest.warns(UnusualHparamWarning, match="cliprange_high=.* outside the usual range"):
            cls(surrogate=others, **ranges)


@pytest.mark.parametrize("cls", ON_POLICY)
def test_surrogates_that_bound_every_weight_have_no_dual_clip(cls):
    for surrogate in ("cispo", "masked_ratio", "masked_probability"):
        with pytest.raises(ValueError, match=rf"^dual_clip=3 .*surrogate={surrogate}"):
            cls(surrogate=surrogate, dual_clip=3.0)
    assert cls(surrogate="gspo", dual_clip=3.0).dual_clip == 3


@pytest.mark.parametrize("cls", ON_POLICY)
def test_bounds_of_a_correction_that_is_not_asked_for_are_an_error(cls):
    for name, value, mode in (
        ("off_policy_cap", 3.0, "truncated"),
        ("off_policy_low", 0.2, "masked"),
        ("off_policy_high", 3.0, "masked"),
    ):
        assert getattr(cls(off_policy=mode, **{name: value}), name) == value
        for other in {"none", "truncated", "masked"} - {mode}:
            with pytest.raises(ValueError, match=rf"{name}={value:g} is of off_policy={mode}, and"):
                cls(off_policy=other, **{name: value})


@pytest.mark.parametrize("cls", ON_POLICY)
def test_the_sampler_as_base_is_the_correction_and_refuses_another_one(cls):
    with pytest.raises(ValueError, match=r"^off_policy=masked with ratio_base=sampler .* twice"):
        cls(ratio_base="sampler", off_policy="masked")
    with pytest.warns(UnusualHparamWarning, match="rollout_lag=1 .*ratio_base=sampler"):
        cls(rollout_lag=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cls(ratio_base="sampler", rollout_lag=1)


@pytest.mark.parametrize("cls", ON_POLICY)
def test_a_kl_target_needs_a_coefficient_to_start_from(cls):
    with pytest.raises(ValueError, match=r"^kl_target=6 .*kl_coef=0"):
        cls(kl_target=6.0, kl_coef=0.0)
    assert cls(kl_coef=0.0).kl_target is None


def test_every_number_has_a_range_that_is_tested():
    tested = {(cls, name) for cls, name, _, _ in IMPOSSIBLE} | UNLIMITED | NAMED
    assert tested == {(cls, field.name) for cls in CLASSES for field in fields(cls)}


@pytest.mark.parametrize("value", [1e39, 1e-300, 10**400])
@pytest.mark.parametrize("cls", CLASSES)
def test_no_number_is_beyond_what_float32_computes_with(cls, value):
    refused = []
    for field in fields(cls):
        with pytest.raises((TypeError, ValueError), match=rf"^{field.name}="):
            cls(**{field.name: value})
        refused.append(field.name)
    assert refused


@pytest.mark.parametrize(
    ("cls", "name", "value", "message"),
    [
        (
            PPOHparams,
            "learning_rate",
            "1e-5",
            r"is str, expected float or None \(write 1e-5 as",
        ),
        (PPOHparams, "num_ppo_epochs", 4.0, r"=4\.0 is float, expected int"),
        (PPOHparams, "num_ppo_epochs", True, r"=True is bool, expected int"),
        (PPOHparams, "kl_coef", True, r"=True is bool, expected float"),
        (PPOHparams, "kl_coef", None, r"=None is NoneType, expected float"),
        (PPOHparams, "kl_target", "six", r"expected float or None"),
        (PPOHparams, "micro_batch_size", 2.5, r"=2\.5 is float, expected int or None"),
        (RewardHparams, "use_margin", 1, r"=1 is int, expected bool"),
        (RewardHparams, "use_margin", "yes", r"is str, expected bool"),
        (SamplingHparams, "max_new_tokens", [64], r"is list, expected int"),
    ],
)
def test_a_value_of_the_wrong_type_is_an_error_with_key_and_both_types(cls, name, value, message):
    with pytest.raises(TypeError, match=rf"^{name}.*{message}"):
        cls(**{name: value})


@pytest.mark.parametrize(
    ("cls", "name", "value", "usual"),
    [
        (SamplingHparams, "temperature", 1.5, "0.7 to 1"),
        (SFTHparams, "learning_rate", 0.1, "1e-06 to 0.005"),
        (RewardHparams, "learning_rate", 1e-7, "1e-06 to 0.005"),
        (RewardHparams, "label_smoothing", 0.3, "0 to 0.2"),
        (RewardHparams, "center_coef", 1.0, "0 to 0.1"),
        (PPOHparams, "learning_rate", 0.01, "1e-07 to 0.001"),
        (PPOHparams, "value_learning_rate", 0.01, "1e-07 to 0.003"),
        (PPOHparams, "kl_coef", 2.0, "0.001 to 0.5"),
        (PPOHparams, "kl_target", 0.1, "1 to 30"),
        (PPOHparams, "cliprange", 0.9, "0.05 to 0.4"),
        (PPOHparams, "cliprange_high", 0.9, "0.05 to 0.5"),
        (PPOHparams, "vf_coef", 0.5, "0.05 to 0.2"),
        (PPOHparams, "gamma", 0.99, "1 to 1"),
        (PPOHparams, "gae_lambda", 0.5, "0.9 to 1"),
        (PPOHparams, "num_ppo_epochs", 16, "1 to 8"),
        (PPOHparams, "num_minibatches", 64, "1 to 32"),
        (PPOHparams, "target_approx_kl", 1.0, "0.005 to 0.5"),
        (PPOHparams, "entropy_coef", 0.2, "0 to 0.05"),
    ],
)
def test_an_unusual_value_works_and_warns_with_the_usual_range(cls, name, value, usual):
    message = rf"^{cls.__name__}\.{name}={value:g} is outside the usual range {usual}$"
    with pytest.warns(UnusualHparamWarning, match=message):
        hparams = cls(**{name: value})
    assert getattr(hparams, name) == value


@pytest.mark.parametrize("options", [{"top_k": 50}, {"top_p": 0.9}, {"top_k": 1, "top_p": 0.5}])
def test_truncated_sampling_is_refused_in_rollouts(options):
    with pytest.raises(ValueError, match="rollouts sample the full distribution"):
        SamplingHparams(**options)
