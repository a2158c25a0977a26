"""`--as-python`: the program trains what the command trains, to the bit."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_lightning.app.as_python import Calls, as_python
from rlhf_lightning.app.config.compose import ConfigError, given
from rlhf_lightning.data.demo.vocabulary import demo_tokenizer
from rlhf_lightning.runs.folder import RunFolder, read_metrics, read_samples
from rlhf_lightning.runs.summary import read_summary
from tests.builders.command_lines import settings_of
from tests.builders.runs import completed, settings_for

STAGES = ("base", "sft", "reward", "ppo", "grpo", "dpo")
WHOLE = ("trainer.limit_val_batches=null",)
OWN = {
    "base": WHOLE,
    "sft": ("trainer.validations=3", "callbacks.early_stopping={patience: 1}", *WHOLE),
    "reward": WHOLE,
    "grpo": ("lora=lora", "lora.r=4"),
}

OF_THE_COMMAND: dict[str, set[str]] = {"sft": {"val/baseline_loss"}}  # figures of the command alone


def program(*overrides: str) -> str:
    return as_python(settings_of(*overrides), overrides)


def figures(folder: RunFolder) -> list[dict[str, float]]:
    return [
        {k: v for k, v in row.items() if not k.startswith(("time/", "throughput/")) and v == v}
        for row in read_metrics(folder.metrics)
    ]


def check_same_bits(mine: RunFolder, command: RunFolder) -> None:
    """Compare metrics, samples and exported weights."""
    assert figures(mine) == figures(command)
    for name in ("samples", "distributions"):
        one, other = (getattr(folder, name) for folder in (mine, command))
        assert (read_samples(one) if one.exists() else []) == (
            read_samples(other) if other.exists() else []
        )
    files = sorted(file.name for file in command.export.glob("*.safetensors"))
    assert files
    for file in files:
        assert (mine.export / file).read_bytes() == (command.export / file).read_bytes()


SLOWER = ("model.cpu_kernels=false", "model.micro_batches=tokens")


@pytest.mark.thorough
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("stage", "more"),
    [*((stage, ()) for stage in STAGES), pytest.param("sft", SLOWER, marks=pytest.mark.slow)],
)
def test_the_program_trains_what_the_command_trains_to_the_bit(
    stage: str,
    more: tuple[str, ...],
    start: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ("debug=fast", "logger=none", *OWN.get(stage, ()), *more)
    folder = completed(tmp_path / "command", stage, start, *given)
    written = as_python(settings_for(stage, start, *given), given)
    names: dict[str, Any] = {}
    exec(compile(written, f"{stage}.py", "exec"), names)
    (summary,) = tmp_path.glob("outputs/*/program/summary.json")
    mine = RunFolder(summary.parent)
    check_same_bits(mine, folder)
    module, loader = names["module"], {"tokenizer": demo_tokenizer()} if stage == "base" else {}
    if hasattr(module, "scorer"):  # code, which no checkpoint names for a user
        loader["reward"] = module.scorer
    loaded = type(module).load_from_checkpoint(folder.last_checkpoint, **loader)
    assert dict(loaded.hparams) == dict(module.hparams)
    for name, value in loaded.state_dict().items():
        assert stage == "reward" or torch.equal(value, module.state_dict()[name]), name
    told, wanted = read_summary(mine).metrics, read_summary(folder).metrics
    assert told.keys() ^ wanted.keys() == OF_THE_COMMAND.get(stage, set())
    for name in told.keys() & wanted.keys():
        assert told[name] == wanted[name], name


def test_a_program_says_what_differs_from_the_defaults_alone():
    found = program("+experiment=ppo", "seed=2", "logger=none", "module.ppo.kl_coef=0.1")
    assert found.startswith('"""python -m rlhf_lightning.train +experiment=ppo seed=2')
    assert "kl_coef=0.1" in found
    assert not [word for word in ("cliprange", "hydra", "max_iterations") if word in found]


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            ("+experiment=ppo", "strategy=fsdp", "trainer.devices=2", "trainer.accelerator=cpu"),
            ("strategy=FSDP2Strategy(", "devices=2"),
        ),
        (
            ("+experiment=ppo", "doctor=act", "doctor.actions.on_alarm=stop"),
            ('"actions": ActionSettings(on_alarm="stop")', '"monitor": "doctor/quality"'),
        ),
        (
            ("+experiment=ppo", "rollout=transformers", "artifacts.ppo=last"),
            ("generator=partial(TransformersGenerator)", 'start="last"', 'value_head="stored"'),
        ),
        (
            ("+experiment=ppo", "evaluation.every_n_iterations=2", "evaluation.temperature=0.5"),
            ("PeriodicEvaluation(\n", "every_n_iterations=2", "temperature=0.5"),
        ),
        (("+experiment=dpo", "evaluation.gold=null"), ("trainer.fit(module, data)\nexport_model",)),
    ],
)
def test_what_a_program_holds(overrides, parts):
    found = program(*overrides)
    compile(found, "program", "exec")
    for part in parts:
        assert part in found


@pytest.mark.parametrize("word", ["ckpt_path=last.ckpt", "logger.mode=offline"])
def test_a_setting_that_python_would_drop_is_refused_by_its_key(word):
    more = ["logger=wandb"] if word.startswith("logger.") else []
    with pytest.raises(ConfigError, match=f"{word} has no argument in Python"):
        program("+experiment=ppo", *more, word)


def test_every_text_of_a_program_is_the_text_of_the_command():
    settings = settings_of("+experiment=sft", "seed=3")
    for text in ("\\underline{", "a\nb", 'say "it\'s"', "\\N{x}"):
        words = ["+experiment=sft", given("dataset.source.remove", text)]
        compile(as_python(settings, words), "program", "exec")
        assert ast.literal_eval(Calls().value({text: [text]})) == {text: [text]}
