"""The losses on preferences: reward model and DPO on pairs, KTO on single labelled responses.

A mean over pairs is `sum / num_pairs`: with the global count of the optimizer step the losses of
micro-batches and ranks add up to that of the whole batch.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_lightning.functional.masked import at_least_float32


class RewardLoss(NamedTuple):
    """Result of `pairwise_reward_loss`: scalars; only `loss` has a graph.

    Args:
        loss: the mean over pairs, nats.
        accuracy: fraction of pairs with chosen strictly above rejected.
        margin: mean of chosen - rejected, in units of the reward model.
    """

    loss: Tensor
    accuracy: Tensor
    margin: Tensor


class DPOLoss(NamedTuple):
    """Result of `dpo_loss`: scalars; only `loss` has a graph.

    Args:
        loss: the mean over pairs.
        chosen_reward: mean implicit reward of the chosen responses, `beta * (policy - ref)`.
        rejected_reward: the same of the rejected ones.
        accuracy: fraction of pairs with the chosen reward strictly above the rejected one.
    """

    loss: Tensor
    chosen_reward: Tensor
    rejected_reward: Tensor
    accuracy: Tensor


class KTOLoss(NamedTuple):
    """Result of `kto_loss`; only `loss` has a graph.

    Args:
        loss: the mean over rows, a scalar.
        accuracy: fraction of rows whose reward is strictly on the side of `kl` that their label
            asks for.
        rewards: `[B]` implicit rewards, `beta * (policy - ref)`.
    """

    loss: Tensor
    accuracy: Tensor
    rewards: Tensor


def pairwise_reward_loss(
    chosen: Tensor,
    rejected: Tensor,
    *,
    margin: Tensor | None,
    label_smoothing: float,
    center_coef: float,
) -> RewardLoss:
    """Return the Bradley-Terry loss of pairs, with the usual options.

    With `d = chosen - rejected - margin` and smoothing s, the mean over pairs of
    `-(1 - s) logsigmoid(d) - s logsigmoid(-d) + center_coef (chosen + rejected)^2`. Accuracy and
    the reported margin ignore all three options.

    Args:
        chosen: `[B]` scores of the preferred responses.
        rejected: `[B]` scores of the others.
        margin: `[B]` wanted distance, or None for 0.
        label_smoothing: probability that a label is wrong, 0 to below 0.5; 0 for none.
        center_coef: weight of the penalty that keeps scores of different prompts near 0.

    Returns:
        Scalars, at least float32; all 0 for no pairs.

    Source: Stiennon et al. 2020, section 3.4 (loss); Touvron et al. 2023, equation 2 (margin);
    Eisenstein et al. 2023 (centring).
    """
    chosen, rejected = at_least_float32(chosen), at_least_float32(rejected)
    num_pairs = max(chosen.numel(), 1)
    difference = chosen - rejected
    d = difference if margin is None else difference - margin
    per_pair = _smoothed_logistic_loss(d, label_smoothing)
    if center_coef:
        per_pair = per_pair + center_coef * (chosen + rejected).square()
    accuracy = (difference.detach() > 0).to(difference.dtype).sum() / num_pairs
    return RewardLoss(per_pair.sum() / num_pairs, accuracy, difference.detach().sum() / num_pairs)


def dpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float,
    label_smoothing: float,
    kind: Literal["sigmoid", "ipo"],
    num_pairs: Tensor | float | None,
) -> DPOLoss:
    """Return the loss of direct preference optimisation.

    With `h = (policy_chosen - ref_chosen) - (policy_rejected - ref_rejected)` and smoothing s, the
    mean over pairs of `-(1 - s) logsigmoid(beta h) - s logsigmoid(-beta h)` for "sigmoid" and of
    `(h - 1 / (2 beta))^2` for "ipo". All log-probabilities are sums over the response, the stop
    token included, also for "ipo", where TRL takes means over tokens.

    Args:
        policy_chosen: `[B]` log-probability of the chosen response under the policy, nats.
        policy_rejected: `[B]` of the rejected response.
        ref_chosen: `[B]` of the chosen response under the reference.
        ref_rejected: `[B]` of the rejected response.
        beta: how strongly the policy is kept near the reference, above 0.
        label_smoothing: probability that a label is wrong, 0 to below 0.5; 0 for "ipo".
        kind: the loss, "sigmoid" or "ipo".
        num_pairs: pairs of the whole optimizer step, or None for those of this call.

    Returns:
        Scalars, at least float32; all 0 for no pairs.

    Raises:
        ValueError: if `kind` is neither, or "ipo" is given a `label_smoothing`.

    Source: Rafailov et al. 2023, equation 7; Mitchell 2023, "A note on DPO with noisy preferences"
    (smoothing); Azar et al. 2023, equation 17 (IPO).
    """
    chosen = at_least_float32(policy_chosen) - at_least_float32(ref_chosen)
    rejected = at_least_float32(policy_rejected) - at_least_float32(ref_rejected)
    h = chosen - rejected
    if kind == "sigmoid":
        per_pair = _smoothed_logistic_loss(beta * h, label_smoothing)
    elif kind == "ipo":
        if label_smoothing:
            raise ValueError(
                f"label_smoothing={label_smoothing} must be 0 for kind='ipo', whose loss has none"
            )
        per_pair = (h - 1 / (2 * beta)).square()
    else:
        raise ValueError(f"kind={kind!r} must be 'sigmoid' or 'ipo'")
    divisor = max(h.numel(), 1) if num_pairs is None else num_pairs
    with torch.no_grad():
        measures = (beta * chosen, beta * rejected, (h > 0).to(h.dtype))
        chosen_reward, rejected_reward, accuracy = (x.sum() / divisor for x in measures)
    return DPOLoss(per_pair.sum() / divisor, chosen_reward, rejected_reward, accuracy)


def kto_loss(
    policy: Tensor,
    ref: Tensor,
    label: Tensor,
    *,
    kl: Tensor | float,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
    num_rows: Tensor | float | None,
) -> KTOLoss:
    """Return the loss of Kahneman-Tversky optimization.

    With `r = policy - ref`, the mean over rows of `desirable_weight (1 - sigmoid(beta (r - kl)))`
    where `label` is True and of `undesirable_weight (1 - sigmoid(beta (kl - r)))` where it is not.

    Args:
        policy: `[B]` log-probability of the response under the policy, nats.
        ref: `[B]` of the same response under the reference.
        label: `[B]` bool, True where the response is desirable.
        kl: the reference point of all rows of an optimizer step, nats, 0 or above: the mean of
            `policy - ref` over prompts with responses to other prompts. It gets no gradient.
        beta: how strongly the policy is kept near the reference, above 0.
        desirable_weight: weight of the rows whose label is True.
        undesirable_weight: weight of the other rows.
        num_rows: rows of the whole optimizer step, or None for those of this call.

    Returns:
        At least float32; all 0 for no rows.

    Source: Ethayarajh et al. 2024 (arXiv 2402.01306), equation 8.
    """
    r = at_least_float32(policy) - at_least_float32(ref)
    sign = label.to(r.dtype) * 2 - 1
    weight = torch.where(label, r.new_tensor(desirable_weight), r.new_tensor(undesirable_weight))
    kl = kl.detach() if isinstance(kl, Tensor) else kl
    per_row = weight * torch.sigmoid(-beta * sign * (r - kl))
    divisor = max(r.numel(), 1) if num_rows is None else num_rows
    with torch.no_grad():
        accuracy = (sign * (r - kl) > 0).to(r.dtype).sum() / divisor
    return KTOLoss(per_row.sum() / divisor, accuracy, beta * r.detach())


def _smoothed_logistic_loss(d: Tensor, label_smoothing: float) -> Tensor:
    likelihood = (1 - label_smoothing) * logsigmoid(d)
    if label_smoothing:
        likelihood = likelihood + label_smoothing * logsigmoid(-d)
    return -likelihood
