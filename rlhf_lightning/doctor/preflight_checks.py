"""Checks before the first update: pure judgements on one rollout's figures."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_lightning.functional.statistics import EQUAL_SCORES
from rlhf_lightning.modules.step_0 import RATIO_CAUSES, REFERENCE_CAUSES

MOST_PADDED = 0.02  # a policy may sample the pad token by itself, rarely
# An untrained policy chooses nearly evenly among all tokens. A language model at temperature 1 has
# less than a third of that entropy.
UNTRAINED = 0.5


@dataclass(frozen=True)
class FirstRollout:
    """The figures of a rollout before any update, over all ranks.

    Args:
        ratio_error: mean |log-ratio| of the module's log-probabilities, computed once more.
        reference_error: mean |log p - log p_ref|.
        finished: share of responses that ended with a stop token.
        stop_errors: finished responses whose last token is no stop token of the engine.
        padded: share of responses that contain the pad token before their last token.
        eos_known: whether the tokenizer's EOS is among the engine's stop tokens.
        score_mean, score_std: mean and standard deviation of the scores.
        finite: whether every score is finite.
        length_mean: mean length, in tokens.
        shortest, longest: shortest and longest length, in tokens.
        max_new_tokens: limit of the length, in tokens.
        sampler_bias, sampler_error: mean surprise less entropy and its standard error, nats a
            token.
        tolerance: rounding error to expect, in nats a token.
        same_source: whether policy and reference start from one source.
        entropy_share: mean entropy over that of a uniform choice among all tokens; 0 above
            temperature 1, where it says nothing about the weights.
        vocabulary: tokens to choose among; 0 where it is not known.
        has_reward: whether the scores are a reward.
    """

    ratio_error: float
    reference_error: float
    finished: float
    stop_errors: int
    padded: float
    eos_known: bool
    score_mean: float
    score_std: float
    finite: bool
    length_mean: float
    shortest: int
    longest: int
    max_new_tokens: int
    sampler_bias: float
    sampler_error: float
    tolerance: float
    same_source: bool = True
    entropy_share: float = 0.0
    vocabulary: int = 0
    has_reward: bool = True

    @property
    def untrained(self) -> bool:
        """True of a policy that chooses nearly evenly: it ends and pads by chance."""
        return self.entropy_share > UNTRAINED

    @property
    def padded_by_chance(self) -> float:
        """Share of responses that an even choice pads, with room for chance: three times that."""
        return 3 * self.length_mean / self.vocabulary if self.untrained and self.vocabulary else 0.0


@dataclass(frozen=True)
class Check:
    """One check of the preflight.

    Args:
        name: name of the check.
        passed: whether it passed.
        found: the finding, in words and numbers.
        fix: the fix if it did not pass.
    """

    name: str
    passed: bool
    found: str
    fix: str


def check_first_rollout(first: FirstRollout) -> list[Check]:
    """Return every check with its finding; a run in which one fails is not worth starting."""
    known = "is" if first.eos_known else "is not"
    ends = first.finished >= 0.5 or first.untrained
    bias, error = first.sampler_bias, first.sampler_error
    return [
        Check(
            "ratio 1",
            first.ratio_error <= first.tolerance,
            f"mean |log-ratio| {first.ratio_error:.2g} nats a token before any update",
            RATIO_CAUSES,
        ),
        Check(
            "KL 0",
            not first.same_source or first.reference_error <= first.tolerance,
            f"mean |log p - log p_ref| {first.reference_error:.2g} nats a token before any update",
            REFERENCE_CAUSES,
        ),
        Check(
            "responses end",
            ends and first.stop_errors == 0 and first.eos_known,
            f"{100 * first.finished:.0f} % of responses ended by themselves, {first.stop_errors} "
            f"without a stop token; the tokenizer's EOS {known} one",
            "stop at the EOS that SFT taught (artifacts.sft), and leave it room by max_new_tokens",
        ),
        Check(
            "padding",
            first.padded <= max(MOST_PADDED, first.padded_by_chance),
            f"{100 * first.padded:.1f} % of responses hold the pad token before their end",
            "no response may hold the pad token: set pad_token of the tokenizer in artifacts.sft",
        ),
        *([_scores(first)] if first.has_reward else []),
        _lengths(first),
        Check(
            "samples are the policy's",
            not (abs(bias) >= 6 * error and abs(bias) > 0.03),
            f"surprise less entropy {bias:+.3f} +- {error:.3f} nats",
            "switch off top-k, top-p and penalties of the engine, and compare the temperatures",
        ),
    ]


def _scores(first: FirstRollout) -> Check:
    rounding = EQUAL_SCORES * max(1.0, abs(first.score_mean))
    return Check(
        "scores differ",
        first.finite and first.score_std > rounding,
        f"scores have mean {first.score_mean:.3g} and standard deviation {first.score_std:.3g}"
        + ("" if first.finite else "; some are not finite"),
        "one score for all teaches nothing: look at val/accuracy, or at what the function returns",
    )


def _lengths(first: FirstRollout) -> Check:
    ends = first.shortest < first.max_new_tokens or first.untrained
    passed = first.length_mean >= 2 and ends
    return Check(
        "lengths",
        passed,
        f"responses have {first.shortest} to {first.longest} tokens, {first.length_mean:.1f} on "
        f"average, of at most {first.max_new_tokens}",
        "take the template of SFT where responses are empty; let them end before the limit",
    )
