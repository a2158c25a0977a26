"""The first answer of a command: what needs no torch costs at most 3 s of processor time."""

from __future__ import annotations

import re

import pytest
from omegaconf import OmegaConf

from rlhf_lightning.app.config.compose import choices, composed, register
from rlhf_lightning.app.config.validate import CODE
from tests.builders.command_lines import ROOT, environment
from tests.builders.processes import timed_python

RUN = "outputs/ppo/2026-11-29_08-00-0"
CODED = ("scorer=function", "scorer.function=reward.py:score")
EVALUATION = "outputs/evaluate/2026-11-29_08-00-00"
NEAR = f"did you mean {RUN}0?"
LIMIT_SECONDS = 3.0  # of user and system time; importing torch and Lightning alone costs more


def answer(command, words, folder):
    """Return what a command answers in time, and its status; it leaves nothing."""
    before = set(folder.iterdir())
    done = timed_python(
        *("-m", f"rlhf_lightning.{command}", *words.split()),
        folder=folder,
        environment=environment(COLUMNS="80"),
        limit=LIMIT_SECONDS,
    )
    assert set(folder.iterdir()) == before
    return done.stdout + done.stderr, done.returncode


def test_help_names_every_experiment(tmp_path):
    told, status = answer("train", "--help", tmp_path)
    assert status == 0
    assert "rlhf_lightning.train" in told
    words = set(told.replace(",", " ").split())
    for name in choices("experiment"):
        assert name in words or name.partition("_")[2] in words, name


def test_help_of_an_experiment_is_its_own(tmp_path):
    told, status = answer("train", "grpo --help", tmp_path)
    assert status == 0
    assert "rlhf-train grpo MODEL FILE --reward FILE.py:NAME" in told
    assert "  data.num_generations=8\n" in told


@pytest.mark.parametrize(
    ("command", "words", "fix"),
    [
        ("train", "+experiment=ppo module.ppo.kl_coeff=1", "did you mean module.ppo.kl_coef"),
        ("train", "+experiment=ppo module.ppo.kl_coef=-1", "module.ppo.kl_coef=-1 must be >= 0"),
        (
            "train",
            "+experiment=dpo data.num_iterations=3 data.num_epochs=2",
            "data.num_iterations=3 and data.num_epochs=2: give one",
        ),
        ("train", "dpo org/m file.jsonl", "file.jsonl does not exist"),
        ("train", "dpo org/m records.jsonl", "the records are prompts"),
        ("plan", "kto org/m records.jsonl", "Prompts: distillation, grpo, ppo."),
        ("evaluate", f"policy={RUN}1 baseline=org/m", f"policy={RUN}1 does not exist"),
        ("train", "--recipe dpoo", "did you mean dpo"),
        ("train", "dpoo --help", "did you mean dpo"),
        ("chat", f"{RUN}1", f"{RUN}1 does not exist: give a run, a model folder or a hub name"),
        ("train", "+experiment=reward data.path=record.jsonl", "did you mean records.jsonl?"),
        (
            "evaluate",
            f"run={RUN}1",
            f"run={RUN}1 is no run folder: give one below outputs/; {NEAR}",
        ),
        ("evaluate", "run=outputs", NEAR),
        ("evaluate", f"run={EVALUATION}", "stage=evaluate trains nothing"),
        ("evaluate", f"run={RUN}0", "(--reward FILE.py:NAME)"),
        ("evaluate", f"run={RUN}0 --reward reward.py:score baseline=outputs/pop", "outputs/ppo?"),
        ("export", "outputs/ppo", NEAR),
        ("report", "output/ppo/2026-11-29_08-00-00", NEAR),
        ("collect", f"run={RUN}0/export", NEAR),
        ("train", "+experiment=dpo artifacts.sft=outputs/ppo", f"did you mean {RUN}0/export?"),
        ("train", "grpo org/m records.jsonl --reward reward.py:scoer", "did you mean score?"),
        (
            "plan",
            "grpo org/m records.jsonl --reward rewrad.py:score",
            "no Python file rewrad.py; did you mean reward.py?\n",
        ),
        ("train", "+experiment=ppo module.estimator=reward.py:Halfed", "did you mean Halved?"),
        ("evaluate", "run=a --reward reward.py:scoer", "did you mean score?"),
        ("chat", "org/m --reward reward.py:scoer", "did you mean score?"),
        ("chat", "org/m reward=reward.py:score", "--reward FILE.py:NAME"),
        ("collect", "--reward reward.py:score", "write --reward-model FOLDER"),
        ("evaluate", "run=outputs/reward", "trained a reward model: give the run of a policy"),
        (
            "evaluate",
            f"run={RUN}0 ++dataset.path=record.jsonl --reward reward.py:score",
            "did you mean records.jsonl?",
        ),
        ("train", "+experiment=ppo model.chat_template=x", "add it with +model.chat_template=x"),
        ("train", "+experiment=ppo scorer.source=outputs/pop", "did you mean outputs/ppo?"),
        ("annotate", "file=record.jsonl", "did you mean records.jsonl?"),
        ("annotate", "store=record.jsonl action=status", "did you mean records.jsonl?"),
        ("train", "--config record.jsonl", "did you mean records.jsonl?"),
        ("pipeline", "experiments.sft=sftt", "did you mean sft?"),
        ("pipeline", "sftt:KEY=VALUE", "evaluate, or with round_2/ before it; did you mean sft?"),
        ("pipeline", "overrides.sft=[KEY=VALUE]", "write sft:KEY=VALUE"),
        ("pipeline", "ppo:module.pp=3", "ppo: unknown key module.pp; did you mean module.ppo"),
        ("pipeline", "accept=[rewrd]", "rewrd is no stage; did you mean reward?"),
    ],
)
def test_a_mistake_that_needs_no_torch_is_answered_at_once(command, words, fix, tmp_path):
    register()
    for part in ("checkpoints", "export"):
        (tmp_path / f"{RUN}0" / part).mkdir(parents=True)
    (tmp_path / f"{RUN}0/export/config.json").touch()
    ppo = composed("train", ["+experiment=ppo", *CODED])
    reward = OmegaConf.to_yaml(composed("train", ["+experiment=reward"]))
    configs = {f"{RUN}0": OmegaConf.to_yaml(ppo), EVALUATION: "stage: evaluate"}
    for run, config in (configs | {"outputs/reward": reward}).items():
        (tmp_path / run / ".hydra").mkdir(parents=True)
        (tmp_path / run / ".hydra/config.yaml").write_text(config)
    (tmp_path / "records.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "reward.py").write_text("def score(): ...\nclass Halved: ...\n")
    told, status = answer(command, words, tmp_path)
    assert status == 2
    assert fix in told


def test_every_setting_that_names_code_is_looked_up_at_once():
    texts = [file.read_text() for file in (ROOT / "rlhf_lightning").rglob("*.py")]
    named = {name for text in texts for name in re.findall(r"(\w+): .*\bCodeName\b", text)}
    assert named - {"path"} == CODE.keys()  # of load_function
