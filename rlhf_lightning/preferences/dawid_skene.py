"""Who is right how often, without knowing the truth: Dawid and Skene's model of raters.

Legend: N votes, I items, A annotators, K categories.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlhf_lightning.preferences.agreement import MISSING, Votes

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class RaterModel:
    """What the votes say about items and annotators.

    Args:
        annotators: their names.
        categories: what can be said, and be true.
        posterior: `[I, K]` probability of each category being true of an item.
        confusion: `[A, K, K]` probability that an annotator says the last where the middle is true.
        prior: `[K]` share of items of which each category is true.
        log_likelihood: of the votes, and of the pseudo-votes, at the end.
        iterations: of expectation and maximisation.
    """

    annotators: tuple[str, ...]
    categories: tuple[str, ...]
    posterior: Floats
    confusion: Floats
    prior: Floats
    log_likelihood: float
    iterations: int

    @property
    def accuracy(self) -> dict[str, float]:
        """Expected share of an annotator's votes that are true, over items as they come."""
        right = np.einsum("k,akk->a", self.prior, self.confusion)
        return {name: float(x) for name, x in zip(self.annotators, right, strict=True)}


def dawid_skene(
    votes: Votes, *, smoothing: float = 1.0, max_iterations: int = 200, tolerance: float = 1e-8
) -> RaterModel:
    """Fit one confusion matrix an annotator, and the truth of every item, by EM.

    EM starts from the shares of the votes. Given the truth of an item, annotators are taken to err
    independently. Each row of a confusion
    matrix gets `smoothing` pseudo-votes, shared so that a rater of whom nothing is known is right
    more often than not: half of them on the truth, the rest spread evenly. The same number goes to
    the prior, spread evenly.

    Args:
        votes: at least one.
        smoothing: pseudo-votes; 0 is Dawid and Skene's own estimate.
        max_iterations: at least 1.
        tolerance: stop when the log-likelihood an item rises by less.

    Raises:
        ValueError: if there is no vote, or `smoothing` is negative.

    Source: Dawid and Skene 1979, "Maximum likelihood estimation of observer error-rates using the
    EM algorithm".
    """
    if smoothing < 0:
        raise ValueError(f"smoothing={smoothing} must be 0 or more")
    counts = votes.counts
    if not len(votes.cells):
        raise ValueError("no vote was given: Dawid and Skene's model needs some")
    item, annotator, said = votes.cells.T  # [N] each
    num_categories = counts.shape[1]
    posterior = counts / counts.sum(1, keepdims=True)
    pseudo = smoothing * _lenient(num_categories)
    previous, iteration = -np.inf, 0
    while iteration < max_iterations:
        iteration += 1
        prior = _shares(posterior.sum(0) + smoothing / num_categories)
        seen = np.zeros((len(votes.annotators), num_categories, num_categories))  # said, true
        np.add.at(seen, (annotator, said), posterior[item])
        confusion = _shares(seen.transpose(0, 2, 1) + pseudo)  # [A, K, K]
        log_joint = np.tile(_log(prior), (len(votes.items), 1))  # [I, K]
        np.add.at(log_joint, item, _log(confusion)[annotator, :, said])
        top = log_joint.max(1, keepdims=True)
        evidence = top[:, 0] + np.log(np.exp(log_joint - top).sum(1))
        posterior = np.exp(log_joint - evidence[:, None])
        likelihood = float(
            evidence.sum()
            + (pseudo * _log(confusion)).sum()
            + smoothing / num_categories * _log(prior).sum()
        )
        if likelihood - previous < tolerance * len(posterior):
            break
        previous = likelihood
    return RaterModel(
        votes.annotators, votes.categories, posterior, confusion, prior, likelihood, iteration
    )


def likely_choices(model: RaterModel, *, at_least: float = 0.5) -> NDArray[np.int64]:
    """Return `[I]` the likeliest category, `MISSING` where it is not likelier than `at_least`."""
    return np.where(model.posterior.max(1) > at_least, model.posterior.argmax(1), MISSING)


def _lenient(num_categories: int) -> Floats:
    other = 0.5 / max(num_categories - 1, 1)
    return np.where(np.eye(num_categories, dtype=bool), 0.5, other)


def _shares(values: Floats) -> Floats:
    total = values.sum(-1, keepdims=True)
    # Without pseudo-votes a category nobody used has none: any row does, it is never read.
    return np.where(total > 0, values / np.where(total > 0, total, 1), 1 / values.shape[-1])


def _log(values: Floats) -> Floats:
    return np.log(np.maximum(values, 1e-300))
