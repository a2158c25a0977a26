"""The stage to blame for a failed gate, and what to try: a later stage shows it first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rlhf_lightning.evaluation.gates import measured_value
from rlhf_lightning.runs.summary import GateResult

PROXY_GAINED = 0.65  # win rate by the learnt score from which PPO has done its part, and
PROXY_APART = 0.15  # how far the judge that counts then lags behind, to blame the reward model
MOVED = 0.02  # nats a token, below which a policy has hardly left its start
_LEVERS = {  # the KL penalty, by stage
    "ppo": "module.ppo.kl_coef",
    "grpo": "module.grpo.kl_coef",
    "dpo": "module.dpo.beta",
}
_LEVER = "weight of the KL penalty"  # of a stage of another package
_ALSO = {"ppo": "; look at ppo/explained_variance"}
WEAK_DOMAIN = 0.05  # below the reward model's own accuracy
Metrics = Mapping[str, float | None]


class Blame(NamedTuple):
    """The stage to blame, with evidence and remedy.

    Args:
        stage: the one to change; "labels" for the data that the reward model learns from.
        why: the evidence.
        attempt: what to try.
    """

    stage: str
    why: str
    attempt: str

    def __str__(self) -> str:
        """Return it as one text."""
        return f"To blame: {self.stage}. {self.why}. Try: {self.attempt}."


def find_blame(
    stage: str,
    gates: Sequence[GateResult],
    metrics: Mapping[str, Metrics],
    *,
    policy_stage: str = "ppo",
) -> Blame | None:
    """Return what the gates that a stage failed speak of; None if it failed none.

    Args:
        stage: that was judged: `sft`, `reward`, `ppo`, `grpo`, `dpo` or `evaluate`.
        gates: its verdicts.
        metrics: final metrics by stage, of those that have run.
        policy_stage: that trained the policy of an evaluation.
    """
    failed = {gate.name: gate for gate in gates if not gate.passed}
    if not failed:
        return None
    # What was not measured is no evidence against a stage.
    unmeasured = [gate.name for gate in failed.values() if None in (gate.value, gate.threshold)]
    measured = {name: gate for name, gate in failed.items() if name not in unmeasured}
    if not measured:
        return _not_measured(stage, failed)
    blame = _of_stage(stage, measured, metrics, policy_stage)
    note = f" (not measured: {', '.join(unmeasured)})" if unmeasured else ""
    return blame._replace(why=f"{blame.why}{note}")


def _of_stage(
    stage: str, failed: Mapping[str, GateResult], metrics: Mapping[str, Metrics], policy_stage: str
) -> Blame:
    own = metrics.get(stage, {})
    causes: dict[str, Callable[[], Blame]] = {
        "evaluate": lambda: _policy(policy_stage, failed, own, metrics.get("reward", {})),
        "reward": lambda: _reward(failed),
        "sft": lambda: _sft(failed, own),
    }
    if stage in _LEVERS or (stage == policy_stage and stage not in causes):
        return _policy(stage, failed, own, metrics.get("reward", {}))
    return causes.get(stage, lambda: _unknown(stage, failed))()


def _policy(stage: str, failed: Mapping[str, GateResult], own: Metrics, reward: Metrics) -> Blame:
    lever = _LEVERS.get(stage, _LEVER)
    kl, proxy = measured_value(own, "val/kl_per_token"), measured_value(own, "val/score_win_rate")
    safety = [name for name in failed if "refus" in name]
    wins = [name for name in failed if "win_rate" in name]
    if "kl_per_token" in failed:
        return Blame(
            stage,
            f"The policy is {_show(kl)} nats a token away from its start",
            f"a larger {lever}, fewer iterations or a smaller learning rate",
        )
    if "policy_moved" in failed or (wins and kl is not None and kl < MOVED):
        return Blame(
            stage,
            f"The policy has hardly moved: {_show(kl)} nats a token",
            f"more iterations, a larger learning rate or a smaller {lever}",
        )
    if wins:
        rates = [_win_rate(failed[name], own) for name in wins]
        ends = all(name.endswith("_low") for name in wins)
        known = [rate for rate in rates if rate is not None]
        return _not_won(stage, known, proxy, ends_alone=ends)
    if safety:
        overall, harmful = (
            measured_value(reward, "val/accuracy"),
            measured_value(reward, "val/accuracy/domain/harmful"),
        )
        if overall is not None and harmful is not None and harmful < overall - WEAK_DOMAIN:
            return Blame(
                "reward",
                f"It ranks responses to harmful prompts less well ({_show(harmful)}) than others "
                f"({_show(overall)})",
                "more preference pairs about harmful prompts and their look-alikes",
            )
        return Blame(
            stage,
            "What is refused has changed for the worse, and the reward model does not explain it",
            f"a larger share of such prompts, a larger {lever}, or fewer iterations",
        )
    return _unknown(stage, failed)


def _not_won(stage: str, rates: Sequence[float], proxy: float | None, *, ends_alone: bool) -> Blame:
    """Return what to blame where the judge that counts sees too few wins.

    Args:
        stage: that trained the policy.
        rates: by that judge, of the gates that failed.
        proxy: by the learnt score.
        ends_alone: whether only lower ends of intervals failed.
    """
    if proxy is not None and proxy >= max(PROXY_GAINED, min(rates, default=1) + PROXY_APART):
        return Blame(
            "reward",
            f"The policy wins {_show(proxy)} of comparisons by the learnt reward and not by the "
            "judge that counts: the reward model pays for the wrong things",
            "pairs of this policy's responses for the reward model, then a larger "
            f"{_LEVERS.get(stage, _LEVER)}",
        )
    if rates and ends_alone:
        return Blame(
            stage,
            f"It wins {_show(min(rates))} of comparisons, enough, but the interval is wide",
            "a larger evaluation.num_prompts, then more iterations",
        )
    if proxy is None and rates and min(rates) < 0.5:
        return Blame(
            stage,
            f"The policy wins {_show(min(rates))} of comparisons, fewer than half",
            f"reading the samples, then a larger {_LEVERS.get(stage, _LEVER)} or other data",
        )
    why = f"The policy wins {_show(min(rates, default=None))} of comparisons"
    if proxy is not None:
        why = (
            f"The judge that counts agrees with the learnt reward, by which the policy wins "
            f"{_show(proxy)} of comparisons: it was not trained far enough"
        )
    return Blame(
        stage,
        why,
        f"more iterations or a larger learning rate{_ALSO.get(stage, '')}",
    )


def _win_rate(gate: GateResult, own: Metrics) -> float | None:
    """Return the rate itself, also for a gate on the lower end of its interval."""
    rate = measured_value(own, f"val/{gate.name.removesuffix('_low')}")
    return gate.value if rate is None and not gate.name.endswith("_low") else rate


def _reward(failed: Mapping[str, GateResult]) -> Blame:
    # A model that has learnt nothing does not beat length either, whatever the labels are.
    if "beats_length" in failed and "accuracy" not in failed:
        return Blame(
            "labels",
            "Length alone ranks the pairs as well as the reward model does",
            "pairs whose lengths are matched, or in which the shorter response is preferred",
        )
    reason = failed.get("accuracy", next(iter(failed.values()))).reason
    cause, _, attempt = reason.partition(". Try ")
    stage = "labels" if "Noise:" in cause else "reward"
    return Blame(stage, cause, attempt or "more epochs, more pairs or a larger model")


def _sft(failed: Mapping[str, GateResult], own: Metrics) -> Blame:
    finished = measured_value(own, "val/eos_fraction")
    if finished is not None and finished < 0.8:
        return Blame(
            "sft",
            f"Only {_show(finished)} of its responses end by themselves",
            "demonstrations that end with EOS, or a larger evaluation.max_new_tokens",
        )
    return Blame(
        "sft",
        f"It does not beat the model it started from ({next(iter(failed.values())).reason})",
        "more epochs, another learning rate, or better demonstrations: read samples.jsonl",
    )


def _not_measured(stage: str, failed: Mapping[str, GateResult]) -> Blame:
    return Blame(
        stage,
        f"Nothing is known against it: {'; '.join(gate.reason for gate in failed.values())}",
        "gates on what is measured (gates=), or who measures that: evaluation.gold, a judge or "
        "safety prompts",
    )


def _unknown(stage: str, failed: Mapping[str, GateResult]) -> Blame:
    reasons = "; ".join(gate.reason for gate in failed.values())
    return Blame(stage, reasons, "its report.html and samples.jsonl show what it does")


def _show(value: float | None) -> str:
    return "an unknown share" if value is None else f"{value:.3f}"
