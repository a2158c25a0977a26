from __future__ import annotations

import warnings
from typing import Any, TypedDict, Unpack

import pytest

from rlhf_lightning.arguments import checked
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


@pytest.mark.parametrize("cls", CLASSES)
def test_the_defaults_are_usual_values(cls):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cls()


def test_k3_in_the_loss_warns_of_its_other_optimum():
    with pytest.warns(UnusualHparamWarning, match="kl_estimator=k3"):
        GRPOHparams(kl_estimator="k3")


def test_a_kl_that_is_divided_by_its_own_spread_warns():
    with pytest.warns(UnusualHparamWarning, match="kl_in=reward"):
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
def test_a_lag_without_the_sampler_as_base_warns(cls):
    with pytest.warns(UnusualHparamWarning, match="rollout_lag=1 .*ratio_base=sampler"):
        cls(rollout_lag=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cls(ratio_base="sampler", rollout_lag=1)


@pytest.mark.parametrize(
    ("cls", "name", "value", "usual"),
    [
        (SamplingHparams, "temperature", 1.5, "0.7 to 1"),
        (SFTHparams, "learning_rate", 0.1, "1e-06 to 0.005"),
        (PPOHparams, "kl_coef", 2.0, "0.001 to 0.5"),
        (PPOHparams, "cliprange_high", 0.9, "0.05 to 0.5"),
        (PPOHparams, "gamma", 0.99, "1 to 1"),
    ],
)
def test_an_unusual_value_works_and_warns_with_the_usual_range(cls, name, value, usual):
    message = rf"^{cls.__name__}\.{name}={value:g} is outside the usual range {usual}$"
    with pytest.warns(UnusualHparamWarning, match=message):
        hparams = cls(**{name: value})
    assert getattr(hparams, name) == value


class Options(TypedDict, total=False):
    width: int


@pytest.mark.parametrize("written", [Unpack[Options], "Unpack[Options]"])
def test_options_are_checked_with_and_without_annotations_of_the_future(written):
    def build(**options: Any) -> Any:
        return options

    build.__annotations__["options"] = written
    assert checked(build)(width=3) == {"width": 3}
    with pytest.raises(TypeError, match="width='x'"):
        checked(build)(width="x")
