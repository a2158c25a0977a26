"""Hyper-parameters as frozen dataclasses; see `arguments.Checked` for what is checked."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from rlhf_lightning.arguments import (
    LOWEST_TEMPERATURE,
    Above0,
    AtLeast0,
    AtLeast1,
    Count,
    CountOrZero,
    Fraction,
    Rate,
    Share,
    ShareAbove0,
    Size,
)
from rlhf_lightning.arguments import Checked as Checked
from rlhf_lightning.arguments import UnusualHparamWarning as UnusualHparamWarning
from rlhf_lightning.arguments import Usual as Usual

# Trained weights in 16 bits lose the small updates of RLHF; fp16 would need a loss scaler.
Precision = Literal["32-true", "bf16-mixed"]
_warn = partial(warnings.warn, category=UnusualHparamWarning, stacklevel=3)

# The ratio of a whole sequence hardly moves; a weight without a lower bound may rise far.
_USUAL_OF_SURROGATE = {
    "gspo": dict.fromkeys(("cliprange", "cliprange_high"), Usual(1e-4, 1e-2)),
    "cispo": {"cliprange": Usual(0.05, 1.0), "cliprange_high": Usual(0.05, 10.0)},
    "masked_ratio": {"cliprange": Usual(0.05, 1.0), "cliprange_high": Usual(0.05, 10.0)},
}
_WITHOUT_DUAL_CLIP = {
    "cispo": "bounds the weight itself",
    "masked_ratio": "leaves out tokens beyond its bounds",
    "masked_probability": "leaves out tokens beyond its bounds",
}
_OF_MODE = {"off_policy_cap": "truncated", "off_policy_low": "masked", "off_policy_high": "masked"}


@dataclass(frozen=True)
class SamplingHparams(Checked):
    """Sampling of rollouts.

    Args:
        temperature: divides the logits when sampling and in every log-probability.
        max_new_tokens: longest response in tokens, EOS included.
        top_k: must stay 0; PPO's ratio needs samples of the full distribution.
        top_p: must stay 1.0, for the same reason.
        skip_special_tokens: leave special tokens out of the texts for rewards, judges and people;
            training still uses all ids.
    """

    temperature: Annotated[float, Field(ge=LOWEST_TEMPERATURE, le=10), Usual(0.7, 1.0)] = 1.0
    max_new_tokens: Size = 64
    top_k: CountOrZero = 0
    top_p: ShareAbove0 = 1.0
    skip_special_tokens: bool = False

    def __post_init__(self) -> None:
        """Check the values and refuse truncated sampling."""
        super().__post_init__()
        if self.top_k != 0 or self.top_p != 1.0:
            raise ValueError(
                f"top_k={self.top_k}, top_p={self.top_p:g}: rollouts sample the "
                "full distribution (top_k=0, top_p=1), or the ratio is wrong before any update"
            )


@dataclass(frozen=True)
class SFTHparams(Checked):
    """Supervised fine-tuning.

    Args:
        learning_rate: peak learning rate of the schedule; None follows the model's size.
        micro_batch_size: rows in one forward; None: all of a rank, on a GPU 16,384 tokens or fewer.
        max_grad_norm: bound on the gradient norm.
        max_skipped_steps: consecutive optimizer steps that may be skipped because the loss or the
            gradient is not finite; one more stops the run, so 0 stops it at the first.
    """

    learning_rate: Annotated[Rate | None, Usual(1e-6, 5e-3)] = None
    micro_batch_size: Count | None = None
    max_grad_norm: Above0 = 1.0
    max_skipped_steps: CountOrZero = 10


@dataclass(frozen=True)
class RewardHparams(Checked):
    """Pairwise reward model (Bradley-Terry).

    Args:
        learning_rate: peak learning rate of the schedule; None follows the model's size.
        micro_batch_size: pairs in one forward, both sides of each; None as for SFT.
        max_grad_norm: bound on the gradient norm.
        max_skipped_steps: consecutive optimizer steps that may be skipped because the loss or the
            gradient is not finite; one more stops the run, so 0 stops it at the first.
        use_margin: subtract the records' margin from the difference of the scores.
        label_smoothing: share of labels assumed to be wrong.
        center_coef: weight of mean((chosen + rejected)^2), which keeps scores near 0.
        normalization_samples: responses of the SFT policy over which scores get mean 0 and std 1;
            0 skips it.
    """

    learning_rate: Annotated[Rate | None, Usual(1e-6, 5e-3)] = None
    micro_batch_size: Count | None = None
    max_grad_norm: Above0 = 1.0
    max_skipped_steps: CountOrZero = 10
    use_margin: bool = True
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5), Usual(0, 0.2)] = 0.0
    center_coef: Annotated[AtLeast0, Usual(0, 0.1)] = 0.01
    normalization_samples: Annotated[int, Field(ge=0, le=10**9)] = 512


@dataclass(frozen=True)
class DPOHparams(Checked):
    """Direct preference optimization.

    Args:
        learning_rate: peak learning rate of the schedule; None follows the model's size.
        micro_batch_size: pairs in one forward, both sides of each; None as for SFT.
        max_grad_norm: bound on the gradient norm.
        max_skipped_steps: consecutive optimizer steps that may be skipped because the loss or the
            gradient is not finite; one more stops the run, so 0 stops it at the first.
        beta: weight of the log-ratio to the reference; the policy moves farther if it is small.
        label_smoothing: share of labels assumed to be wrong (cDPO); only for `kind="sigmoid"`.
        kind: "sigmoid" for DPO, "ipo" for the squared loss whose margin is bounded, "kto" for
            single responses with a label (`data.kind=unpaired`).
        desirable_weight: weight of responses whose label is true; only for `kind="kto"`.
        undesirable_weight: weight of responses whose label is false; only for `kind="kto"`.
    """

    learning_rate: Annotated[Rate | None, Usual(1e-7, 1e-3)] = None
    micro_batch_size: Count | None = None
    max_grad_norm: Above0 = 1.0
    max_skipped_steps: CountOrZero = 10
    beta: Annotated[Above0, Usual(0.01, 0.5)] = 0.1
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5), Usual(0, 0.3)] = 0.0
    kind: Literal["sigmoid", "ipo", "kto"] = "sigmoid"
    desirable_weight: Annotated[AtLeast0, Usual(0.1, 10)] = 1.0
    undesirable_weight: Annotated[AtLeast0, Usual(0.1, 10)] = 1.0

    def __post_init__(self) -> None:
        """Check that they go together."""
        super().__post_init__()
        if self.kind != "sigmoid" and self.label_smoothing:
            raise ValueError(
                f"label_smoothing={self.label_smoothing:g} is of kind=sigmoid alone: "
                f"use 0 with kind={self.kind}"
            )
        weights = (self.desirable_weight, self.undesirable_weight)
        if not any(weights):
            raise ValueError("desirable_weight=0, undesirable_weight=0 learn from no row: use 1")
        if self.kind != "kto" and weights != (1, 1):
            raise ValueError(
                f"desirable_weight={weights[0]:g}, undesirable_weight={weights[1]:g} "
                f"are of kind=kto alone: use 1 with kind={self.kind}"
            )


@dataclass(frozen=True)
class LoraHparams(Checked):
    """Low-rank adapters on a frozen base (Hu et al. 2021); null in the configuration trains all.

    Args:
        r: rank of each adapter.
        alpha: the adapter's output is scaled by alpha / r.
        dropout: dropout on the adapter's input; must be 0 for PPO, or its ratio does not start at
            1.
        target_modules: "all-linear" (every Linear except the head; no parameter that holds the
            experts of a mixture), or ends of paths separated by commas: `q_proj`, `0.mlp.up_proj`.
        base_precision: None for the Trainer's; under `bf16-mixed` the frozen Linear weights are
            held in bf16, which autocast would round them to anyway.
        quantization: "none", or "nf4" for a 4-bit base (QLoRA, Dettmers et al. 2023).
    """

    r: Annotated[Size, Usual(4, 128)] = 16
    alpha: Annotated[Count, Usual(8, 256)] = 32
    dropout: Annotated[Fraction, Usual(0, 0.1)] = 0.0
    target_modules: str = "all-linear"
    base_precision: Precision | None = None
    quantization: Literal["none", "nf4"] = "none"

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        if not self.target_modules.strip(", "):
            raise ValueError("target_modules is empty: use all-linear, or name modules")


@dataclass(frozen=True)
class OnPolicyHparams(Checked):
    """Coefficients that PPO and its relatives share: shaping, surrogate, optimizer steps.

    Args:
        learning_rate: the policy's rate at the start of the schedule; None follows its size.
        kl_coef: weight of the KL penalty.
        kl_in: place of the penalty: "reward" (k1, in the token rewards) or "loss" (in units of
            advantages).
        kl_estimator: estimator of a penalty in the loss: "k2", which has the gradient of the KL, or
            "k3" of the GRPO paper, which has that of the reverse KL.
        kl_target: target of an adaptive kl_coef, in nats per response; None keeps kl_coef fixed.
        kl_horizon: episodes over which the adaptive controller reacts.
        surrogate: "ppo" (clipped ratio of each token), "gspo" (of each sequence), "cispo" (clipped
            weights, every token keeps its gradient), "masked_ratio" (tokens whose ratio is outside
            the range are left out) or "masked_probability" (those whose probability moved by more).
        ratio_base: policy that the ratio divides by: "old", that before the updates, or "sampler",
            by the log-probabilities of the generator; then off_policy must be "none".
        loss_reduction: "token" (mean over all tokens of an optimizer step), "sequence" (mean over
            responses of their means) or "constant" (sum divided by rows times `max_new_tokens`).
        cliprange: the ratio is clipped to 1 - cliprange .. 1 + cliprange; 1 sets no lower bound.
            Of "masked_probability" the bound on the change of a token's probability.
        cliprange_high: separate upper bound ("clip higher"); None uses cliprange.
        dual_clip: bound on the loss where the advantage is negative; None is plain PPO. Only of
            "ppo" and "gspo".
        num_minibatches: optimizer steps per pass over a rollout.
        micro_batch_size: rows in one forward; None: all of a rank, on a GPU 16,384 tokens or fewer.
        max_grad_norm: bound on each gradient norm.
        max_skipped_steps: consecutive optimizer steps that may be skipped because the loss, a
            gradient or the rollout (one step) is not finite; one more stops the run.
        missing_eos_penalty: subtracted, after clipping, from the score of a cut-off response.
        score_clip: scores are clipped to -score_clip .. score_clip; None does not clip. "auto" is 5
            if the scorer is normalized (reward models), else None.
        overlong_buffer: last tokens before max_new_tokens, over which a penalty on the score grows
            from 0 to 1; None sets no penalty.
        target_approx_kl: stop the updates of a rollout when a minibatch's approx_kl, reduced over
            ranks, is above this; None never stops.
        entropy_coef: weight of an entropy bonus.
        off_policy: correction for tokens that were not sampled by the old policy (an engine with
            another precision or older weights): "none", "truncated" (each token weighs
            min(ratio, off_policy_cap)) or "masked" (each response weighs its ratio, or 0 outside
            off_policy_low .. off_policy_high).
        off_policy_cap: largest weight of a token, with off_policy=truncated.
        off_policy_low: smallest ratio of a response that counts, with off_policy=masked.
        off_policy_high: largest ratio of a response that counts, with off_policy=masked.
        rollout_lag: iterations between sampling and training, 0 or 1. With 1, responses are sampled
            before the update of the previous iteration.
        teacher_coef: where there is a teacher, weight of log teacher - log policy of a sampled
            token in its advantage; 0 only measures the distance.
    """

    learning_rate: Annotated[Rate | None, Usual(1e-7, 1e-3)] = None
    kl_coef: Annotated[AtLeast0, Usual(0.001, 0.5)] = 0.05
    kl_in: Literal["reward", "loss"] = "reward"
    kl_estimator: Literal["k2", "k3"] = "k2"
    kl_target: Annotated[Above0 | None, Usual(1, 30)] = None
    kl_horizon: Count = 10_000
    surrogate: Literal["ppo", "gspo", "cispo", "masked_ratio", "masked_probability"] = "ppo"
    ratio_base: Literal["old", "sampler"] = "old"
    loss_reduction: Literal["token", "sequence", "constant"] = "token"
    cliprange: Annotated[ShareAbove0, Usual(0.05, 0.4)] = 0.2
    cliprange_high: Annotated[Above0 | None, Usual(0.05, 0.5)] = None
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    num_minibatches: Annotated[Count, Usual(1, 32)] = 1
    micro_batch_size: Count | None = None
    max_grad_norm: Above0 = 1.0
    max_skipped_steps: CountOrZero = 10
    missing_eos_penalty: AtLeast0 = 1.0
    score_clip: Above0 | Literal["auto"] | None = "auto"
    overlong_buffer: Count | None = None
    target_approx_kl: Annotated[Above0 | None, Usual(0.005, 0.5)] = None
    entropy_coef: Annotated[AtLeast0, Usual(0, 0.05)] = 0.0
    off_policy: Literal["none", "truncated", "masked"] = "none"
    off_policy_cap: Annotated[AtLeast1, Usual(1, 10)] = 2.0
    off_policy_low: Share = 0.5
    off_policy_high: Annotated[AtLeast1, Usual(1, 10)] = 2.0
    rollout_lag: Annotated[int, Field(ge=0, le=1)] = 0
    teacher_coef: AtLeast0 = 1.0

    def __post_init__(self) -> None:
        """Check the values, and warn of an estimator with another fixed point."""
        super().__post_init__()
        name = type(self).__name__
        if self.kl_in == "reward" and self.kl_estimator != "k2":
            raise ValueError(
                f"kl_estimator={self.kl_estimator} is of a KL in the loss: use kl_in=loss, "
                "or leave it out (in the reward it is k1)"
            )
        if self.kl_target is not None and self.kl_coef == 0:
            raise ValueError(
                f"kl_target={self.kl_target:g} with kl_coef=0 does nothing: the controller "
                "multiplies kl_coef; start from kl_coef=0.05, or leave kl_target out"
            )
        if self.kl_target is None and self.kl_horizon != type(self).kl_horizon:
            raise ValueError(
                f"kl_horizon={self.kl_horizon} is of kl_target: leave it out, or set kl_target"
            )
        if self.dual_clip is not None and (reason := _WITHOUT_DUAL_CLIP.get(self.surrogate)):
            raise ValueError(
                f"dual_clip={self.dual_clip:g} is of no use with surrogate={self.surrogate}, which "
                f"{reason}: use null, and a lower cliprange_high"
            )
        if self.ratio_base == "sampler" and self.off_policy != "none":
            raise ValueError(
                f"off_policy={self.off_policy} with ratio_base=sampler corrects twice, by the "
                "weight and by the ratio: use off_policy=none, or ratio_base=old"
            )
        for item in fields(self):
            mode = _OF_MODE.get(item.name, self.off_policy)
            if mode != self.off_policy and getattr(self, item.name) != item.default:
                raise ValueError(
                    f"{item.name}={getattr(self, item.name):g} is of off_policy={mode}, and "
                    f"off_policy={self.off_policy} here: leave it out, or use off_policy={mode}"
                )
        if self.rollout_lag and self.off_policy == "none" and self.ratio_base == "old":
            _warn(
                f"{name}.rollout_lag=1 trains on samples of older weights, and off_policy=none "
                "corrects for nothing: use off_policy=truncated, or ratio_base=sampler"
            )
        if self.kl_in == "loss" and self.kl_estimator == "k3":
            _warn(
                f"{name}.kl_estimator=k3 holds the policy to another optimum than "
                "the KL penalty of RLHF has (its gradient is that of the reverse KL): use k2, "
                "unless it is to match the GRPO paper (TRL: use_bias_correction_kl=False)"
            )

    def _usual(self, name: str, hint: Any) -> Usual | None:
        return _USUAL_OF_SURROGATE.get(self.surrogate, {}).get(name, super()._usual(name, hint))

    @property
    def num_passes(self) -> int:
        """Passes over one rollout."""
        raise NotImplementedError

    @property
    def num_resampling_rounds(self) -> int:
        """Largest number of times that an iteration samples spare prompts."""
        return 0

    @property
    def num_spare_batches(self) -> int:
        """Number of further batches of prompts that an iteration is given as spares."""
        return self.rollout_lag or self.num_resampling_rounds


@dataclass(frozen=True)
class PPOHparams(OnPolicyHparams):
    """PPO with a KL penalty in the reward; the other settings are those of `OnPolicyHparams`.

    Args:
        value_learning_rate: the value model's learning rate; None follows its size.
        cliprange_value: bound on the change of a value from its old one; None does not clip.
        vf_coef: weight of the value loss.
        gamma: discount factor; use 1.0 for responses.
        gae_lambda: lambda of generalized advantage estimation.
        gae_lambda_value: lambda of the value model's targets; None uses gae_lambda.
        gae_length_alpha: makes the lambda of a response's advantages grow with its length:
            1 - 1 / (gae_length_alpha * length), 0 for shorter ones; None uses gae_lambda.
        num_ppo_epochs: passes over one rollout.
        num_value_epochs: passes of the value model over one rollout; None is num_ppo_epochs. The
            policy is trained in the last num_ppo_epochs of them.
        value_trainable: patterns of the names of the value model's parameters, such as "*mlp*". A
            parameter that no pattern matches is frozen. None trains all. With lora, the names are
            those of the adapter.
        critic_warmup_iterations: number of first iterations that train only the value model.
    """

    value_learning_rate: Annotated[Rate | None, Usual(1e-7, 3e-3)] = None
    cliprange_value: Above0 | None = 0.2
    vf_coef: Annotated[AtLeast0, Usual(0.05, 0.2)] = 0.1
    gamma: Annotated[Share, Usual(1, 1)] = 1.0
    gae_lambda: Annotated[Share, Usual(0.9, 1)] = 0.95
    gae_lambda_value: Annotated[Share | None, Usual(0.9, 1)] = None
    gae_length_alpha: Annotated[Above0 | None, Usual(0.01, 2)] = None
    num_ppo_epochs: Annotated[Count, Usual(1, 8)] = 4
    num_value_epochs: Annotated[Count | None, Usual(1, 8)] = None
    value_trainable: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    critic_warmup_iterations: CountOrZero = 0

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        if self.num_passes < self.num_ppo_epochs:
            raise ValueError(
                f"num_value_epochs={self.num_value_epochs} must be at least "
                f"num_ppo_epochs={self.num_ppo_epochs}: use more, or null for as many"
            )

    @property
    def num_passes(self) -> int:
        """Passes over one rollout."""
        return self.num_value_epochs or self.num_ppo_epochs


@dataclass(frozen=True)
class GRPOHparams(OnPolicyHparams):
    """GRPO and its relatives, without a value model; the other settings: `OnPolicyHparams`.

    Args:
        kl_in: place of the KL penalty: "loss" or "reward".
        baseline: "mean" of the prompt's responses, "leave_one_out" (mean of the others), or "none"
            (every token gets its rewards to go).
        scale: "group_std" divides by the standard deviation of the prompt's responses,
            "global_std" whitens over all actions of all ranks, "none" does neither.
        num_epochs: passes over one rollout.
        max_resampling_rounds: largest number of rounds in which an iteration replaces prompts whose
            responses all score the same by the next prompts of the data (DAPO's dynamic sampling);
            0 disables it.
    """

    kl_in: Literal["loss", "reward"] = "loss"
    baseline: Literal["mean", "leave_one_out", "none"] = "mean"
    scale: Literal["group_std", "global_std", "none"] = "group_std"
    num_epochs: Annotated[Count, Usual(1, 8)] = 1
    max_resampling_rounds: Annotated[CountOrZero, Usual(0, 10)] = 0

    def __post_init__(self) -> None:
        """Check the values, and that they go together."""
        super().__post_init__()
        if self.baseline == "none" and self.scale == "group_std":
            raise ValueError(
                "scale=group_std needs a group's baseline: use baseline=mean, or "
                "scale=global_std (REINFORCE++)"
            )
        if self.baseline == "none" and self.surrogate == "gspo":
            raise ValueError(
                "surrogate=gspo has one ratio a response, and baseline=none one "
                "advantage a token: use baseline=mean"
            )
        if self.baseline == "none" and self.max_resampling_rounds:
            raise ValueError(
                f"max_resampling_rounds={self.max_resampling_rounds} needs a group's "
                "baseline: without one responses of equal scores teach too; use baseline=mean, or "
                "max_resampling_rounds=0"
            )
        if self.kl_in == "reward" and self.scale == "group_std" and self.kl_coef:
            _warn(
                f"{type(self).__name__}.kl_in=reward with scale=group_std divides the KL by its "
                "own spread where all scores of a prompt are equal, and kl_coef cancels: use "
                "kl_in=loss, or scale=none"
            )
        if self.rollout_lag and self.max_resampling_rounds:
            raise ValueError(
                f"max_resampling_rounds={self.max_resampling_rounds} and rollout_lag=1 "
                "do not go together: prompts that take the place of others are sampled in the "
                "iteration itself; use one of the two"
            )

    @property
    def num_passes(self) -> int:
        """Passes over one rollout."""
        return self.num_epochs

    @property
    def num_resampling_rounds(self) -> int:
        """Largest number of times that an iteration samples spare prompts."""
        return self.max_resampling_rounds


@dataclass(frozen=True)
class DistillationHparams(OnPolicyHparams):
    """On-policy distillation from a teacher; the other settings: `OnPolicyHparams`.

    Args:
        kl_coef: weight of the KL penalty towards the reference; it holds back from the teacher.
        missing_eos_penalty: subtracted from the score of a cut-off response.
        teacher_coef: weight of the teacher, beside that of a reward.
        divergence: "sampled" adds log teacher - log policy of the sampled token to its advantage.
            The others are a loss over the whole vocabulary: "reverse", KL(policy || teacher),
            "forward", KL(teacher || policy), or "jensen_shannon" between them.
        mixture_weight: of the teacher in the mixture of "jensen_shannon".
        num_epochs: passes over one rollout.
    """

    kl_coef: Annotated[AtLeast0, Usual(0, 0.5)] = 0.0
    missing_eos_penalty: AtLeast0 = 0.0
    teacher_coef: Above0 = 1.0
    divergence: Literal["sampled", "reverse", "forward", "jensen_shannon"] = "reverse"
    mixture_weight: Annotated[float, Field(gt=0, lt=1)] = 0.5
    num_epochs: Annotated[Count, Usual(1, 8)] = 1

    @property
    def learns_distributions(self) -> bool:
        """True if the loss is over the whole distributions of the teacher."""
        return self.divergence != "sampled"

    def __post_init__(self) -> None:
        """Check the values, and that they go together."""
        super().__post_init__()
        if self.divergence != "jensen_shannon" and self.mixture_weight != 0.5:
            raise ValueError(
                f"mixture_weight={self.mixture_weight:g} is of divergence=jensen_shannon: leave it "
                f"out with divergence={self.divergence}"
            )
        if self.entropy_coef and self.learns_distributions:
            raise ValueError(
                f"entropy_coef={self.entropy_coef:g} is of divergence=sampled: leave it out with "
                f"divergence={self.divergence}, in which the teacher says how sure to be"
            )

    @property
    def num_passes(self) -> int:
        """Passes over one rollout."""
        return self.num_epochs
