"""From a run's checkpoint back to a model folder, also of a run that was killed."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from huggingface_hub import metadata_load
from omegaconf import OmegaConf
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from rlhf_lightning.app.config.commands import ExportSettings
from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.app.export import main, run
from rlhf_lightning.runs.folder import RunFolder
from tests.builders.runs import completed, killed, make_start

pytestmark = pytest.mark.timeout(120)
LORA = ("lora=lora", "lora.r=4")


@pytest.fixture(scope="module")
def reward_lora(tmp_path_factory, start):
    return killed(tmp_path_factory.mktemp("runs") / "reward", "reward", start, *LORA)


def saved_weights(folder: RunFolder, prefix: str, iteration: int = 3):
    path = folder.checkpoints / f"iteration={iteration:06d}.ckpt"
    state = torch.load(path, weights_only=True)["state_dict"]
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


def export(folder, tmp_path, **options):
    run(ExportSettings(run=folder, to=tmp_path / "out", **options))
    return tmp_path / "out"


def texts(tokenizer):
    batch = tokenizer(["a <eos>", "the sum is <eos>"], padding=True, return_tensors="pt")
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def test_the_newest_checkpoint_of_a_killed_run_becomes_a_model_folder_that_names_no_other(
    sft, start, tmp_path
):
    made = export(sft.path, tmp_path)
    weights = AutoModelForCausalLM.from_pretrained(made).state_dict()
    for name, value in saved_weights(sft, "policy.model.").items():
        assert torch.equal(weights[name], value), name
    assert AutoTokenizer.from_pretrained(made).eos_token == "<eos>"
    assert "has not finished, after iteration 3" in (made / "README.md").read_text()
    assert not (sft.path / "export").exists()
    matter = metadata_load(made / "README.md")
    assert (matter["license"], matter["base_model"]) == ("mit", "org/tiny")
    config = OmegaConf.load(made / "training_config.yaml")
    assert config.module.sft.learning_rate == 1e-3
    assert config.artifacts.base == ".../start"
    assert "paths" not in config
    assert "logger" not in config
    folders = (str(start.parent), str(tmp_path), str(sft.path))
    for path in made.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        assert not any(folder.encode() in content for folder in folders), path.name


def test_a_completed_run_is_exported_again_as_its_own_end_left_it(start, tmp_path):
    folder = completed(tmp_path / "run", "reward", start, "module.reward.normalization_samples=16")
    made = export(folder.path, tmp_path)
    for name in ("README.md", "training_config.yaml", "tokenizer.json"):
        assert (made / name).read_text() == (folder.export / name).read_text(), name
    ours, theirs = (load_file(path / "model.safetensors") for path in (made, folder.export))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-7)
    offsets = [json.loads((path / "config.json").read_text()) for path in (made, folder.export)]
    assert offsets[0]["reward_offset"] == pytest.approx(offsets[1]["reward_offset"], rel=1e-6)
    assert offsets[0]["reward_offset"] != 0


@pytest.mark.parametrize("stage", ["sft", pytest.param("ppo", marks=pytest.mark.slow)])
def test_an_adapter_is_merged_and_stands_beside_it(start, tmp_path, stage):
    folder = killed(tmp_path / "run", stage, start, *LORA)
    made = export(folder.path, tmp_path)
    alone = tmp_path / "alone"
    run(ExportSettings(run=folder.path, to=alone, adapter_only=True))
    assert not list(alone.glob("model*.safetensors"))
    for adapter in (alone, made / "adapter"):
        assert metadata_load(adapter / "README.md")["library_name"] == "peft"
        own = AutoTokenizer.from_pretrained(adapter)
        assert own.get_vocab() == AutoTokenizer.from_pretrained(made).get_vocab()
    batch = texts(AutoTokenizer.from_pretrained(made))
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(start)(**batch).logits
        merged = AutoModelForCausalLM.from_pretrained(made)(**batch).logits
        for adapter in (alone, made / "adapter"):
            logits = AutoPeftModelForCausalLM.from_pretrained(adapter)(**batch).logits
            torch.testing.assert_close(logits, merged, rtol=0, atol=1e-5)
    assert (merged - base).abs().max() > 1e-3, "the adapter does nothing: the test shows nothing"


def test_a_reward_models_adapter_gives_the_merged_models_scores(reward_lora, tmp_path, capsys):
    made = export(reward_lora.path, tmp_path)
    assert f"train  rlhf-train ppo MODEL FILE --reward-model {made}\n" in capsys.readouterr().err
    alone = tmp_path / "alone"
    run(ExportSettings(run=reward_lora.path, to=alone, adapter_only=True))
    loader = "load   AutoPeftModelForSequenceClassification.from_pretrained("
    assert f"{loader}{str(alone)!r})\n" in capsys.readouterr().err
    tokenizer = AutoTokenizer.from_pretrained(alone)
    batch = texts(tokenizer)
    with torch.no_grad():
        whole = AutoModelForSequenceClassification.from_pretrained(made)
        # As the adapter's model card says.
        model = AutoPeftModelForSequenceClassification.from_pretrained(alone, num_labels=1)
        model.config.pad_token_id = tokenizer.pad_token_id
        scores = model(**batch).logits
        torch.testing.assert_close(scores, whole(**batch).logits, rtol=0, atol=1e-5)
    assert scores.std() > 1e-3


def test_an_adapter_is_not_merged_into_another_base_or_with_another_scale(
    reward_lora, start, tmp_path
):
    other = make_start(tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    moved = tmp_path / "run"
    shutil.copytree(reward_lora.path, moved, symlinks=True)
    config = moved / ".hydra/config.yaml"
    written = config.read_text()
    config.write_text(written.replace(str(start), str(other)))
    with pytest.raises(ConfigError, match="is another model now"):
        export(moved, tmp_path)
    scaled = OmegaConf.create(written)
    scaled.lora.alpha = 64
    OmegaConf.save(scaled, config)
    with pytest.raises(ConfigError, match=r"lora\.alpha=32"):
        export(moved, tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("dataset.source._target_", "os.system", r"dataset\.source\._target_=os\.system is not"),
        ("module.trust_remote_code", True, "would run code that the run folder names"),
    ],
)
def test_a_configuration_is_data_and_is_checked_before_anything_is_built(
    sft, tmp_path, key, value, said
):
    copy = tmp_path / "run"
    shutil.copytree(sft.path, copy, symlinks=True)
    config = OmegaConf.load(copy / ".hydra/config.yaml")
    OmegaConf.update(config, key, value, force_add=True)
    OmegaConf.save(config, copy / ".hydra/config.yaml")
    with pytest.raises(ConfigError, match=said):
        export(copy, tmp_path)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            (),
            (
                "load   AutoModelForCausalLM",
                "talk   rlhf-chat {to}\n",
                "vllm serve {to}\n",
                "transformers serve {to}, ",
            ),
        ),
        (("dtype=bf16",), (" weights in bf16\n",)),
    ],
)
def test_a_program_reads_the_folder_alone_and_people_what_it_is_and_how_to_go_on(
    sft, tmp_path, monkeypatch, capsys, words, told
):
    to = tmp_path / "out"
    monkeypatch.setattr("sys.argv", ["rlhf-export", str(sft.path), f"to={to}", *words])
    main()
    said = capsys.readouterr()
    assert said.out == f"{to}\n"
    count = sum(value.numel() for value in load_file(to / "model.safetensors").values())
    what = f"run    {sft.path}: supervised fine-tuning after iteration 3, {count:,} weights in "
    for text in (what, *told):
        assert text.format(to=to) in said.err


def test_what_is_no_run_a_run_without_a_checkpoint_and_a_folder_in_use_are_refused(sft, tmp_path):
    copy, mine = tmp_path / "run", tmp_path / "mine"
    shutil.copytree(sft.path, copy, symlinks=True)
    shutil.rmtree(copy / "checkpoints")
    mine.mkdir()
    (mine / "notes.txt").touch()
    for folder, to, said in (
        (tmp_path / "mein", None, "does not exist: .*did you mean .*/mine"),
        (mine, None, "is no run folder"),
        (copy, None, "holds no complete checkpoint"),
        (sft.path, mine, "is there already: give another folder"),
    ):
        with pytest.raises(ConfigError, match=said):
            run(ExportSettings(run=folder, to=to or tmp_path / "out"))
    assert [path.name for path in mine.iterdir()] == ["notes.txt"]
