"""All detectors; a new one is one object here. See `DetectorSpec` for what it holds, in this order.

Alerts, coverage, interventions, thresholds, report and docs/doctor.md take everything from here.
"""

from __future__ import annotations

from rlhf_lightning.doctor import interventions, readings
from rlhf_lightning.doctor.metrics import DOMAIN
from rlhf_lightning.doctor.spec import DetectorSpec, bounds, threshold

_ALL = (
    DetectorSpec(
        "constant_score",
        "Every response gets the same score",
        "iterations in a row in which all scores were the same",
        "count",
        "the reward function returns a constant: it reads a wrong column, finds no answer in the "
        "expected form, or the task is too hard, or solved",
        "score a few responses of samples.jsonl by hand; a reward of 0 and 1 needs prompts that "
        "are sometimes solved; there is nothing to learn before scores differ",
        "score_std",
        readings.iterations_with_equal_scores,
        bounds("constant", 0, 2, ge=0),
        begins=readings.from_first,
        missing="no reward",
        counts_iterations=True,
    ),
    DetectorSpec(
        "kl_high",
        "The policy has left the reference",
        "KL to the reference",
        "nats a token",
        "kl_coef is too small, or the learning rate too high, for this reward; beyond 2 nats the "
        "language itself is usually gone",
        "raise kl_coef (0.05, 0.1, 0.2), or set kl_target; stop earlier; read samples.jsonl",
        "kl_per_token",
        readings.latest,
        bounds("kl_high", 1.0, 2.0, gt=0),
        begins=readings.from_first,
        action=interventions.RAISE_KL_COEF,
        serious=True,
    ),
    DetectorSpec(
        "kl_low",
        "The policy has not moved",
        "recent KL to the reference, with the reward flat",
        "nats a token",
        "the learning rate is too small, kl_coef too large, or the scores tell responses apart too "
        "little to learn from",
        "lower kl_coef to 0.01, or raise learning_rate; look at rollout/score_std",
        "kl_per_token",
        readings.kl_where_score_is_flat,
        {
            "kl_low_floor": threshold(0.05, ge=0),
            # of the score since the first iterations, standard deviations: below that it is flat
            "kl_low_gain": threshold(0.1),
            # of the run that must have passed before
            "kl_low_share": threshold(0.25, ge=0, le=1),
        },
        begins=readings.from_share_of_run,
        action=interventions.LOWER_KL_COEF,
    ),
    DetectorSpec(
        "reward_hacking",
        "The score rises while the second scorer falls",
        "fall of the second scorer from its best while the score rose",
        "its standard deviations",
        "the policy has found what the reward model pays for and people do not want",
        "read the samples that score highest; stop or roll back; raise kl_coef; label such "
        "responses and train the reward model again",
        "second_score",
        readings.fall_while_score_rose,
        {
            **bounds("hacking", 0.3, 0.6, gt=0),
            "hacking_gain": threshold(0.1),  # rise of the score in that time, standard deviations
        },
        begins=readings.from_baseline,
        missing="no second scorer",
        action=interventions.RAISE_KL_COEF,
        serious=True,
    ),
    DetectorSpec(
        "scorer_disagreement",
        "The score says something else than the second scorer",
        "recent correlation of score and second scorer",
        "correlation",
        "the reward model has learnt noise (noisy labels, too few pairs), or one of the two is "
        "read wrongly",
        "look at the reward stage's val/accuracy against its label ceiling; check the labels; "
        "train the reward model on more pairs",
        "second_correlation",
        readings.recent,
        bounds("agreement", 0.2, 0.0, floor="_floor", ge=-1, le=1),
        missing="one of the two scores does not vary",
        missing_with="reward_hacking",
    ),
    DetectorSpec(
        "length_bias",
        "The score pays for length",
        "recent correlation of score and response length within a domain, either sign",
        "correlation",
        "the reward model has learnt that longer is better (or shorter), as labels often are",
        "compare val/accuracy_length_matched of the reward model; balance its pairs by length",
        "length_correlation",
        readings.recent_size,
        bounds("length_bias", 0.5, 0.8, ge=0, le=1),
        missing="within a domain, score or length does not vary",
    ),
    DetectorSpec(
        "length_drift",
        "Responses change their length",
        "excess of the longer over the shorter of recent and first response length",
        "share",
        "the reward pays for length, or responses are cut off or end at once",
        "look at length_bias and at samples; balance the reward model's pairs by length; check "
        "missing_eos_penalty and gamma",
        "response_length",
        readings.relative_change,
        bounds("length_drift", 0.8, 1.5, gt=0),
        begins=readings.from_baseline,
    ),
    DetectorSpec(
        "diversity",
        "Responses become alike",
        "recent distinct bigrams against the first iterations",
        "ratio",
        "the policy repeats a few phrases that score well",
        "raise kl_coef; add a diversity bonus; read samples.jsonl",
        "distinct_2",
        readings.ratio,
        bounds("diversity", 0.35, 0.2, floor="_floor", ge=0),
        begins=readings.from_baseline,
        action=interventions.DIVERSIFY,
        serious=True,
    ),
    DetectorSpec(
        "duplicates",
        "Many prompts get the same response",
        "recent share of the most common response",
        "share",
        'one response scores well on any prompt, such as a refusal or "I don\'t know"',
        "read that response and its score; label it against real responses; raise kl_coef",
        "most_common",
        readings.recent,
        bounds("duplicates", 0.3, 0.5, gt=0, le=1),
        action=interventions.DIVERSIFY,
        serious=True,
    ),
    DetectorSpec(
        "entropy",
        "The policy becomes deterministic",
        "recent entropy against the first iterations",
        "ratio",
        "it has settled on one response a prompt and explores no more",
        "raise kl_coef or entropy_coef; lower the learning rate",
        "entropy",
        readings.ratio,
        bounds("entropy", 0.25, 0.1, floor="_floor", ge=0),
        begins=readings.from_baseline,
        action=interventions.DIVERSIFY,
    ),
    DetectorSpec(
        "forgotten_domain",
        "A domain gets worse while the others do not",
        "how far it has fallen behind the others since its best",
        "standard deviations",
        "the reward misjudges the domain or leaves it out, or its prompts are few",
        "look at that domain's samples; raise its weight (controls.domain_weights); add prompts "
        "or pairs of it",
        DOMAIN,
        readings.fall_behind_others,
        {
            **bounds("domain", 1.0, 1.5, gt=0),
            # and this many standard errors, as neighbouring iterations tell them, more than the
            # best recent mean of so many is too high by chance
            "domain_sigmas": threshold(3.5, ge=0),
        },
        begins=readings.from_baseline,
        missing="fewer than two domains",
        action=interventions.WEIGH_DOMAIN,
        serious=True,
    ),
    DetectorSpec(
        "critic",
        "The value model explains nothing",
        "recent explained variance of the returns",
        "share",
        "the value model learns too slowly, was started badly, or scores are not centred",
        "raise value_learning_rate; start it from the reward model "
        "(module.value_head=stored); set critic_warmup_iterations",
        "explained_variance",
        readings.recent_after_grace,
        {
            **bounds("critic", 0.05, -0.5, floor="_floor", le=1),
            "critic_grace": threshold(8, ge=0),  # first iterations in which it may still learn
        },
        begins=readings.from_grace,
        missing="no value model, or all returns are equal",
    ),
    DetectorSpec(
        "saturation",
        "All responses score alike",
        "recent spread of the scores against the first iterations",
        "ratio",
        "the reward model has no more to say about these responses; whitened advantages are noise",
        "stop here, or refresh the reward model with pairs of this policy",
        "score_std",
        readings.ratio,
        bounds("saturation", 0.25, 0.1, floor="_floor", ge=0),
        begins=readings.from_baseline,
    ),
    DetectorSpec(
        "groups",
        "Groups of responses teach nothing",
        "recent share of prompts whose responses differ in score",
        "share",
        "prompts are too easy or too hard for the policy, or the reward is too coarse: all "
        "responses to a prompt score alike, and have no advantage over each other",
        "use prompts that are sometimes solved, more responses to a prompt "
        "(data.num_generations), a reward that tells responses apart, or "
        "module.grpo.max_resampling_rounds",
        "informative_groups",
        readings.recent,
        bounds("groups", 0.3, 0.1, floor="_floor", ge=0),
        begins=readings.from_baseline,
        missing="one response to a prompt",
    ),
    DetectorSpec(
        "clipped_scores",
        "Scores are at the clip",
        "recent share of scores at score_clip or beyond",
        "share",
        "scores have left the range that they had when they were normalised",
        "raise score_clip, or normalise the scorer (mean, std); a run that got there by training "
        "is over-optimised",
        "clipped",
        readings.recent,
        bounds("clipped", 0.25, 0.5, gt=0, le=1),
        missing="no score_clip",
    ),
    DetectorSpec(
        "missing_eos",
        "Responses do not end by themselves",
        "recent share of responses that end with a stop token",
        "share",
        "max_new_tokens is too small, the stop token is not the one that SFT taught, or the "
        "reward pays for going on",
        "compare the tokenizer's EOS and the generation config's with the SFT data; raise "
        "max_new_tokens or missing_eos_penalty",
        "eos_fraction",
        readings.recent,
        bounds("eos", 0.9, 0.7, floor="_floor", ge=0, le=1),
    ),
    DetectorSpec(
        "sampler_mismatch",
        "Samples do not come from the policy that is trained",
        "mean surprise of the sampled tokens less the entropy",
        "nats a token",
        "the engine truncates (top-k, top-p), has another temperature, a penalty, or old weights; "
        "the ratio is then wrong before any update",
        "use rollout=cached; switch every truncation of the engine off; check that it gets the "
        "weights of each iteration",
        "sampler_bias",
        readings.bias_of_sampler,
        {
            **bounds("sampler", 0.03, 0.1, gt=0),
            "sampler_sigmas": threshold(6.0, gt=0),  # and this many standard errors from 0
        },
        serious=True,
    ),
    DetectorSpec(
        "engine_weights",
        "The engine samples with other weights",
        "mean |log-probability of the sampler less that of the policy|",
        "nats a token",
        "the weights of this iteration did not reach the engine, or not all of them (a tied head, "
        "an adapter), or the engine computes in a lower precision",
        "compare with rollout=cached, where only rounding is left; check the transfer of the "
        "weights; off_policy=truncated or masked corrects for older weights, not for wrong ones",
        "sampler_gap",
        readings.gap_of_engine,
        bounds("engine_weights", 0.05, 0.2, gt=0),
        begins=readings.from_first,
        missing="the generator gives no log-probabilities",
        serious=True,
    ),
    DetectorSpec(
        "trust_region",
        "Few tokens are inside the trust region",
        "recent share of tokens that the mask of the policy's loss keeps",
        "share",
        "the policy has moved too far from the base of its ratio: the samples are too old, the "
        "engine has other weights, the updates are too large, or the band is too narrow",
        "look at rollout/sampler_gap; lower learning_rate or the number of passes; send the "
        "weights more often; widen cliprange and cliprange_high",
        "kept_fraction",
        readings.recent,
        bounds("trust_region", 0.7, 0.4, floor="_floor", ge=0, le=1),
        missing="the surrogate leaves no token out",
        action=interventions.SLOW_DOWN,
        serious=True,
    ),
    DetectorSpec(
        "safety",
        "Harmful requests are refused less often",
        "fall of the recent refusal rate on harmful prompts from its best",
        "share",
        "the reward pays for complying, or pairs on harmful prompts are missing or labelled "
        "wrongly",
        "roll back; look at those pairs; add refusals as the preferred responses",
        "refusal_rate",
        readings.fall_of_refusals,
        {
            **bounds("safety", 0.2, 0.4, gt=0, le=1),
            # and this many standard errors, as the number of harmful prompts tells them, more than
            # the best recent mean of so many is too high by chance
            "safety_sigmas": threshold(3.0, ge=0),
        },
        missing="no prompt of doctor.harmful_domains",
        action=interventions.RAISE_KL_COEF,
        serious=True,
    ),
    DetectorSpec(
        "update_size",
        "Updates are too large",
        "KL from the policy that sampled, mean over the minibatches of the updates, the one that "
        "stopped them included",
        "nats a token",
        "the learning rate or num_ppo_epochs is too high: most ratios are clipped",
        "lower learning_rate or num_ppo_epochs, or set target_approx_kl",
        "approx_kl",
        readings.kl_of_updates,
        bounds("update", 0.1, 0.5, gt=0),
        begins=readings.from_first,
        missing="no update was made, or the objective measures no approx_kl",
        unread="one optimizer step an iteration: there the KL is 0",
        action=interventions.SLOW_DOWN,
        serious=True,
    ),
)
DETECTORS = {spec.name: spec for spec in _ALL}
