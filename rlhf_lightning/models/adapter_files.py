"""Adapters on disk, in PEFT's format, and adapters merged into their base's weights.

A folder holds `adapter_config.json` and `adapter_model.safetensors`, as PEFT writes and reads them,
and `rlhf_lightning.json` with what PEFT has no place for: the kind of model, the reward's offset
and which base it was trained on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from peft import LoraConfig, PeftConfig
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from rlhf_lightning.hparams import LoraHparams
from rlhf_lightning.models.heads import PolicyModel, ScalarHeadModel, scalar_head
from rlhf_lightning.models.loading import check_artifact
from rlhf_lightning.models.lora import AdaptedBase, AdaptedPolicy, AdaptedScalarModel
from rlhf_lightning.runs.atomic import follow_umask
from rlhf_lightning.runs.manifest import ADAPTER_CONFIG

CONFIG, WEIGHTS, EXTRA = ADAPTER_CONFIG, "adapter_model.safetensors", "rlhf_lightning.json"
_PREFIX = "base_model.model."
_SCORE = f"{_PREFIX}score.weight"
_OTHER_SCALES = (
    *("use_rslora", "use_dora", "alpha_pattern", "rank_pattern"),
    "alora_invocation_tokens",  # applied from there on
)
# Names under which PEFT looks for the experts of a mixture, whatever stands before them.
_PEFTS_EXPERTS = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
# Of PEFT's ways to draw an adapter those that leave the base as it was.
_DRAWN_BESIDE_THE_BASE = (True, False, None, "gaussian", "eva", "orthogonal")


ModelT = TypeVar("ModelT", AdaptedPolicy, AdaptedScalarModel)


@dataclass(frozen=True)
class AdapterFiles:
    """The content of an adapter folder.

    Args:
        lora: rank, scale and targets.
        tensors: `{module path}.lora_A.weight` and `.lora_B.weight`, and `score.weight`.
        is_scalar: whether it is a value or reward model; else a policy.
        reward_offset: constant that is added to the head's output.
        reward_normalized: whether scores have mean 0 and standard deviation 1.
        base: name or folder of the base.
        base_fingerprint: fingerprint of the base's weights; "" where it is not known.
    """

    lora: LoraHparams
    tensors: Mapping[str, Tensor]
    is_scalar: bool
    reward_offset: float
    reward_normalized: bool
    base: str
    base_fingerprint: str


def save_adapter(
    model: AdaptedPolicy | AdaptedScalarModel,
    folder: Path,
    state: Mapping[str, Tensor],
    *,
    base: str,
    base_fingerprint: str,
    base_revision: str | None = None,
) -> None:
    """Write one adapter (and head) as a folder that PEFT loads onto the base.

    Args:
        model: model whose adapter is written.
        folder: target folder, created if missing.
        state: full state dict of `model`.
        base: name or folder of the base, for PEFT.
        base_fingerprint: fingerprint of the base's weights.
        base_revision: branch, tag or commit of a hub name, for PEFT.
    """
    lora = model.base.adapters[str(model.name)]
    is_scalar = isinstance(model, AdaptedScalarModel)
    names, parameters = _names(model.base)
    folder.mkdir(parents=True, exist_ok=True)
    LoraConfig(
        task_type="SEQ_CLS" if is_scalar else "CAUSAL_LM",
        base_model_name_or_path=base,
        revision=base_revision,
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=0.0 if parameters else lora.dropout,  # a parameter can have none in PEFT
        target_modules=names,
        target_parameters=parameters or None,
        modules_to_save=["score"] if is_scalar else None,
        fan_in_fan_out=any(isinstance(m, Conv1D) for m in model.base.model.modules()),
        inference_mode=True,
    ).save_pretrained(str(folder))
    tensors = {
        f"{_PREFIX}{path}.{part}.weight": value.contiguous()
        for (path, part), value in _by_module(state).items()
    }
    if is_scalar:
        tensors[_SCORE] = state["head.weight"].contiguous()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    follow_umask(folder / WEIGHTS)
    extra = {
        "kind": "scalar" if is_scalar else "policy",
        "reward_offset": float(state["head.bias"]) if is_scalar else 0.0,
        "reward_normalized": is_scalar and model.normalized,
        "base": base,
        "base_fingerprint": base_fingerprint,
    }
    (folder / EXTRA).write_text(json.dumps(extra, indent=2) + "\n", encoding="utf-8")


def _names(base: AdaptedBase) -> tuple[list[str], list[str]]:
    """Return the names by which PEFT finds modules and parameters that have an adapter."""
    names, parameters = set(), []
    paths = (path for path, _ in base.model.named_modules() if path not in base.targets)
    others = {path.rpartition(".")[2] for path in paths}
    for path in base.targets:
        name = path.rpartition(".")[2]
        if base.experts and name in _PEFTS_EXPERTS:
            parameters.append(f"{path}.weight")
        else:
            names.add(path if name in others else name)
    return sorted(names), parameters


def read_adapter(folder: Path) -> AdapterFiles:
    """Return the content of an adapter folder.

    Raises:
        FileNotFoundError: if there is no adapter; the message says how to make one.
        ValueError: if a file of it is damaged, if it is not scaled by alpha / r everywhere, if it
            changed its base, or if it holds more than low-rank matrices and a reward head.
        ManifestError: if the artifact that it is in is not what its manifest says.
    """
    check_artifact(folder.parent)
    if missing := [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]:
        raise FileNotFoundError(f"{folder} has no {missing[0]}: train an adapter with lora=lora")
    file = folder / EXTRA
    try:
        config: Any = PeftConfig.from_pretrained(str(folder))
        extra = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        tensors = {k.removeprefix(_PREFIX): v for k, v in load_file(folder / WEIGHTS).items()}
        offset = float(extra.get("reward_offset", 0.0))
    except Exception as error:
        raise ValueError(f"adapter folder {folder} is damaged: {error!r}") from error
    if problem := _problem(config, tensors):
        fix = "merge it with PEFT (merge_and_unload), and use the whole model"
        raise ValueError(f"the adapter in {folder} {problem}, not alpha / r * B A alone: {fix}")
    targets = config.target_modules or config.target_parameters
    names = targets if isinstance(targets, str) else ",".join(sorted(targets))
    return AdapterFiles(
        lora=LoraHparams(r=config.r, alpha=config.lora_alpha, target_modules=names),
        tensors=tensors,
        is_scalar="score.weight" in tensors,
        reward_offset=offset,
        reward_normalized=bool(extra.get("reward_normalized", extra)),  # older ones do not say
        base=str(extra.get("base", config.base_model_name_or_path or "")),
        base_fingerprint=str(extra.get("base_fingerprint", "")),
    )


def _problem(config: Any, tensors: Mapping[str, Tensor]) -> str | None:
    """Return what the formula alpha / r * B A on the base does not say of an adapter."""
    if not isinstance(config, LoraConfig):
        return f"is of the kind {config.peft_type.value}"
    if scales := [key for key in _OTHER_SCALES if getattr(config, key, None)]:
        return f"sets {', '.join(scales)}"
    if (drawn := config.init_lora_weights) not in _DRAWN_BESIDE_THE_BASE:
        return f"has init_lora_weights={drawn!r}"
    halves = (".lora_A.weight", ".lora_B.weight")
    others = [name for name in tensors if not name.endswith(halves) and name != "score.weight"]
    of_parameters = [p for p in config.target_parameters or () if not p.endswith(".weight")]
    return f"holds {(others + of_parameters)[0]}" if others + of_parameters else None


def check_same_scale(files: AdapterFiles, lora: LoraHparams, folder: Path) -> None:
    """Check that an adapter to continue from has the rank and the alpha that the run asks for.

    Raises:
        ValueError: if it has others.
    """
    if (files.lora.r, files.lora.alpha) != (lora.r, lora.alpha):
        asked = f"lora.r={lora.r} lora.alpha={lora.alpha} are not those of {folder}"
        own = f"lora.r={files.lora.r} lora.alpha={files.lora.alpha}"
        raise ValueError(f"{asked}: use {own}, or lora=none")


def load_scalar_adapter(base: AdaptedBase, folder: Path, name: str) -> AdaptedScalarModel:
    """Put a stored value or reward model onto `base`, as adapter and head `name`.

    Raises:
        ValueError: if it is no such model, or if it does not fit the base.
    """
    files = read_adapter(folder)
    if not files.is_scalar:
        raise ValueError(f"the adapter in {folder} lacks score.weight, a reward head")
    base.add_adapter(name, seed=0, lora=files.lora)
    base.heads[name] = scalar_head(base.hidden_size, init_std=0.0)
    model = AdaptedScalarModel(base, name)
    model.normalized = files.reward_normalized
    return _filled(model, files, folder)


def load_policy_adapter(base: AdaptedBase, folder: Path, name: str) -> AdaptedPolicy:
    """Put a stored policy onto `base`, as adapter `name`, to continue training it.

    Raises:
        ValueError: if it is no policy, if it does not fit the base, or if it has another rank or
            alpha than the base's new adapters.
    """
    files = read_adapter(folder)
    if files.is_scalar:
        raise ValueError(f"{folder} is the adapter of a reward model: give that of a policy")
    check_same_scale(files, base.lora, folder)
    base.add_adapter(name, seed=0, lora=files.lora)
    return _filled(AdaptedPolicy(base, name), files, folder)


@torch.no_grad()
def _filled(model: ModelT, files: AdapterFiles, folder: Path) -> ModelT:
    state: dict[str, Tensor] = {}
    for path, value in files.tensors.items():  # {module path}.lora_A.weight
        if path == "score.weight":
            state |= {"head.weight": value, "head.bias": torch.tensor([files.reward_offset])}
            continue
        module, half, _ = path.rsplit(".", 2)
        state[f"adapter.{module.replace('.', '/')}/{half}.weight"] = value
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        why = " ".join(str(error).split()[6:])[:300]
        told = f"the adapter in {folder} (trained on {files.base}) does not fit the base"
        raise ValueError(f"{told}: {why}") from error
    return model


@torch.no_grad()
def merge_adapter(
    model: AdaptedPolicy | AdaptedScalarModel, state: Mapping[str, Tensor], into: PolicyModel
) -> PolicyModel | ScalarHeadModel:
    """Add an adapter to the weights of a full copy of its base, in place.

    Args:
        model: whose adapter it is.
        state: full state dict of `model`.
        into: the base, in full precision, without adapters.

    Returns:
        `into`, or a reward model made of its decoder.
    """
    lora = model.base.adapters[str(model.name)]
    halves = _by_module(state)
    for path in {path for path, _ in halves}:
        delta = (halves[path, "lora_B"] @ halves[path, "lora_A"]) * (lora.alpha / lora.r)
        layer: Any = into.model.get_submodule(path)
        delta = delta.T if isinstance(layer, Conv1D) else delta
        layer.weight.add_(delta.to(layer.weight))
    if isinstance(model, AdaptedPolicy):
        return into
    head = scalar_head(model.base.hidden_size, init_std=0.0)
    head.load_state_dict({"weight": state["head.weight"], "bias": state["head.bias"]})
    merged = ScalarHeadModel(into.model.base_model, head)  # type: ignore[arg-type]
    merged.normalized = model.normalized
    return merged


def _by_module(state: Mapping[str, Tensor]) -> dict[tuple[str, str], Tensor]:
    """Return `(module path, "lora_A" or "lora_B") -> tensor` of a view's state dict."""
    found = {}
    for key, value in state.items():
        if key.startswith("adapter."):
            path, _, part = key.removeprefix("adapter.").removesuffix(".weight").rpartition("/")
            found[path.replace("/", "."), part] = value
    return found
