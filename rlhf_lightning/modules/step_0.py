"""The step-0 test: before its first update a policy is what it started from, or the run ends.

Every figure is reduced over ranks, so that all of them end alike.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlhf_lightning.batches import RolloutBatch
from rlhf_lightning.distributed.collectives import global_sum
from rlhf_lightning.functional.masked import zero_off_mask
from rlhf_lightning.models.lora import experts_of
from rlhf_lightning.models.micro_batching import in_buckets
from rlhf_lightning.modules.base import RLHFModule
from rlhf_lightning.modules.optimization import Measured

EXACT, ROUNDED = 1e-3, 1e-2  # nats a token on a GPU: in fp32, and in bf16
LOG_RATIO = "step_0/log_ratio"  # not logged: it is removed from the metrics
RATIO_CAUSES = (
    "the policy gives two results for one input: dropout is active, or a kernel is not "
    "repeatable, or the rollout and the update compute in different precisions"
)
REFERENCE_CAUSES = (
    "policy and reference do not start from the same weights: weights are missing from the source "
    "(artifacts.sft) and were drawn at random, the reference is loaded from another source or in "
    "another precision, or dropout is active"
)


class Step0Error(RuntimeError):
    """The policy is not what it started from before it was updated; the message says why."""


def rounding_tolerance(module: RLHFModule) -> float:
    """Return the expected rounding error of a log-ratio of 0, as a mean of nats a token.

    On a CPU a row is evaluated at one width, so that the same bits come out, unless micro-batches
    are made by tokens; kernels of a GPU depend on the shape of a batch, and those of experts on
    its tokens.

    Args:
        module: module that is trained, with its Trainer.
    """
    if module.device.type == "cpu" and in_buckets("cpu") and not experts_of(module.policy.root):
        return 0.0
    dtype = module.compute_dtype
    full = str(module.trainer.precision).startswith("32") and dtype in (None, torch.float32)
    return EXACT if full else ROUNDED


class Step0:
    """Holds the first rollout and the first minibatch of a fresh run to ratio 1 and KL 0.

    A figure that is not finite is left to the rule that skips such steps; the next one is looked
    at, as no step was taken. Resumed runs are not looked at.

    Args:
        same_source: whether policy and reference start from one source; else only the ratio counts.
    """

    def __init__(self, *, same_source: bool = True) -> None:
        self.same_source = same_source
        self.awaits_rollout = self.awaits_minibatch = True

    def resumed(self) -> None:
        """The policy has been updated before: there is nothing to look at."""
        self.awaits_rollout = self.awaits_minibatch = False

    def check_reference(self, rollout: RolloutBatch, module: RLHFModule) -> None:
        """Check that policy and reference agree on the first rollout.

        Raises:
            Step0Error: on every rank, if they differ by more than rounding.
        """
        if not self.awaits_rollout:
            return
        mask = rollout.response_mask
        difference = zero_off_mask((rollout.logprobs - rollout.ref_logprobs).abs(), mask).sum()
        total, tokens = global_sum(torch.stack([difference, mask.sum()]).float()).tolist()
        error = total / max(tokens, 1)
        if not math.isfinite(error):
            return
        self.awaits_rollout = False
        tolerance = rounding_tolerance(module)
        if self.same_source and error > tolerance:
            raise Step0Error(
                f"before the first update mean |log p - log p_ref| is {error:.3g} nats a token, "
                f"and the KL to the reference must start at 0 ({_allowed(tolerance, module)}): "
                f"{REFERENCE_CAUSES}"
            )

    def measures(self, log_ratio: Tensor, mask: Tensor, num_tokens: Tensor) -> Measured:
        """Return a micro-batch's share of mean |log-ratio| while that is checked, else nothing.

        Args:
            log_ratio: new minus old log-probability [B, R].
            mask: response tokens [B, R].
            num_tokens: response tokens of the minibatch, on all ranks.
        """
        if not self.awaits_minibatch:
            return {}
        return {LOG_RATIO: zero_off_mask(log_ratio.detach().abs(), mask).sum() / num_tokens}

    def check_ratio(
        self, measured: dict[str, Tensor], module: RLHFModule, cliprange: float
    ) -> None:
        """Check that the first minibatch starts with ratio 1, and take its measure out.

        Raises:
            Step0Error: on every rank, if a ratio differs from 1 by more than rounding.
        """
        if LOG_RATIO not in measured:
            return
        error = float(measured.pop(LOG_RATIO))
        clipped = float(measured[f"{module.stage}/clipfrac"])
        if not math.isfinite(error):
            return
        self.awaits_minibatch = False
        tolerance = rounding_tolerance(module)
        # A range as narrow as GSPO's clips what rounding alone makes.
        narrow = tolerance >= cliprange
        if error > tolerance or (clipped > 0 and not narrow):
            raise Step0Error(
                f"before the first update mean |log-ratio| is {error:.3g} nats a token and "
                f"{100 * clipped:.3g} % of the tokens are clipped, and the ratio must start at 1 "
                f"({_allowed(tolerance, module)}, and none clipped): {RATIO_CAUSES}"
            )


def _allowed(tolerance: float, module: RLHFModule) -> str:
    allowed = f"at most {tolerance:g}" if tolerance else "exactly"
    return f"{allowed} on {module.device.type} with precision {module.trainer.precision}"
