"""Another model is published while one is read: what was read is of one model, or it is refused."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf_lightning import LoraHparams, SFTModule, export_model
from rlhf_lightning.models.adapter_files import read_adapter, save_adapter
from rlhf_lightning.models.classifiers import load_classifier
from rlhf_lightning.models.export import export_scalar_model
from rlhf_lightning.models.factory import load_base, load_policy, load_scalar_model
from rlhf_lightning.models.loading import loading_options
from rlhf_lightning.preferences.candidates import load_candidate_policy
from rlhf_lightning.runs import source
from rlhf_lightning.runs.manifest import ManifestError, publish_artifact
from rlhf_lightning.runs.source import Source, reads_one_model
from rlhf_lightning.text.tokenizers import as_saved, load_tokenizer
from tests.builders.models import PAD, tiny_policy, tiny_scalar_model, tiny_tokenizer

LORA = LoraHparams(r=2, alpha=4)


class Opened:
    """Calls a function when the file of a certain number is opened in a folder."""

    folder, number, then = "", 0, staticmethod(lambda: None)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and self.folder and str(arguments[0]).startswith(self.folder):
            self.number -= 1
            if self.number == 0:
                self.then()


OPENED = Opened()
sys.addaudithook(OPENED)  # for the rest of the process


def versions(folder: Path, save: Callable[[Path], None]) -> Path:
    """Two models whose every file differs: names of a token, a setting and all weights."""
    for name, factor in (("A", 1.0), ("B", 2.0)):
        place = folder / name
        save(place)
        tiny_tokenizer().save_pretrained(place)
        for file, key in (("config.json", "reward_offset"), ("tokenizer_config.json", "mark")):
            content = json.loads((place / file).read_text()) | {key: factor}
            (place / file).write_text(json.dumps(content))
        for file in (p for p in place.rglob("*.safetensors")):
            weights = {k: torch.full_like(v, factor) for k, v in load_file(file).items()}
            save_file(weights, file, metadata={"format": "pt"})
        words = (place / "tokenizer.json").read_text().replace('"w40"', f'"mark{factor:g}"')
        (place / "tokenizer.json").write_text(words)
        (place / "chat_template.jinja").write_text(f"{{{{ '{factor:g}' }}}}")
    publish_artifact(folder / "A", folder / "name", stage="sft", run="x")
    return folder


def save_policy(folder: Path) -> None:
    tiny_policy("llama").model.save_pretrained(folder)


def save_reward(folder: Path) -> None:
    model = tiny_scalar_model("llama")
    export_scalar_model(model, folder, model.state_dict(), pad_token_id=PAD)


def save_with_adapter(folder: Path) -> None:
    save_policy(folder)
    model = load_policy(folder, lora=LORA)
    mark = "1" if folder.name == "A" else "2"
    options = {"base": mark, "base_fingerprint": ""}
    save_adapter(model, folder / "adapter", model.state_dict(), **options)


def marks(model: Any) -> set[float]:
    config = model.config if hasattr(model, "config") else model.model.config
    return {next(model.parameters()).flatten()[0].item(), config.reward_offset}


def of_tokenizer(found: Any) -> set[float]:
    words = {1.0: "mark1", 2.0: "mark2"}
    held = {mark for mark, word in words.items() if word in found.get_vocab()}
    # with_fixed_date leaves the template as it is
    return held | {float(found.chat_template.split("'")[1]), float(found.init_kwargs["mark"])}


def adapter(folder: str) -> set[float]:
    files = read_adapter(Path(folder) / "adapter")
    return {next(iter(files.tensors.values())).flatten()[0].item(), float(files.base)}


def candidate(folder: str) -> set[float]:
    more: dict[str, Any] = {"chat_template_arguments": None, "revision": None}
    found = load_candidate_policy(folder, **more, trust_remote_code=False, precision="32-true")
    return marks(found.model) | of_tokenizer(found.tokenizer)


def scalar(folder: str) -> set[float]:
    model = load_scalar_model(folder)
    return {model.head.weight.mean().item(), model.head.bias.item()}


def classifier(folder: str) -> set[float]:
    found = load_classifier(folder)
    return {found.model.score.weight.mean().item(), found.offset}


READERS: dict[str, tuple[Callable[[Path], None], Callable[[str], set[float]]]] = {
    "policy": (save_policy, lambda f: marks(load_policy(f).model)),
    "base": (save_policy, lambda f: marks(load_base(f, LORA).model)),
    "tokenizer": (save_policy, lambda f: of_tokenizer(load_tokenizer(f))),
    "saved tokenizer": (save_policy, lambda f: of_tokenizer(as_saved(f, loading_options(f)))),
    "candidates": (save_policy, candidate),
    "reward model": (save_reward, scalar),
    "classifier": (save_reward, classifier),
    "adapter": (save_with_adapter, adapter),
}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", READERS)
def test_a_model_that_is_replaced_at_any_moment_of_a_read_is_read_whole(kind, tmp_path):
    save, read = READERS[kind]
    folder = versions(tmp_path, save)
    name, number, seen = str(folder / "name"), 0, []
    options = {"stage": "sft", "run": "x"}
    while OPENED.number <= 0:  # until no file is left to open before it
        number += 1
        publish_artifact(folder / "A", name, **options)
        OPENED.folder, OPENED.number = name, number
        OPENED.then = lambda: publish_artifact(folder / "B", name, **options)
        found = read(name)
        OPENED.folder = ""
        assert found in ({1.0}, {2.0}), f"at file {number}"
        seen.append(found)
    OPENED.number = 0
    assert seen[0] == {2.0}
    assert seen[-1] == {1.0}
    assert len(seen) > 3


def test_a_folder_that_never_stays_the_same_is_named_and_an_error_of_its_own_is_kept(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(source, "MOST_READS", 3)
    reads = []

    @reads_one_model
    def read(folder: Path) -> None:
        reads.append(folder)
        (folder / "config.json").write_text("x" * len(reads))

    with pytest.raises(ManifestError, match="replaced 3 times"):
        read(tmp_path)
    assert len(reads) == 3

    @reads_one_model
    def fail(folder: Path) -> None:
        reads.append(folder)
        raise ValueError("damaged")

    with pytest.raises(ValueError, match="damaged"):
        fail(tmp_path)
    assert len(reads) == 4


def swap(folder: Path) -> None:
    weights = {k: v * 1.25 for k, v in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def start(tmp_path: Path) -> Path:
    folder = tmp_path / "start"
    save_policy(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_a_source_is_named_once_it_is_another_one(start):
    found = Source.of(start, "policy")
    found.check()
    swap(start)
    with pytest.raises(ManifestError, match=r"^policy=.*is another model now"):
        found.check()


def test_weights_of_another_model_than_the_tokenizer_are_refused(start):
    module = SFTModule.from_pretrained(start)
    swap(start)
    with pytest.raises(ManifestError, match="another model now"):
        module.configure_model()


def test_export_model_merges_no_adapter_into_another_base(start, tmp_path):
    module = SFTModule.from_pretrained(start, lora=LORA)
    module.configure_model()
    swap(start)
    with pytest.raises(ManifestError, match="another model now"):
        export_model(module, tmp_path / "export")
    assert not (tmp_path / "export").exists()
    shutil.rmtree(start)
    with pytest.raises((ManifestError, ValueError)):
        export_model(module, tmp_path / "export")
