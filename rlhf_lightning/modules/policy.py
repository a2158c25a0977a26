"""A module that trains a policy on its own responses: its parts, its models, its checkpoints.

What it does with them is in `modules.on_policy`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar, Self, Unpack, cast

from torch import nn
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.arguments import PathOrName, checked, fitting
from rlhf_lightning.batches import PromptBatch
from rlhf_lightning.data.datamodules import PromptDataModule
from rlhf_lightning.functional.surrogates import SURROGATES, Surrogate
from rlhf_lightning.hparams import OnPolicyHparams, SamplingHparams
from rlhf_lightning.misfit import shown
from rlhf_lightning.models.building import place_on_ranks
from rlhf_lightning.models.heads import PolicyModel, ScalarHeadModel
from rlhf_lightning.models.ppo_models import PolicyModels, policy_models
from rlhf_lightning.modules.base import RLHFModule
from rlhf_lightning.modules.checkpoint_state import HYPER_PARAMETERS, Stateful
from rlhf_lightning.modules.controls import Controls
from rlhf_lightning.modules.options import ModuleParts
from rlhf_lightning.modules.pretrained import Start, naming_argument, of_trainer
from rlhf_lightning.modules.rewards import (
    as_scorer,
    check_objects,
    check_reward,
    named_reward,
    parts_of,
    score_clip_of,
)
from rlhf_lightning.modules.step_0 import Step0
from rlhf_lightning.rollout.estimators import AdvantageEstimator
from rlhf_lightning.rollout.generators.base import Generator
from rlhf_lightning.rollout.noise import RowNoise
from rlhf_lightning.rollout.pending import PendingGeneration
from rlhf_lightning.rollout.scorers.base import Scorer
from rlhf_lightning.rollout.scorers.functions import load_function
from rlhf_lightning.rollout.scorers.hparams import is_address
from rlhf_lightning.rollout.scorers.reward_models import RewardAdapterScorer
from rlhf_lightning.rollout.teachers import ModelTeacher, ServerTeacher, Teacher, TeacherPrompt
from rlhf_lightning.runs.manifest import Source

OBJECTS = ("surrogate", "estimator")
TEACHING = ("teacher", "teacher_prompt")


class PolicyModule(RLHFModule):
    """Holds a policy, its reference, and what samples, scores and judges its responses.

    Args:
        algorithm: coefficients of the algorithm.
        models: builder of policy and reference, and of a value model if there is one.
        default_estimator: estimator of advantages, if no other one is given.
        parts: further parts, see `OnPolicyParts` and `ModuleParts`.

    Attributes:
        whole_groups: whether a minibatch holds all responses to a prompt.
        whole_groups_in_micro_batches: whether a micro-batch does, for a loss that compares them.
        learns_distributions: whether the teacher's whole distributions are learnt.
        controls: values that change during a run; see `Controls`.
        value: the critic; None without one.
        teacher: says how likely it finds the responses; None without one.
        score_clip: that of the hyper-parameters, with "auto" resolved.
    """

    data = PromptDataModule
    batch = PromptBatch
    rolls_out = is_scored = True
    whole_groups: ClassVar[bool] = False
    whole_groups_in_micro_batches: ClassVar[bool | None] = None
    learns_distributions: bool = False
    algorithm: OnPolicyHparams
    policy: PolicyModel  # None before configure_model
    tokenizer: PreTrainedTokenizerBase
    reference: PolicyModel
    value: ScalarHeadModel | None
    teacher: Teacher | None = None
    score_clip: float | None = None
    trained_roots: tuple[nn.Module, ...] = ()
    frozen_models: tuple[nn.Module, ...] = ()

    def __init__(
        self,
        algorithm: OnPolicyHparams,
        models: Callable[[], PolicyModels],
        default_estimator: AdvantageEstimator,
        *,
        sampling: SamplingHparams,
        scorer: Scorer,
        generator: Generator,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
        surrogate: Surrogate | None = None,
        estimator: AdvantageEstimator | None = None,
        teacher: Teacher | None = None,
        teacher_prompt: TeacherPrompt | None = None,
        **parts: Unpack[ModuleParts],
    ) -> None:
        super().__init__(algorithm, models, **parts)
        buffer, longest = algorithm.overlong_buffer, sampling.max_new_tokens
        if buffer is not None and buffer > longest:
            told = f"{type(algorithm).__name__}.overlong_buffer={buffer} is more than the response"
            raise ValueError(f"{told}, max_new_tokens={longest}: use about a fifth of it")
        self.teacher, self.teacher_prompt = teacher, teacher_prompt
        made = SURROGATES[algorithm.surrogate]
        named = {item.name: getattr(algorithm, item.name) for item in fields(made)}
        self.surrogate: Surrogate = surrogate or made(**named)
        self.estimator = estimator or default_estimator
        if not hasattr(self.estimator, "scale_free"):
            told = f"estimator={shown(self.estimator)} has no attribute scale_free"
            fix = "set it on the class, True if a factor on all rewards of a group changes nothing"
            raise TypeError(f"{told}: {fix}, else False")
        self.sampling = sampling
        self.scorer = scorer
        self.generator: Generator = generator
        self.tokenizer = tokenizer
        self.noise = RowNoise(seed, "rollout")
        self.order = RowNoise(seed, "minibatches")
        self.trained_seed = seed  # of what has been trained so far
        self.controls = Controls.from_hparams(algorithm, sampling, f"module.{self.stage}")
        self.step_0 = Step0()
        self.pending = PendingGeneration()
        self.policy = None
        self.value = None

    # -- made from names --------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls,
        policy: PathOrName,
        reward: Any,
        hparams: Mapping[str, Any],
        options: Mapping[str, Any],
        **own: Any,
    ) -> Self:
        """Return the module that trains `policy`; models are loaded when a Trainer asks for them.

        A subclass has a `from_pretrained` with arguments of its own, which ends in this one.

        Args:
            policy: folder or hub name of the policy to start from, which is the reference too.
            reward: reward, as in `as_scorer`.
            hparams: hyper-parameters, by the names under which `cls` takes them.
            options: all of `OnPolicyOptions`.
            own: further arguments, which `check_start` and `load_models` get and checkpoints hold.

        Raises:
            ValueError: if tokenizers, adapters or settings cannot be used.
        """
        lora, weights, name = options["lora"], options["reward_weights"], str(policy)
        if lora is not None and lora.dropout:  # of every forward: the ratio would not start at 1
            told = f"lora.dropout={lora.dropout:g} must be 0 in {cls.__name__}: leave it out"
            raise ValueError(told)
        start = Start.read(policy, "policy", options)
        cls.check_start(start, **own)
        scorer = as_scorer(reward, name, start.tokenizer, weights)
        for part in [one for one in parts_of(scorer) if isinstance(one, RewardAdapterScorer)]:
            start.check_adapter("reward", part.source)
        onward = start.onward()
        hparams = {**hparams, "sampling": options["sampling"] or SamplingHparams()}
        teacher, teaching = _teacher(cls, start, hparams)

        def models() -> PolicyModels:
            how = of_trainer(built, lora) | start.loading | own
            how |= {} if teacher is None else {"teacher": teacher.name}
            return cls.load_models(name, reward, scorer, start=onward, **how)

        built: Any = cast(Any, cls)(
            models=models,
            scorer=scorer,
            generator=start.generator(),
            tokenizer=start.tokenizer,
            **{key: options[key] for key in ("seed", "surrogate")},
            estimator=_estimator(options["estimator"]),
            **teaching,
            **hparams,
            **start.parts,
        )
        built.more_sources = () if teacher is None else (teacher,)
        built.keep(
            start,
            policy=name,
            reward=named_reward(reward),
            start=onward,
            reward_weights=None if weights is None else list(weights),
            **hparams,
            **_in_words(options),
            **own,
        )
        return built  # type: ignore[no-any-return]

    @classmethod
    def check_start(cls, start: Start, **own: Any) -> None:
        """Check that the models that `own` names go with the policy, before any is loaded."""

    @classmethod
    def load_models(cls, policy: str, reward: Any, scorer: Scorer, **how: Any) -> PolicyModels:
        """Return policy and reference.

        Args:
            policy: folder or hub name of the policy.
            reward: reward as it was given, for a model that starts from it.
            scorer: scorer that it names.
            how: further arguments of a function of `models.ppo_models`.
        """
        return policy_models(policy, **how)

    def on_fit_start(self) -> None:
        """Check the Trainer and the data, and that a teacher can be asked about them.

        Raises:
            ValueError: also if a teacher's prompt is made of prompts that the policy sees cut, or
                if the policy has learnt from the noise of this seed before, and this fit begins
                with it anew.
        """
        seed = self.noise.seed
        if self.trainer.ckpt_path is None and self.skipped.num_taken and seed == self.trained_seed:
            told = f"{type(self).__name__} has been trained with seed={seed}, whose noise repeats"
            fix = f"use fit(ckpt_path=...), or load_from_checkpoint(path, seed={seed + 1}) to begin"
            raise ValueError(f"{told}: {fix}")
        super().on_fit_start()
        if self.teacher is None:
            return
        data: Any = getattr(self.trainer, "datamodule", None)
        rows: list[Any] = []
        if isinstance(data, PromptDataModule):
            rows = [row for split in ("train", "validation") for row in data.rows(split)]
            if self.teacher.prompt is not None and data.over_long == "truncate_left":
                told = "over_long=truncate_left cuts those of the policy: use over_long=drop"
                raise ValueError(f"teacher_prompt takes whole prompts, and {told}")
        columns = (row.columns for row in rows)
        self.teacher.check(columns, temperature=self.controls.temperature)

    def take(self, built: PolicyModels) -> None:
        """Take the models, and those of the scorer; shard each if ranks share them.

        Frozen models stay out of the module tree: not in checkpoints, not in `parameters()`, never
        in train mode.
        """
        frozen = (*built.frozen, *(self.scorer.build(built.base) or ()))
        self.score_clip = score_clip_of(self.algorithm.score_clip, self.scorer)
        self.policy, self.trained_roots = built.policy, built.trained
        self.step_0.same_source = built.same_source
        object.__setattr__(self, "reference", built.reference)
        if built.teacher is not None:
            self.teacher = ModelTeacher(built.teacher, self.teacher_prompt)
        object.__setattr__(self, "frozen_models", frozen)
        for model in built.trained:
            place_on_ranks(model)
        for model in frozen:
            place_on_ranks(model, frozen=True)

    @property
    def roots(self) -> Sequence[nn.Module]:
        """Models that the module itself moves to the device."""
        return [*self.trained_roots, *self.frozen_models]

    @property
    def num_steps(self) -> int:
        """Optimizer steps of an iteration, at most."""
        return self.algorithm.num_passes * self.algorithm.num_minibatches

    @property
    def learning_rate_factor(self) -> float:
        """Factor on the learning rates of the schedule."""
        return self.controls.learning_rate_factor

    def stateful(self) -> dict[str, Stateful]:
        """Return what changes during a run and is no parameter, by its name in a checkpoint."""
        found: dict[str, Stateful] = {"controls": self.controls, **super().stateful()}
        return found | ({"pending": self.pending} if self.algorithm.rollout_lag else {})

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the state back; the ratio of the next step need not be 1."""
        super().on_load_checkpoint(checkpoint)
        self.step_0.resumed()
        self.trained_seed = (checkpoint.get(HYPER_PARAMETERS) or {}).get("seed", self.trained_seed)

    @classmethod
    @checked(but=("reward",))
    def load_from_checkpoint(  # type: ignore[override]
        cls, checkpoint_path: PathOrName, reward: Any = None, **changes: Any
    ) -> Self:
        """Return a module with the weights of a checkpoint, on the CPU, in eval mode.

        Args:
            checkpoint_path: a checkpoint of a module that `from_pretrained` built.
            reward: as there; needed where it was a function or a scorer.
            changes: other arguments of `from_pretrained` that are to differ.

        Raises:
            ValueError: if the checkpoint holds no hyper-parameters, or no reward is known.
        """
        changes |= {} if reward is None else {"reward": reward}
        return cls._restored(checkpoint_path, changes)

    @classmethod
    def check_kept(
        cls, path: PathOrName, given: Mapping[str, Any], changes: Mapping[str, Any]
    ) -> None:
        """Check that a reward is known, and that no checkpoint names code or a server."""
        teacher = given.get("teacher")
        if is_address(teacher) and "teacher" not in changes:
            told = f"{path} was trained with the teacher {teacher}, and no checkpoint"
            raise ValueError(f"{told} calls a server: give load_from_checkpoint(path, teacher=...)")
        check_reward(path, given.get("reward"), is_given="reward" in changes)
        named = set(OBJECTS) - changes.keys()
        check_objects(path, {key: given.get(key) for key in sorted(named)})


def _estimator(given: AdvantageEstimator | str | None) -> AdvantageEstimator | None:
    """Return the estimator that was given, or that `path.py:Class` names."""
    if not isinstance(given, str):
        return given
    made = load_function(given, "estimator")()
    return fitting(f"{given}()", made, AdvantageEstimator)  # type: ignore[no-any-return]


def _in_words(options: Mapping[str, Any]) -> dict[str, str | None]:
    """Return what a checkpoint says of objects, which have to be given again, and of a teacher."""
    objects = {key: repr(it) for key in OBJECTS if (it := options[key]) is not None}
    return objects | {key: None if (it := options[key]) is None else str(it) for key in TEACHING}


def _teacher(
    cls: type, start: Start, hparams: Mapping[str, Any]
) -> tuple[Source | None, dict[str, Any]]:
    """Return the source of a teacher that is loaded here, and what else a module needs of one.

    Raises:
        ValueError: if its tokenizer is another one, a weight or a prompt of it is set without one,
            or a server cannot give what is learnt.
    """
    teacher, template = (start.options[key] for key in TEACHING)
    if teacher is None:
        owners: list[Any] = [own for own in hparams.values() if hasattr(own, "teacher_coef")]
        changed = any(own.teacher_coef != type(own)().teacher_coef for own in owners)
        if template is not None or changed:
            name = "teacher_coef" if template is None else "teacher_prompt"
            told = f"{name} is given, and {cls.__name__} has no teacher"
            raise ValueError(f"{told}: give teacher=FOLDER (artifacts.teacher), or leave it out")
        return None, {}
    prompt = None if template is None else TeacherPrompt(template, start.tokenizer)
    if is_address(teacher):
        whole = any(getattr(own, "learns_distributions", False) for own in hparams.values())
        if whole or hparams["sampling"].temperature != 1.0:
            told = f"teacher={teacher} gives log-probabilities of given tokens at temperature 1"
            fix = "use divergence=sampled and sampling.temperature=1, or a teacher in this process"
            raise ValueError(f"{told}: {fix}")
        return None, {"teacher": ServerTeacher(str(teacher), start.tokenizer, prompt)}
    fix = "take a teacher of the policy's family, or train on its texts (SFT)"
    start.check_tokenizer("teacher", teacher, fix=fix)
    with naming_argument("teacher", teacher):
        return Source.of(teacher, "teacher"), {"teacher_prompt": prompt}
