"""A wrong value is refused where it is given, and the error names the key: one table.

Its classes: an unknown key, a wrong type, a value out of range, a wrong choice, settings that
contradict each other, a missing file, a wrong place. Types, ranges and choices stand once, in the
signature of what is called; so a row a class of mistake and of hyper-parameters is enough, from
Python or from the command line, whose settings are read by the same signatures.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

import rlhf_lightning
from rlhf_lightning import (
    ActionSettings,
    DistillationHparams,
    DoctorThresholds,
    DPOHparams,
    DPOModule,
    FileSource,
    FunctionScorer,
    GRPOHparams,
    LoraHparams,
    NoReward,
    PolicyGradientModule,
    PPOHparams,
    PPOModule,
    PreferenceDataModule,
    PromptDataModule,
    RewardHparams,
    SamplingHparams,
    SFTHparams,
    SFTModule,
    WeightedScorer,
    compare,
    gold_scores,
    load_scalar_model,
    trainer_arguments,
)
from rlhf_lightning.app import prerequisites, train
from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.hparams import Checked
from rlhf_lightning.runs.folder import RunFolder
from tests.builders.command_lines import settings_of
from tests.builders.record_files import write_material

pytestmark = [
    pytest.mark.usefixtures("working_folder"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

# A class and a value that it refuses; the error begins with the field. At least one row a class.
HPARAMS: list[tuple[type[Checked], dict[str, Any]]] = [
    (SamplingHparams, {"temperature": 0.009}),
    (SamplingHparams, {"top_k": 50}),  # rollouts sample the full distribution
    (SFTHparams, {"micro_batch_size": 0}),
    (RewardHparams, {"use_margin": "yes"}),
    (RewardHparams, {"normalization_samples": 10**12}),
    (DPOHparams, {"beta": 0.0}),
    (LoraHparams, {"target_modules": " "}),
    (DistillationHparams, {"divergence": "nosuch"}),
    (PPOHparams, {"learning_rate": "1e-5"}),
    (PPOHparams, {"num_minibatches": True}),
    (PPOHparams, {"kl_horizon": 5}),  # without a target
    (PPOHparams, {"kl_target": 6.0, "kl_coef": 0.0}),
    (PPOHparams, {"gae_lambda": -0.1}),
    (PPOHparams, {"surrogate": "nosuch"}),
    (PPOHparams, {"off_policy": "masked", "ratio_base": "sampler"}),  # twice the same
    (GRPOHparams, {"dual_clip": 3.0, "surrogate": "cispo"}),  # which bounds every weight
    (GRPOHparams, {"off_policy_low": 0.2, "off_policy": "truncated"}),  # a bound of another mode
    (DoctorThresholds, {"kl_high_warn": 5.0, "kl_high_alarm": 1.0}),
    (ActionSettings, {"kl_coef_first": 3.0, "kl_coef_second": 2.0}),
]
CLASSES = [
    cls
    for name in rlhf_lightning.__all__
    if name.endswith("Hparams") and issubclass(cls := getattr(rlhf_lightning, name), Checked)
]


def test_every_class_of_hyper_parameters_of_a_stage_has_a_row():
    stages = {cls for cls in CLASSES if cls.__module__ == "rlhf_lightning.hparams"}
    assert stages <= {cls for cls, _ in HPARAMS}


@pytest.mark.parametrize(("cls", "given"), HPARAMS, ids=lambda value: str(value)[:60])
def test_a_wrong_hyper_parameter_is_refused_by_its_name(cls, given):
    with pytest.raises((TypeError, ValueError), match=rf"^({'|'.join(given)})\b"):
        cls(**given)


@pytest.mark.parametrize("cls", CLASSES)
def test_every_field_refuses_what_is_no_value_of_its_type_and_what_float32_cannot_hold(cls):
    for field in fields(cls):
        for value in (object(), math.nan, 1e39, 1e-300):
            with pytest.raises((TypeError, ValueError)) as caught:
                cls(**{field.name: value})
            assert field.name in str(caught.value) or "required" in str(caught.value)


def length(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def nothing() -> None:
    """Take nothing, give nothing."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Files of rows, and a policy as a folder and as a module."""
    found: dict[str, Any] = write_material(tmp_path_factory.mktemp("material"))
    module = SFTModule.from_pretrained(found["policy"])
    module.configure_model()
    return found | {"module": module}


def sft(made: dict[str, Any], **given: Any) -> object:
    return SFTModule.from_pretrained(made["policy"], **given)


def ppo(made: dict[str, Any], reward: Any = length, **given: Any) -> object:
    return PPOModule.from_pretrained(made["policy"], reward, **given)


def scalar(made: dict[str, Any], **given: Any) -> object:
    return load_scalar_model(made["policy"], head="zero", **given)


def compared(made: dict[str, Any], **given: Any) -> object:
    return compare(made["module"], made["policy"], made["prompts"], **given)


def run(**given: Any) -> object:
    return trainer_arguments("run", **given)


# What the error begins with, and the call.
CALLS: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
    # wrong type
    ("ppo", lambda p: ppo(p, ppo={"kl_coef": 0.1})),
    ("source=", lambda _: SFTModule.from_pretrained(torch.nn.Linear(1, 1))),
    ("source is dict", lambda p: PromptDataModule({"train": []}, None, batch_size=4).setup()),
    ("tokenizer=", lambda p: PromptDataModule(p["prompts"], "gpt2", batch_size=4).setup()),
    ("trust_remote_code=", lambda p: scalar(p, trust_remote_code=[0])),
    ("optimizer=", lambda p: ppo(p, optimizer=nothing)),
    ("generator=SFTModule", lambda p: sft(p, generator=p["module"])),
    ("reward", lambda p: ppo(p, nothing)),
    ("reward", lambda p: PolicyGradientModule.from_pretrained(p["policy"], p["module"])),
    ("reward='rewrad'", lambda p: ppo(p, "rewrad")),
    ("reward=5", lambda p: compared(p, reward=5)),
    ("gold=", lambda p: compared(p, gold=nothing)),
    ("gates[a] must be", lambda p: compared(p, gates={"a": 1})),
    ("scorers[a]=", lambda _: WeightedScorer({"a": NoReward})),
    ("early_stopping: patience='3'", lambda _: run(early_stopping={"patience": "3"})),
    # unknown key
    ("early_stopping: ", lambda _: run(early_stopping={"a": 1})),
    # out of range, or empty
    ("batch_size=0", lambda p: PromptDataModule(p["prompts"], None, batch_size=0)),
    ("also[1]=''", lambda p: PreferenceDataModule(p["pairs"], None, batch_size=2, also=["a", ""])),
    ("prompts=[]", lambda p: p["module"].generate([])),
    ("max_new_tokens=3000", lambda p: p["module"].generate(["w2"], max_new_tokens=3000)),
    ("dropout=nan", lambda p: scalar(p, dropout=math.nan)),
    ("columns[prompt]=''", lambda _: FileSource("x", columns={"prompt": ""})),
    ("name='\\x1b", lambda _: run(name="\x1b[2J")),
    # contradiction
    ("1 prompts, 2 completions", lambda _: gold_scores(["a"], ["b", "c"], [True])),
    ("lora.dropout=0.5", lambda p: ppo(p, lora=LoraHparams(dropout=0.5))),
    # missing file, wrong place
    ("policy=", lambda _: PPOModule.from_pretrained(Path("not/there"), length)),
    ("checkpoint_path=", lambda p: DPOModule.load_from_checkpoint(p["prompts"])),
    ("chat_template=", lambda p: sft(p, chat_template=" ")),
    ("reward function '../x'", lambda _: FunctionScorer("../x")),
]


@pytest.mark.parametrize(("key", "call"), CALLS, ids=[key for key, _ in CALLS])
def test_a_call_refuses_a_wrong_value_by_the_name_of_its_argument(made, key, call):
    with pytest.raises((TypeError, ValueError, FileNotFoundError), match=f"^{re.escape(key)}"):
        call(made)


def test_what_fits_is_taken(made):
    two = ppo(made, [length, length], reward_weights=(1, torch.tensor(2.0)))
    assert two.hparams["reward_weights"] == [1.0, 2.0]
    assert PreferenceDataModule(made["pairs"], None, batch_size=2, also=(made["pairs"],))
    assert len(run(callbacks=(L.Callback(),))["callbacks"]) > 2
    assert type(SFTHparams(max_grad_norm=torch.tensor(2)).max_grad_norm) is float


# Command line, and what its one line must hold: the key, and what can be written instead.
COMPOSITION = [
    ("+experiment=ppoo", "experiment=ppoo", "did you mean ppo"),
    ("+experiment=ppo +sweeps=nosuch", "sweeps=nosuch", "ppo_clip"),
    ("+experiment=ppo scorer=null", "scorer=null", "function, http"),
    ("+experiment=ppo sed=1", "sed", "did you mean seed"),
    ("+experiment=ppo callbacks.extra.mine=1", "callbacks.extra.mine", "+callbacks.extra.NAME="),
    ("+experiment=sft trainer.max_epochs=2", "max_epochs", "data.num_epochs"),
    ("+experiment=ppo lr=1e-5", "key lr:", "module.ppo.learning_rate"),
    ("--recipe dpoo", "dpoo", "did you mean dpo"),
    ("+experiment=ppo --lr=0.1", "--lr=0.1", "KEY=VALUE"),
    ("+experiment=ppo module.ppo.kl_coef", "module.ppo.kl_coef", "KEY=VALUE"),
    ("+experiment=ppo seed=1,2", "seed=1,2", "-m"),
    ("+experiment=ppo seed=[1,2", "seed=", "close"),
    ("+experiment=ppo ~data.batch_size", "data.batch_size", ""),
]
VALUES = [
    # wrong type
    ("+experiment=ppo seed=abc", "seed='abc'", "int"),
    ("+experiment=ppo evaluation.gold=5", "evaluation.gold=5", "_target_="),
    ("+experiment=ppo module.ppo.learning_rate=fast", "module.ppo.learning_rate=", "number"),
    # unknown key
    ("+experiment=sft +dataset.lengths.max_lenght=1", "max_lenght", "max_length"),
    ("+experiment=reward safety=default", "safety", ""),
    # out of range
    ("+experiment=sft +dataset.source.num_texts=0", "num_texts", "1"),
    ("+experiment=ppo module.ppo.gamma=2", "module.ppo.gamma=2", "<= 1"),
    # wrong choice
    ("+experiment=ppo stage=pppo", "stage=pppo", "ppo"),
    ("+experiment=ppo trainer.precision=32", "trainer.precision=32", "32-true"),
    # contradiction
    ("+experiment=ppo trainer.devices=3 data.batch_size=128", "data.batch_size=128", "126 or 132"),
    ("+experiment=ppo module.ppo.num_minibatches=256", "num_minibatches=256", "batch_size"),
    ("+experiment=sft data.num_epochs=null", "data.num_iterations and data.num_epochs", "give one"),
    ("+experiment=ppo module=sft", "stage=ppo", "module=ppo"),
    ("+experiment=base artifacts.base=a/b", "artifacts.base=a/b: base", "+experiment=sft"),
    ("+experiment=kto data.kind=preferences", "data.kind=preferences", "data.kind=unpaired"),
    ("+experiment=dpo module.dpo.desirable_weight=2", "desirable_weight", "kind=kto alone"),
    ("+experiment=sft evaluation.every_n_iterations=2", "every_n_iterations=2", ""),
    ("+experiment=sft doctor=act", "doctor=act", ""),
    ("+experiment=ppo lora=qlora rollout=vllm", "lora.quantization=nf4", "rollout=auto"),
    ("+experiment=ppo callbacks.checkpoint.mode=max", "mode=max", "checkpoint.monitor"),
    ("+experiment=reward callbacks.checkpoint.monitor=val/accuracy", "val/accuracy", "mode=max"),
    ("+experiment=ppo module.seed=7", "module.seed", "seed"),
    ("+experiment=ppo safety.harmful=[]", "safety.harmful", "safety.prompts"),
    # missing, or a missing file
    ("+experiment=ppo seed=???", "seed", "seed=..."),
    ("+experiment=ppo ckpt_path=nosuch.ckpt", "ckpt_path=nosuch.ckpt", "not exist"),
    ("+experiment=reward data.path=nosuch.jsonl", "data.path=nosuch.jsonl", "file"),
    ("+experiment=ppo scorer=http", "scorer.url", "scorer.url=..."),
    ("+experiment=ppo scorer=function scorer.function=nosuch.py:f", "nosuch.py:f", "no Python"),
    # wrong place
    ("+experiment=ppo name=../x", "name='../x'", "letters"),
    ("+experiment=ppo scorer=http scorer.url=ftp://x", "scorer.url=", "http://"),
]


def went_on(*_: object) -> None:
    raise AssertionError("the mistake was not found")


@pytest.fixture
def nothing_is_trained(monkeypatch):
    """A mistake must be found before a stage is trained, or another one for it."""
    monkeypatch.setattr(train, "_train", went_on)
    monkeypatch.setattr(prerequisites, "_train", went_on)


def check(said: str, words: str, key: str, fix: str) -> None:
    assert key in said, words
    assert fix in said, words
    assert "\n" not in said.strip()


@pytest.mark.thorough
@pytest.mark.usefixtures("nothing_is_trained")
@pytest.mark.parametrize(("words", "key", "fix"), VALUES, ids=[words for words, *_ in VALUES])
def test_a_configuration_refuses_a_wrong_value_by_its_key(words, key, fix):
    overrides = words.split()
    with pytest.raises(ConfigError) as caught:
        train.run(settings_of(*overrides), RunFolder("outputs/run"), overrides)
    check(str(caught.value), words, key, fix)


@pytest.mark.usefixtures("nothing_is_trained")
def test_a_configuration_without_mistakes_goes_on_to_the_training():
    words = ["+experiment=base", "logger=none"]
    with pytest.raises(AssertionError):
        train.run(settings_of(*words), RunFolder("outputs/run"), words)


# Of the table, from the command line: status 2 and one line.
COMMANDS = [("train", *row) for row in (*COMPOSITION, VALUES[0])]
COMMANDS += [
    ("export", "", "run", "run=..."),
    ("export", "RUN dtyp=fp32", "dtyp", "dtype"),
    ("collect", "lab.num_pirs=3", "num_pirs", "num_pairs"),
    ("env", "seed=1", "seed", ""),
    ("report", "RUN output=3", "output=3", "path"),
    ("report", "RUN logger=none", "logger=none is for training", "rlhf-report"),
    ("export", "RUN debug=fast", "debug=fast is for training", "rlhf-export"),
    ("plan", "", "stage=None", "+experiment=NAME"),
    ("plan", "+experiment=ppo plan.device=tpu", "plan.device='tpu'", "'cuda'"),
    (
        "plan",
        "+experiment=ppo model=smollm2_135m dataset=ultrafeedback data.max_prompt_length=8000",
        "data.max_prompt_length=8000",
        "use data.max_prompt_length=",
    ),
    ("plan", "+experiment=ppo plan.device_memory=much", "plan.device_memory='much'", "80GiB, 24GB"),
    (
        "plan",
        "+experiment=ppo model=pretrained artifacts.sft=org/name",
        "artifacts.sft=org/name",
        "",
    ),
    ("annotate", "page.port=70000", "page.port=70000", "65535"),
    ("annotate", "", "store=outputs/annotate/labels.sqlite", "add file="),
    ("annotate", "action=sreve", "action='sreve'", "'serve', 'import'"),
    ("annotate", "action=export", "file", "export needs a file"),
    ("annotate", "action=export file=x", "format=auto", "pairs, labels"),
    ("annotate", "file=none.jsonl", "none.jsonl", "check"),
    ("dashboard", "projct=x", "projct", "project"),
    ("chat", "", "run", "run=..."),
    ("chat", "./missing", "run=./missing", "ORG/NAME"),
    ("chat", "ORG/NAME ORG/NAME ORG/NAME", "run=", "fewer"),
]


@pytest.mark.usefixtures("nothing_is_trained")
@pytest.mark.parametrize(
    ("command", "words", "key", "fix"), COMMANDS, ids=[f"{c} {w}" for c, w, *_ in COMMANDS]
)
def test_a_command_answers_a_mistake_in_one_line(monkeypatch, capsys, command, words, key, fix):
    monkeypatch.setattr(sys, "argv", [f"rlhf-{command}", *words.split()])
    run_main = partial(import_module(f"rlhf_lightning.{command}").main)
    with pytest.raises(SystemExit) as caught:
        run_main()
    assert caught.value.code == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    check(said.err, words, key, fix)
