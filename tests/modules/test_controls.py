from __future__ import annotations

import pytest

from rlhf_lightning.hparams import PPOHparams, SamplingHparams
from rlhf_lightning.modules.controls import Controls
from rlhf_lightning.modules.metrics import RunningMeans


def controls() -> Controls:
    return Controls.from_hparams(PPOHparams(kl_coef=0.07), SamplingHparams(temperature=0.8), "ppo")


def test_a_checkpoint_gives_every_control_back():
    turned = controls()
    turned.kl_coef, turned.temperature, turned.learning_rate_factor = 0.2, 0.7, 0.5
    turned.domain_weights["maths"] = 2.0
    fresh = controls()
    fresh.load_state_dict(turned.state_dict())
    assert fresh == turned
    turned.domain_weights["maths"] = 3.0
    assert fresh.domain_weights["maths"] == 2.0, "a checkpoint shares nothing with the run"


def test_a_checkpoint_that_lacks_a_control_is_refused():
    state = controls().state_dict()
    del state["temperature"]
    with pytest.raises(KeyError, match="temperature"):
        controls().load_state_dict(state)


@pytest.mark.parametrize(("name", "value"), [("kl_coeff", 1), ("kl_coef", -1), ("temperature", 0)])
def test_what_no_control_can_be_is_refused_when_it_is_set(name, value):
    with pytest.raises((AttributeError, ValueError), match=f"controls.*{name}"):
        setattr(controls(), name, value)


def test_a_minibatch_without_a_step_counts_in_the_means_and_not_in_the_steps():
    means = RunningMeans()
    means.add({"kl": 0.0, "loss": 2.0})
    means.add({"kl": 0.5}, took_step=False)
    assert means.means() == {"kl": 0.25, "loss": 2.0}
    assert means.num_steps == 1
