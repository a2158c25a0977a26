"""A checkpoint that lacks a tensor is refused by name: nothing is drawn at random in its place."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf_lightning.hparams import LoraHparams
from rlhf_lightning.models.adapter_files import save_adapter
from rlhf_lightning.models.classifiers import load_classifier
from rlhf_lightning.models.export import export_scalar_model
from rlhf_lightning.models.factory import load_base, load_policy, load_scalar_model
from rlhf_lightning.models.lora import add_policy
from rlhf_lightning.models.ppo_models import ADAPTER, ppo_models
from rlhf_lightning.runs.manifest import ManifestError, write_manifest
from tests.builders.models import PAD, tiny_policy, tiny_scalar_model
from tests.models.test_architectures import hub_model

Tensors = dict[str, Tensor]
LORA = LoraHparams(r=4, alpha=8)


def change(folder: Path, edit: Callable[[Tensors], Tensors], file: str = "model") -> None:
    path = folder / f"{file}.safetensors"
    save_file(edit(load_file(path)), path, metadata={"format": "pt"})


def without(tensors: Tensors, name: str) -> Tensors:
    return {key: value for key, value in tensors.items() if key != name}


def renamed(tensors: Tensors) -> Tensors:
    return {f"other.{name}": value for name, value in tensors.items()}


def narrower(tensors: Tensors, name: str) -> Tensors:
    return tensors | {name: tensors[name][:-1].clone()}


def a_matrix(folder: Path) -> str:
    tensors = load_file(folder / "model.safetensors")
    return next(name for name, t in sorted(tensors.items()) if t.ndim == 2 and ".0." in name)


def warnings_of_ours(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return ours: transformers has a table of its own, which commands silence."""
    return [record for record in caplog.records if record.name.startswith("rlhf_lightning")]


KINDS: dict[str, Callable[[Path], Any]] = {
    "policy": load_policy,
    "base of adapters": lambda folder: load_base(folder, LORA),
    "value": lambda folder: load_scalar_model(folder, head="zero"),
    "new reward": lambda folder: load_scalar_model(folder, head="reward"),
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, "policy") for name in ("gpt2", "gemma3_text", "llama")]
    + [("opt_projected", kind) for kind in KINDS if kind != "policy"],
)
def test_a_missing_renamed_or_wrong_tensor_is_refused_by_name(tmp_path, name, kind):
    load, whole = KINDS[kind], hub_model(tmp_path / "whole", name)
    load(whole)
    victim = a_matrix(whole)
    for damage, message in (
        (lambda t: without(t, victim), rf"cannot load .*: its weights lack {victim}, .*random"),
        (renamed, r"weights lack .* \(it holds other\.\S+, .* more\)"),
        (lambda t: narrower(t, victim), rf"cannot load .*: {victim} is \[\d+, \d+\] and not \["),
    ):
        folder = Path(shutil.copytree(whole, tmp_path / "damaged"))
        change(folder, damage)
        with pytest.raises(ValueError, match=message) as caught:
            load(folder)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 700
        shutil.rmtree(folder)


def test_an_output_head_that_is_not_tied_may_not_be_missing_but_a_value_model_has_no_use_for_it(
    tmp_path,
):
    folder = hub_model(tmp_path, "llama")
    change(folder, lambda t: without(t, "lm_head.weight"))
    with pytest.raises(ValueError, match=r"weights lack lm_head\.weight"):
        load_policy(folder)
    load_scalar_model(folder, head="zero")


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "opt", "llama"])
def test_tensors_that_a_foreign_model_has_no_place_for_are_named_and_nothing_else_is(
    tmp_path, name, caplog
):
    folder = hub_model(tmp_path / name, name)
    with caplog.at_level(logging.WARNING, "rlhf_lightning"):
        expected = load_policy(folder).state_dict()
    assert not warnings_of_ours(caplog)
    extra = {"v_head.summary.weight": torch.zeros(1, 32), "h.0.attn.masked_bias": torch.zeros(1)}
    change(folder, lambda t: t | extra)
    with caplog.at_level(logging.WARNING, "rlhf_lightning"):
        got = [load_policy(folder).state_dict() for _ in range(2)]
    (record,) = warnings_of_ours(caplog)  # once, though policy and reference share the source
    assert all(word in record.getMessage() for word in (*extra, str(folder)))
    for state in got:
        assert all(torch.equal(state[key], value) for key, value in expected.items())


@pytest.fixture
def reward(tmp_path: Path) -> Path:
    model = tiny_scalar_model("llama", bias=0.3)
    export_scalar_model(model, tmp_path / "reward", model.state_dict(), pad_token_id=PAD)
    return tmp_path / "reward"


@pytest.mark.parametrize("load", [load_scalar_model, load_classifier])
def test_a_stored_reward_model_is_whole(reward, load):
    load(reward)
    whole = load_file(reward / "model.safetensors")
    victim = "model.layers.1.mlp.up_proj.weight"
    for damage, message in (
        (lambda t: without(t, victim), rf"cannot load .* lack {victim}"),
        (lambda t: without(t, "score.weight"), r"stores no (reward head \(missing \[')?score\.wei"),
        (renamed, r"weights lack .*|stores no .*"),
        (lambda t: narrower(t, victim), rf"{victim} is \[63, 32\] and not \[64, 32\]"),
        (lambda t: t | {"score.weight": torch.zeros(2, 32)}, r"score\.weight is \[2, 32\] and"),
    ):
        change(reward, lambda _, damage=damage: damage(whole))
        with pytest.raises(ValueError, match=message):
            load(reward)


@pytest.fixture
def adapted(tmp_path: Path) -> tuple[Path, Path]:
    """A base, and an artefact with the adapters of a policy and of a reward model."""
    tiny_policy("llama").model.save_pretrained(tmp_path / "base")
    policy = add_policy(load_base(tmp_path / "base", LORA), "policy", seed=0)
    reward = load_scalar_model(tmp_path / "base", head="reward", lora=LORA)
    for name, model in (("sft", policy), ("reward", reward)):
        folder = Path(shutil.copytree(tmp_path / "base", tmp_path / name))
        save_adapter(model, folder / ADAPTER, model.state_dict(), base="b", base_fingerprint="")
    return tmp_path / "base", tmp_path


@pytest.mark.parametrize("name", ["sft", "reward"])
def test_an_adapter_is_loaded_whole(adapted, name):
    base, root = adapted
    options = {"start": root / "sft"} if name == "sft" else {}
    value = {"value_head": "zero"} if name == "sft" else {}

    def load() -> Any:
        return ppo_models(base, root / name, lora=LORA, **options, **value)

    load()
    file = f"{ADAPTER}/adapter_model"
    whole = load_file(root / name / f"{file}.safetensors")
    victim = next(key for key in sorted(whole) if key.endswith("q_proj.lora_B.weight"))
    damages = [
        (lambda t: without(t, victim), r"does not fit the base: Missing key.*q_proj/lora_B"),
        (renamed, r"does not fit the base|lacks score\.weight|damaged|not alpha"),
        (lambda t: narrower(t, victim), r"does not fit the base: size mismatch for .*q_proj"),
        (
            lambda t: t | {"base_model.model.x.lora_A.weight": t[victim].clone()},
            r"Unexpected key.*x/lora",
        ),
    ]
    if name == "reward":
        score = "base_model.model.score.weight"
        damages.append((lambda t: without(t, score), r"lacks score\.weight, a reward head"))
    for damage, message in damages:
        change(root / name, lambda _, damage=damage: damage(whole), file)
        with pytest.raises(ValueError, match=message):
            load()


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_and_a_broken_manifest_are_refused(tmp_path, kind):
    folder = hub_model(tmp_path / "sft", "llama")
    write_manifest(folder, stage="sft", run="r")
    KINDS[kind](folder)
    flip_a_bit(folder / "model.safetensors")
    with pytest.raises(ManifestError, match=r"is not what its manifest\.json says"):
        KINDS[kind](folder)
    flip_a_bit(folder / "model.safetensors")
    KINDS[kind](folder)
    manifest = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(manifest[:-20])
    with pytest.raises(ManifestError, match=r"manifest\.json is damaged"):
        KINDS[kind](folder)
