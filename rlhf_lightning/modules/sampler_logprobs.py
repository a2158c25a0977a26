"""Log-probabilities of the sampler in the policy's loss: base of the ratio, or weights of tokens.

Legend: B rows of a rank, R response.
"""

from __future__ import annotations

from torch import Tensor

from rlhf_lightning.batches import RolloutBatch
from rlhf_lightning.distributed.collectives import global_sum
from rlhf_lightning.functional.off_policy import masked_weights, truncated_weights
from rlhf_lightning.hparams import OnPolicyHparams
from rlhf_lightning.rollout.generators.base import Generator


def check_sampler(
    rollout: RolloutBatch, generator: Generator, algorithm: OnPolicyHparams, stage: str
) -> None:
    """Check that the log-probabilities that the loss reads are there.

    Args:
        rollout: rollout of this rank.
        generator: generator that sampled it.
        algorithm: hyper-parameters, which say what the loss reads.
        stage: name of the hyper-parameters in a configuration.

    Raises:
        RuntimeError: if some are not finite where the policy's are.
        ValueError: if there are none.
    """
    if algorithm.ratio_base == "sampler":
        setting, other = "ratio_base=sampler", "ratio_base=old"
    elif algorithm.off_policy != "none":
        setting, other = f"off_policy={algorithm.off_policy}", "off_policy=none"
    else:
        return
    sampler = rollout.sampler_logprobs
    if sampler is None:
        raise ValueError(
            f"module.{stage}.{setting} needs the log-probabilities of the sampler, and "
            f"{type(generator).__name__} gives none: use rollout=cached, or {other}"
        )
    wrong = rollout.response_mask & ~sampler.isfinite() & rollout.logprobs.isfinite()
    if count := int(global_sum(wrong.sum())):
        name = getattr(generator, "name", type(generator).__name__)
        raise RuntimeError(
            f"{count} log-probabilities of {name} are not finite, and module.{stage}.{setting} "
            f"weighs tokens by them: mend the sampler, or use {other}"
        )


def base_logprobs(rollout: RolloutBatch, algorithm: OnPolicyHparams) -> Tensor:
    """Return `[B, R]` log-probabilities that the ratio divides by."""
    if algorithm.ratio_base == "old":
        return rollout.logprobs
    assert rollout.sampler_logprobs is not None  # see check_sampler
    return rollout.sampler_logprobs


def corrected_advantages(rollout: RolloutBatch, algorithm: OnPolicyHparams) -> Tensor:
    """Return `[B, R]` advantages times the importance weights, old policy over sampler.

    Weights are not negative, so this weighs the loss of each token, whatever the surrogate. The
    divisor of the loss stays the count of all tokens or responses, also of those that weigh 0.
    """
    old, sampler, mask = rollout.logprobs, rollout.sampler_logprobs, rollout.response_mask
    if algorithm.off_policy == "none" or sampler is None:
        return rollout.advantages
    if algorithm.off_policy == "truncated":
        weights = truncated_weights(old, sampler, mask, cap=algorithm.off_policy_cap)
    else:
        low, high = algorithm.off_policy_low, algorithm.off_policy_high
        weights = masked_weights(old, sampler, mask, low=low, high=high)
    return rollout.advantages * weights
