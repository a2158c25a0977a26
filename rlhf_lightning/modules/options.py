"""Parts, which `__init__` of a module takes, and options, which `from_pretrained` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NotRequired, TypedDict

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.arguments import (
    FLOATING,
    ChatTemplate,
    CodeName,
    Default,
    Line,
    PathOrName,
    RunsCode,
    Seed,
)
from rlhf_lightning.functional.surrogates import Surrogate
from rlhf_lightning.hparams import LoraHparams, SamplingHparams
from rlhf_lightning.modules.optimization import Optimizer, Schedule
from rlhf_lightning.rollout.estimators import AdvantageEstimator
from rlhf_lightning.rollout.generators.base import Generator
from rlhf_lightning.rollout.scorers.base import Scorer
from rlhf_lightning.rollout.teachers import Teacher, TeacherPrompt


class ModuleParts(TypedDict):
    """Parts of every module, except its hyper-parameters and the builder of its models.

    Attributes:
        optimizer: parameter groups -> optimizer (AdamW with everything but the learning rates).
        schedule: factor on the learning rates over iterations.
        fingerprint: of the model's source; a checkpoint resumes only from the same one.
        compute_dtype: of sharded forwards; None computes in the parameters' dtype.
    """

    optimizer: Optimizer
    schedule: Schedule
    fingerprint: NotRequired[Annotated[str, Default("")]]
    compute_dtype: NotRequired[Annotated[torch.dtype, FLOATING] | None]


class ModuleOptions(TypedDict, total=False):
    """Options of every `from_pretrained`; an option that is left out is None, 1 or False.

    Attributes:
        lora: train adapters on one frozen base instead of whole models.
        schedule: of the learning rates; linear to 0 by default.
        optimizer: parameter groups, which hold the learning rates -> optimizer; AdamW by default.
        generator: stop ids and pad id -> what continues prompts, in rollouts, in `generate` and in
            comparisons: a class or a `functools.partial` of one; `CapturedGenerator` by default.
        seed: seeds new weights, the order of the data, and of rollouts the sampling noise.
        activation_checkpointing: compute decoder layers again in the backward pass.
        chat_template: file of a template, or the name of one of ours, in place of the model's;
            exported with it.
        chat_template_arguments: variables that the template reads, such as `enable_thinking`, or
            `date_string` of one that writes the date; they become part of it.
        revision: branch, tag or commit of a hub name.
        trust_remote_code: run the code beside the weights.
    """

    lora: LoraHparams | None
    schedule: Schedule | None
    optimizer: Optimizer | None
    generator: Callable[[Sequence[int], int], Generator] | None
    seed: Annotated[Seed, Default(1)]
    activation_checkpointing: Annotated[bool, Default(False)]
    chat_template: ChatTemplate | None
    chat_template_arguments: Mapping[str, Any] | None
    revision: Line | None
    trust_remote_code: Annotated[RunsCode, Default(False)]


class OnPolicyParts(ModuleParts):
    """Parts of a module that learns from its responses.

    Attributes:
        sampling: settings of the rollouts.
        scorer: scores responses; its models are frozen.
        generator: generates the responses.
        tokenizer: turns responses into text.
        seed: seeds sampling noise and minibatch order.
        surrogate: the loss of the policy; None for that of the hyper-parameters.
        estimator: estimator of advantages; None for the module's default.
        teacher: a teacher that is no model of this process; None without one.
        teacher_prompt: what a teacher of `models` reads in place of the prompts.
    """

    sampling: SamplingHparams
    scorer: Scorer
    generator: Generator
    tokenizer: PreTrainedTokenizerBase
    seed: Seed
    surrogate: NotRequired[Surrogate | None]
    estimator: NotRequired[AdvantageEstimator | None]
    teacher: NotRequired[Teacher | None]
    teacher_prompt: NotRequired[TeacherPrompt | None]


class OnPolicyOptions(ModuleOptions, total=False):
    """Further options of `from_pretrained` of such a module.

    Attributes:
        start: folder or hub name of a policy to continue from; the reference stays `policy`. With
            `lora` its `adapter` folder is used, which must be trained on `policy`.
        teacher: folder or hub name of a model with the policy's tokenizer, to learn from, which
            stays frozen; or the address of a server of vLLM that has one (`http://HOST:PORT`). Its
            weight is `teacher_coef` of the hyper-parameters.
        teacher_prompt: what the teacher reads in place of the prompt, with columns in braces, such
            as "{prompt} It is {answer}."; see `TeacherPrompt`. None: the policy's prompt.
        reward_weights: one weight per reward of a list; 1 by default.
        sampling: settings of the rollouts; the defaults of `SamplingHparams`.
        surrogate: the loss of the policy; None for that of the hyper-parameters.
        estimator: estimator of advantages, or `path.py:Class` of one that takes no arguments; None
            for the module's default.
    """

    start: PathOrName | None
    teacher: PathOrName | None
    teacher_prompt: str | None
    reward_weights: Sequence[float] | None
    sampling: SamplingHparams | None
    surrogate: Surrogate | None
    estimator: AdvantageEstimator | CodeName | None
