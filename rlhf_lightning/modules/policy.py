"""A module that trains a policy on its own responses: its parts, its models, its checkpoints.

What it does with them is in `modules.on_policy`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar, Self, Unpack

from torch import nn
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.arguments import PathOrName, checked
from rlhf_lightning.batches import PromptBatch
from rlhf_lightning.data.datamodules import PromptDataModule
from rlhf_lightning.functional.surrogates import SURROGATES, Surrogate
from rlhf_lightning.hparams import OnPolicyHparams, SamplingHparams
from rlhf_lightning.models.building import place_on_ranks
from rlhf_lightning.models.heads import PolicyModel, ScalarHeadModel
from rlhf_lightning.models.ppo_models import PolicyModels
from rlhf_lightning.modules.base import RLHFModule
from rlhf_lightning.modules.checkpoint_state import Stateful
from rlhf_lightning.modules.controls import Controls
from rlhf_lightning.modules.options import ModuleParts
from rlhf_lightning.modules.rewards import check_objects, check_reward, score_clip_of
from rlhf_lightning.modules.step_0 import Step0
from rlhf_lightning.rollout.estimators import AdvantageEstimator
from rlhf_lightning.rollout.generators.base import Generator
from rlhf_lightning.rollout.noise import RowNoise
from rlhf_lightning.rollout.pending import PendingGeneration
from rlhf_lightning.rollout.scorers.base import Scorer
from rlhf_lightning.rollout.scorers.hparams import is_address
from rlhf_lightning.rollout.teachers import ModelTeacher, Teacher, TeacherPrompt


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
            raise ValueError(
                f"{type(algorithm).__name__}.overlong_buffer={buffer} must be at most "
                f"SamplingHparams.max_new_tokens={longest}: use about a fifth of it"
            )
        self.teacher, self.teacher_prompt = teacher, teacher_prompt
        made = SURROGATES[algorithm.surrogate]
        named = {item.name: getattr(algorithm, item.name) for item in fields(made)}
        self.surrogate: Surrogate = surrogate or made(**named)
        self.estimator = estimator or default_estimator
        self.sampling = sampling
        self.scorer = scorer
        self.generator: Generator = generator
        self.tokenizer = tokenizer
        self.noise = RowNoise(seed, "rollout")
        self.order = RowNoise(seed, "minibatches")
        self.controls = Controls.from_hparams(algorithm, sampling, f"module.{self.stage}")
        self.said_clipped = False
        self.step_0 = Step0()
        self.pending = PendingGeneration()
        self.policy = None
        self.value = None

    def on_fit_start(self) -> None:
        """Check the Trainer and the data, and that a teacher can be asked about them.

        Raises:
            ValueError: also if a teacher's prompt is made of prompts that the policy sees cut.
        """
        super().on_fit_start()
        if self.teacher is None:
            return
        data: Any = getattr(self.trainer, "datamodule", None)
        rows: list[Any] = []
        if isinstance(data, PromptDataModule):
            rows = [row for split in ("train", "validation") for row in data.rows(split)]
            if self.teacher.prompt is not None and data.over_long == "truncate_left":
                raise ValueError(
                    "teacher_prompt is made of whole prompts, and over_long=truncate_left cuts "
                    "those of the policy: use over_long=drop"
                )
        columns = (row.columns for row in rows)
        self.teacher.check(columns, temperature=self.controls.temperature)

    def take(self, built: PolicyModels) -> None:
        """Take the models, and those of the scorer; shard each if ranks share them.

        Frozen models stay out of the module tree: not in checkpoints, not in `parameters()`, never
        in train mode.
        """
        frozen = (*built.frozen, *self.scorer.build(built.base))
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
            raise ValueError(
                f"{path} was trained with the teacher {teacher}, and no checkpoint sends anything "
                "to a server: give load_from_checkpoint(path, teacher=...)"
            )
        check_reward(path, given.get("reward"), is_given="reward" in changes)
        named = {"surrogate", "estimator"} - changes.keys()
        check_objects(path, {key: given.get(key) for key in sorted(named)})
