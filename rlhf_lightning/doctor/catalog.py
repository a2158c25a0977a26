"""What each detector is called, what it says, what is usually behind it, and what helps.

This table is the only place of these texts: alerts, report and docs/doctor.md take them from here.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_lightning.doctor.thresholds import DoctorThresholds


@dataclass(frozen=True)
class Illness:
    """One detector in words.

    Args:
        title: a few words, as a heading.
        measures: what its value is.
        unit: of the value.
        beyond: `above` or `below`: where it is ill.
        threshold: prefix of its thresholds in `DoctorThresholds`.
        cause: what is usually behind it.
        remedy: what to do by hand.
        action: what the doctor may do itself with `doctor=act`, "" for nothing.
    """

    title: str
    measures: str
    unit: str
    beyond: str
    threshold: str
    cause: str
    remedy: str
    action: str = ""


ILLNESSES: dict[str, Illness] = {
    "constant_score": Illness(
        "Every answer gets the same score",
        "iterations in a row in which all scores were the same",
        "count",
        "above",
        "constant",
        "the reward function returns a constant: it reads a wrong column, finds no answer in the "
        "form that it looks for, or the task is too hard, or solved",
        "score a few answers of samples.jsonl by hand; a reward of 0 and 1 needs prompts that are "
        "sometimes solved; there is nothing to learn before scores differ",
    ),
    "kl_high": Illness(
        "The policy has left the reference",
        "KL to the reference",
        "nats a token",
        "above",
        "kl_high",
        "kl_coef is too small, or the learning rate too high, for this reward; beyond 2 nats the "
        "language itself is usually gone",
        "raise kl_coef (0.05, 0.1, 0.2), or set kl_target; stop earlier; read samples.jsonl",
        "raises kl_coef to the next of 0.05, 0.1, 0.2",
    ),
    "kl_low": Illness(
        "The policy has not moved",
        "recent KL to the reference, with the reward flat",
        "nats a token",
        "below",
        "kl_low",
        "the learning rate is too small, kl_coef too large, or the scores tell answers apart too "
        "little to learn from",
        "lower kl_coef to 0.01, or raise learning_rate; look at rollout/score_std",
        "lowers kl_coef to 0.01",
    ),
    "reward_hacking": Illness(
        "The score rises while the second scorer falls",
        "fall of the second scorer from its best while the score rose",
        "its standard deviations",
        "above",
        "hacking",
        "the policy has found what the reward model pays for and nobody wants",
        "read the samples that score highest; stop or roll back; raise kl_coef; label such answers "
        "and train the reward model again",
        "raises kl_coef to the next of 0.05, 0.1, 0.2",
    ),
    "scorer_disagreement": Illness(
        "The score says something else than the second scorer",
        "recent correlation of score and second scorer",
        "correlation",
        "below",
        "agreement",
        "the reward model has learnt noise (noisy labels, too few pairs), or one of the two is "
        "read wrongly",
        "look at the reward stage's val/accuracy against its label ceiling; check the labels; "
        "train the reward model on more pairs",
    ),
    "length_bias": Illness(
        "The score pays for length",
        "recent correlation of score and response length within a domain, either sign",
        "correlation",
        "above",
        "length_bias",
        "the reward model has learnt that longer is better (or shorter), as labels often are",
        "compare val/accuracy_length_matched of the reward model; balance its pairs by length",
    ),
    "length_drift": Illness(
        "Answers change their length",
        "change of the recent response length against the first iterations",
        "share",
        "above",
        "length_drift",
        "the reward pays for length, or answers are cut off or end at once",
        "look at length_bias and at samples; balance the reward model's pairs by length; check "
        "missing_eos_penalty and gamma",
    ),
    "diversity": Illness(
        "Answers become alike",
        "recent distinct bigrams against the first iterations",
        "ratio",
        "below",
        "diversity",
        "the policy repeats a few phrases that score well",
        "raise kl_coef; add a diversity bonus; read samples.jsonl",
        "adds a bonus for novel bigrams, then raises the temperature",
    ),
    "duplicates": Illness(
        "Many prompts get the same answer",
        "recent share of the most common answer",
        "share",
        "above",
        "duplicates",
        'one answer scores well whatever was asked, such as a refusal or "I don\'t know"',
        "read that answer and its score; label it against real answers; raise kl_coef",
        "adds a bonus for novel bigrams, then raises the temperature",
    ),
    "entropy": Illness(
        "The policy becomes deterministic",
        "recent entropy against the first iterations",
        "ratio",
        "below",
        "entropy",
        "it has settled on one answer a prompt and explores no more",
        "raise kl_coef or entropy_coef; lower the learning rate",
        "adds a bonus for novel bigrams, then raises the temperature",
    ),
    "forgotten_domain": Illness(
        "A domain gets worse while the others do not",
        "how far it has fallen behind the others since its best",
        "standard deviations",
        "above",
        "domain",
        "the reward misjudges the domain or leaves it out, or its prompts are few",
        "look at that domain's samples; raise its weight (controls.domain_weights); add prompts or "
        "pairs of it",
        "multiplies the weight of the domain's scores by 1.5",
    ),
    "critic": Illness(
        "The value model explains nothing",
        "recent explained variance of the returns",
        "share",
        "below",
        "critic",
        "the value model learns too slowly, was started badly, or scores are not centred",
        "raise value_learning_rate; start it from the reward model "
        "(module.models.value_head=stored); set critic_warmup_iterations",
    ),
    "saturation": Illness(
        "All answers score alike",
        "recent spread of the scores against the first iterations",
        "ratio",
        "below",
        "saturation",
        "the reward model has no more to say about these answers; whitened advantages are noise",
        "stop here, or refresh the reward model with pairs of this policy",
    ),
    "clipped_scores": Illness(
        "Scores stand at the clip",
        "recent share of scores at score_clip or beyond",
        "share",
        "above",
        "clipped",
        "scores have left the range that they had when they were normalised",
        "raise score_clip, or normalise the scorer (mean, std); a run that got there by training "
        "is over-optimised",
    ),
    "missing_eos": Illness(
        "Answers do not end by themselves",
        "recent share of answers that end with a stop token",
        "share",
        "below",
        "eos",
        "max_new_tokens is too small, the stop token is not the one that SFT taught, or the reward "
        "pays for going on",
        "compare the tokenizer's EOS and the generation config's with the SFT data; raise "
        "max_new_tokens or missing_eos_penalty",
    ),
    "sampler_mismatch": Illness(
        "Samples do not come from the policy that is trained",
        "mean surprise of the sampled tokens less the entropy",
        "nats a token",
        "above",
        "sampler",
        "the engine truncates (top-k, top-p), has another temperature, a penalty, or old weights; "
        "the ratio is then wrong before any update",
        "use rollout=cached; switch every truncation of the engine off; check that it gets the "
        "weights of each iteration",
    ),
    "safety": Illness(
        "Harmful requests are refused less often",
        "fall of the recent refusal rate on harmful prompts from its best",
        "share",
        "above",
        "safety",
        "the reward pays for complying, or pairs on harmful prompts are missing or labelled "
        "wrongly",
        "roll back; look at those pairs; add refusals as the preferred answers",
        "raises kl_coef to the next of 0.05, 0.1, 0.2",
    ),
    "update_size": Illness(
        "Updates are too large",
        "KL from the policy that sampled, before each optimizer step, mean over the steps",
        "nats a token",
        "above",
        "update",
        "the learning rate or num_ppo_epochs is too high: most ratios are clipped",
        "lower learning_rate or num_ppo_epochs, or set target_approx_kl",
        "halves the learning rates",
    ),
}


def render_illnesses(thresholds: DoctorThresholds) -> str:
    """Return the table of docs/doctor.md: each detector with its bounds, cause, remedy, action."""
    lines = ["| detector | what is read, in which unit | warn, alarm | usual cause | what helps |"]
    lines.append("|---|---|---|---|---|")
    for name, illness in ILLNESSES.items():
        warn, alarm = (bound_of(thresholds, name, level) for level in ("warn", "alarm"))
        bounds = f"{warn:g}" if warn == alarm else f"{warn:g}, {alarm:g}"
        read = f"{illness.measures}, {illness.unit}"
        action = f"; `doctor=act` {illness.action}" if illness.action else ""
        lines.append(
            f"| `{name}`: {illness.title[:1].lower()}{illness.title[1:]} | {read} | "
            f"{illness.beyond} {bounds} | {illness.cause} | {illness.remedy}{action} |"
        )
    return "\n".join(lines)


def bound_of(thresholds: DoctorThresholds, name: str, level: str) -> float:
    """Return a detector's threshold at `warn` or `alarm`; the warning's where it has no alarm."""
    prefix = ILLNESSES[name].threshold
    for key in (f"{prefix}_{level}", f"{prefix}_{level}_floor"):
        if hasattr(thresholds, key):
            return float(getattr(thresholds, key))
    return float(getattr(thresholds, f"{prefix}_floor"))
