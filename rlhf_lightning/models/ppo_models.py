"""Policy, reference and value model: as siblings, or as adapters on one base."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Unpack

from torch import nn

from rlhf_lightning.hparams import LoraHparams
from rlhf_lightning.models.adapter_files import load_policy_adapter, load_scalar_adapter
from rlhf_lightning.models.building import place_on_ranks
from rlhf_lightning.models.factory import (
    ModelOptions,
    frozen,
    load_base,
    load_policy,
    load_scalar_model,
)
from rlhf_lightning.models.heads import PolicyModel, ScalarHeadModel
from rlhf_lightning.models.lora import AdaptedBase, AdaptedPolicy, add_policy, add_scalar_model
from rlhf_lightning.models.precision import round_frozen_weights

ADAPTER = "adapter"  # the folder of the adapter alone, inside an artifact


@dataclass(frozen=True, kw_only=True)
class PolicyModels:
    """The policy that is trained, and the reference; the scorer brings the reward model.

    A teacher must know every id that the policy may sample: its logits may have more columns than
    the policy's, and not fewer, or it is a `ValueError`.

    Args:
        policy: the policy, which is trained.
        reference: the frozen reference: what the policy was before its first round.
        base: what policy and reference share, if they do.
        teacher: a frozen model to learn from, if there is one.
        same_source: whether the policy starts as the reference is: their KL is then 0.
    """

    policy: PolicyModel
    reference: PolicyModel
    base: AdaptedBase | None = None
    teacher: PolicyModel | None = None
    same_source: bool = True

    def __post_init__(self) -> None:
        """Check that the teacher knows the ids of the policy."""
        if self.teacher is None:
            return
        columns, known = (int(m.model.config.vocab_size) for m in (self.policy, self.teacher))
        if known < columns:
            found = f"teacher: its logits have {known} columns and the policy's {columns}"
            raise ValueError(f"{found}: take one with as many or more")

    @property
    def trained(self) -> tuple[nn.Module, ...]:
        """Roots that hold trained parameters, each placed and sharded as a whole."""
        return (self.policy,) if self.base is None else (self.base,)

    @property
    def frozen(self) -> tuple[nn.Module, ...]:
        """Roots without trained parameters."""
        teacher = () if self.teacher is None else (self.teacher,)
        return (self.reference, *teacher) if self.base is None else teacher


@dataclass(frozen=True, kw_only=True)
class PPOModels(PolicyModels):
    """The models that PPO trains, and the reference.

    Args:
        value: trained; on the same base as the policy, if that has one.
    """

    value: ScalarHeadModel

    @property
    def trained(self) -> tuple[nn.Module, ...]:
        """Roots that hold trained parameters, each placed and sharded as a whole."""
        return (self.policy, self.value) if self.base is None else (self.base,)


def policy_models(
    policy: str | Path,
    *,
    start: str | Path | None = None,
    teacher: str | Path | None = None,
    lora: LoraHparams | None = None,
    precision: str = "32-true",
    seed: int = 0,
    **options: Unpack[ModelOptions],
) -> PolicyModels:
    """Return policy and reference, without a value model.

    Args:
        policy: folder or hub name of the SFT policy, which policy and reference start from.
        start: folder of a policy that was trained before, to continue from; the reference stays
            `policy`. With LoRA it is the `adapter` folder of one trained on that same `policy`.
        teacher: folder or hub name of a model to learn from, which stays frozen.
        lora: None trains whole models; otherwise adapters on one frozen base, which with its
            adapters off is the reference.
        precision: the Trainer's; under `bf16-mixed` frozen matrices are held in bf16.
        seed: seeds new adapters.
        **options: see `ModelOptions`; `revision` is that of `policy`.
    """

    def load(source: str | Path, **how: Any) -> PolicyModel:
        # The revision is that of `policy`; what was trained from it is a folder.
        own = options.get("revision") if str(source) == str(policy) else None
        trusts = options.get("trust_remote_code", False)
        return load_policy(source, revision=own, trust_remote_code=trusts, **how)

    def load_frozen(source: str | Path) -> PolicyModel:
        model = frozen(load(source))
        round_frozen_weights(model.model, precision)
        place_on_ranks(model, frozen=True)
        return model

    if lora is not None:
        base = load_base(policy, lora, **options)
        return PolicyModels(
            policy=_policy_on(base, start, seed=seed),
            reference=frozen(AdaptedPolicy(base, None)),
            base=base,
            teacher=None if teacher is None else load_frozen(teacher),
            same_source=start is None,
        )
    reference = load_frozen(policy)
    again = options.get("activation_checkpointing", False)
    return PolicyModels(
        policy=place_on_ranks(load(start or policy, activation_checkpointing=again)),
        reference=reference,
        teacher=None if teacher is None else load_frozen(teacher),
        same_source=start is None,
    )


def ppo_models(
    policy: str | Path,
    value: str | Path | None,
    *,
    value_head: Literal["stored", "zero"] = "stored",
    seed: int = 0,
    **options: Any,
) -> PPOModels:
    """Return policy, value model and reference.

    Args:
        policy: folder or hub name of the SFT policy, which policy and reference start from.
        value: folder or hub name that the value model starts from: a reward model, with
            `value_head="stored"`, or a causal LM. Adapters start from the `adapter` folder of a
            reward model trained with LoRA on the same policy.
        value_head: "stored", or "zero" for values that start at 0.
        seed: seeds new adapters.
        **options: those of `policy_models`; with `trust_remote_code` a `value` that is another hub
            name is refused, as it has no commit.

    Raises:
        ValueError: if there is nothing to start the value model from.
    """
    if value is None and value_head == "stored":
        fix = "start it from the policy with module.value_head=zero"
        raise ValueError(f"no reward model (artifacts.reward) for the value model: {fix}")
    found = policy_models(policy, seed=seed, **options)
    zero = value is None or value_head == "zero"
    values: ScalarHeadModel
    if found.base is not None and zero:
        values = add_scalar_model(found.base, "value", init_std=0.0, seed=seed)
    elif found.base is not None:
        values = load_scalar_adapter(found.base, Path(str(value)) / ADAPTER, "value")
    else:
        source = policy if value is None else value
        own = ["activation_checkpointing", "trust_remote_code"]
        own += ["revision"] if str(source) == str(policy) else []
        given = {name: options[name] for name in own if name in options}
        values = place_on_ranks(load_scalar_model(source, head=value_head, **given))
    return PPOModels(**vars(found), value=values)


def freeze_but(model: nn.Module, patterns: Sequence[str] | None) -> None:
    """Freeze the parameters of a value model whose names no pattern matches, in place.

    Args:
        model: a model, or the view of an adapter.
        patterns: patterns of names, as `fnmatch` reads them ("*mlp*"); None freezes nothing.

    Raises:
        ValueError: if a pattern matches no trained parameter.
    """
    if patterns is None:
        return
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for pattern in patterns:
        if not fnmatch.filter(trained, pattern):
            like = ", ".join(list(trained)[:3])
            raise ValueError(
                f"value_trainable={pattern!r} matches no parameter of those like {like}"
            )
    for name, parameter in trained.items():
        parameter.requires_grad_(any(fnmatch.fnmatchcase(name, one) for one in patterns))


def _policy_on(base: AdaptedBase, start: str | Path | None, *, seed: int) -> AdaptedPolicy:
    if start is None:
        return add_policy(base, "policy", seed=seed)
    return load_policy_adapter(base, Path(start) / ADAPTER, "policy")
