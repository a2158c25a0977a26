"""`rlhf-train EXPERIMENT MODEL FILE`, `--config` and `--recipe`: ways to one command line."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from rlhf_lightning.app.command_line import check_command_line
from rlhf_lightning.app.config.compose import choices, composed, register
from rlhf_lightning.app.config.recipes import experiment_help, recipe, run_yaml
from rlhf_lightning.app.config.ways import read_experiment, spelled_out, with_file
from rlhf_lightning.app.evaluation import check_context_length
from rlhf_lightning.app.start import print_recipe, words_of
from rlhf_lightning.app.train import about_words
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.lock import replacing_folder
from tests.builders.command_lines import settings_of, train

LONG = "model=pretrained dataset=files"
NAMED = "model.name=small"
FIT = "data.max_length=128 evaluation.max_new_tokens=64"  # in the 128 positions of `small`
PROMPTS_FIT = "data.max_prompt_length=64 module.sampling.max_new_tokens=64"
REWARDS = """\
def length(prompts, completions):
    return [float(len(text)) for text in completions]

def short(prompts, completions):
    return [-float(len(text)) for text in completions]
"""
TINY = (
    *("logger=none", "trainer.precision=32-true", "data.batch_size=4", "paths.publish=false"),
    *("trainer.limit_train_batches=2", "trainer.limit_val_batches=1", "trainer.validations=1"),
    *("evaluation.num_prompts=4", "evaluation.max_new_tokens=4", "evaluation.num_samples=2"),
)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, start: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a model, a reward model, an exported run, records and rewards."""
    register()
    monkeypatch.chdir(tmp_path)
    for place in ("small", "run/export"):
        shutil.copytree(start, tmp_path / place)
    (tmp_path / "run/export/training_config.yaml").write_text("model: {name: ours}\n")
    rows = [{"prompt": f"what is {n} ?", "chosen": "sum", "rejected": "list"} for n in range(40)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    for name in ("preferences.jsonl", "prompts.jsonl", "my pairs (1).jsonl.gz", "2026.csv"):
        (tmp_path / name).write_text(text)
    (tmp_path / "reward.py").write_text(REWARDS)
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "small"}')


def both(functions: str, weights: str = "{}") -> str:
    parts = [
        f"{name}: {{_target_: 'rlhf_lightning.FunctionScorer', function: 'reward.py:{name}'}}"
        for name in functions.split()
    ]
    return f"scorer=weighted \"scorer.scorers={{{', '.join(parts)}}}\" 'scorer.weights={weights}'"


@pytest.mark.parametrize(
    ("short", "long"),
    [
        (
            "sft small preferences.jsonl",
            f"+experiment=sft {LONG} dataset.path=preferences.jsonl dataset.name=preferences "
            f"{NAMED} artifacts.base=small {FIT}",
        ),
        (
            "dpo org/small preferences.jsonl module.dpo.beta=0.2",
            f"+experiment=dpo {LONG} dataset.path=preferences.jsonl dataset.name=preferences "
            f"{NAMED} artifacts.sft=org/small module.dpo.beta=0.2",
        ),
        (
            "seed=3 kto run 'my pairs (1).jsonl.gz' lora=lora",  # a run's export, by its name
            f"+experiment=kto {LONG} dataset.path=\"'my pairs (1).jsonl.gz'\" "
            "dataset.name=my_pairs_1_ model.name=ours artifacts.sft=run/export seed=3 lora=lora "
            f"{FIT}",
        ),
        (
            "reward small 2026.csv dataset.name=chat model=smollm2_135m",
            "+experiment=reward model=smollm2_135m dataset=files dataset.path=2026.csv "
            f"dataset.name=chat artifacts.sft=small {FIT}",
        ),
        (
            "dpo small dataset=ultrafeedback",
            f"+experiment=dpo model=pretrained {NAMED} artifacts.sft=small dataset=ultrafeedback "
            f"{FIT}",
        ),
        (
            "grpo small --reward reward.py:length prompts.jsonl",
            f"+experiment=grpo {LONG} dataset.path=prompts.jsonl dataset.name=prompts {NAMED} "
            "artifacts.sft=small scorer=function scorer.function=reward.py:length "
            f"artifacts.reward=null {PROMPTS_FIT}",
        ),
        (
            "ppo small prompts.jsonl --reward=reward.py:length --reward reward.py:short=0.2",
            f"+experiment=ppo {LONG} dataset.path=prompts.jsonl dataset.name=prompts {NAMED} "
            f"artifacts.sft=small {both('length short', '{short: 0.2}')} "
            f"artifacts.reward=null module.value_head=zero {PROMPTS_FIT}",
        ),
        (
            "ppo small prompts.jsonl --reward-model org/reward",
            f"+experiment=ppo {LONG} dataset.path=prompts.jsonl dataset.name=prompts {NAMED} "
            f"artifacts.sft=small artifacts.reward=org/reward {PROMPTS_FIT}",
        ),
    ],
)
def test_the_short_way_is_the_configuration_of_the_overrides(short, long):
    words = spelled_out(shlex.split(short))
    ours, theirs = settings_of(*words), settings_of(*shlex.split(long))
    assert ours.config_hash == theirs.config_hash
    assert ours.resolved == theirs.resolved
    assert spelled_out(words) == words
    typed = shlex.split((told := about_words(words))["command"])[1:]
    assert all(word in short for word in typed if "=" not in word)
    assert sorted(spelled_out(typed)) == sorted(words)
    assert ("max_" in str(typed), str(told).count("max_")) == (False, str(words).count("max_"))


FUNCTION = "scorer=function scorer.function=reward.py:length"


@pytest.mark.parametrize(
    ("command", "line", "words"),
    [
        (
            "train",
            "--config-dir=. +experiment=ppo scorer=http seed=2 -m --reward reward.py:length",
            f"+experiment=ppo seed=2 {FUNCTION} artifacts.reward=null module.value_head=zero "
            "--config-dir=. -m",
        ),
        ("evaluate", "--cfg job run=a --reward reward.py:length", f"run=a {FUNCTION} --cfg job"),
        ("evaluate", "--reward-model org/r", "scorer=reward_model artifacts.reward=org/r"),
        ("collect", "--reward-model org/r name=a", "name=a artifacts.reward=org/r"),
        ("chat", "small --reward reward.py:length", f"small {FUNCTION}"),
        ("chat", "small --reward-model=org/r", "small reward=org/r"),
    ],
)
def test_a_reward_is_written_alike_for_every_command(command, line, words):
    assert spelled_out(shlex.split(line), command) == shlex.split(words)


def test_a_sweep_and_flags_go_with_the_short_way():
    line = "-m dpo small preferences.jsonl --config-dir=. module.dpo.beta=0.1,0.2"
    words = spelled_out(line.split())
    assert words[-3:] == ["module.dpo.beta=0.1,0.2", "-m", "--config-dir=."]  # as argparse reads
    assert spelled_out(["+experiment=ppo", "--cfg", "job"]) == ["+experiment=ppo", "--cfg", "job"]


STAGES = ("sft", "reward", "dpo", "kto", "grpo", "ppo", "distillation")


@pytest.mark.parametrize("name", STAGES)
def test_model_and_records_are_those_of_the_class(name):
    one, settings = read_experiment(name), settings_of(f"+experiment={name}")
    assert one.start == f"artifacts.{settings.spec.starts_from}"
    assert one.records == (settings.data.get("kind") or settings.spec.data.kinds[0])


@pytest.mark.parametrize("name", STAGES)
def test_no_stage_is_refused_for_the_default_lengths_of_a_short_context(name):
    further = ["--reward", "reward.py:length"] if name in ("grpo", "ppo") else []
    further += ["artifacts.teacher=small"] if name == "distillation" else []
    check_context_length(settings_of(*spelled_out([name, "run", "prompts.jsonl", *further])))


@pytest.mark.parametrize(
    ("line", "lengths"),
    [
        ("sft small prompts.jsonl data.max_length=96", ["evaluation.max_new_tokens=64"]),
        ("sft wide prompts.jsonl", []),
        ("sft_smollm2_shell nested prompts.jsonl", []),
        ("sft_smollm2_shell small prompts.jsonl", ["data.max_length=128"]),
        ("grpo wide dataset=tldr --reward reward.py:length", []),
        ("grpo nested dataset=tldr --reward reward.py:length", ["data.max_prompt_length=256"]),
        (
            "grpo nested prompts.jsonl --reward reward.py:short module.sampling.max_new_tokens=99",
            ["data.max_prompt_length=256"],
        ),
        ("grpo nested prompts.jsonl --reward reward.py:length data.max_prompt_length=x", []),
    ],
)
def test_a_length_is_lowered_only_where_it_does_not_fit_and_was_not_given(tmp_path, line, lengths):
    contexts = {"wide": {"n_positions": 1024}}
    contexts["nested"] = {"text_config": {"max_position_embeddings": 512}}
    for name, config in contexts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    words = shlex.split(line)
    assert [w for w in spelled_out(words) if "max_" in w and w not in words] == lengths


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("dpoo small preferences.jsonl", "did you mean dpo"),
        (
            "sft small prompts.jsonl data.max_length=300 evaluation.max_new_tokens=40",
            "data.max_length=300: the context of small has no room for so many tokens: use "
            "data.max_length=128",
        ),
        (
            "grpo small prompts.jsonl --reward reward.py:length data.max_prompt_length=120",
            "use data.max_prompt_length=64",
        ),
        (
            "dpo small",
            "a file of records (preferences), got small: write rlhf-train dpo MODEL FILE",
        ),
        ("dpo small preference.jsonl", "did you mean preferences.jsonl"),
        ("dpo ./smal preferences.jsonl", "OWNER/NAME on the hub; did you mean small?"),
        (
            "grpo small prompts.jsonl --reword reward.py:length",
            "unknown flag --reword; did you mean --reward",
        ),
        ("grpo small prompts.jsonl --rewards=reward.py:length", "did you mean --reward"),
        ("sft small prompts.jsonl --fast", "unknown flag --fast: see rlhf-train --help"),
        ("dpo small preferences.jsonl --reward reward.py:length", "leave --reward out"),
        ("ppo small prompts.jsonl", "ppo needs a reward: --reward FILE.py:NAME"),
        ("grpo small prompts.jsonl --reward reward.py", "write FILE.py:NAME"),
        (
            "+experiment=reward dataset=preferences.jsonl",
            "a file of records is given by dataset=files dataset.path=preferences.jsonl",
        ),
        ("--config prompts.jsonl", "write KEY: VALUE"),
        ("sft . prompts.jsonl", "is an adapter on small, and not a model: merge it"),
    ],
)
def test_a_mistake_is_one_line(line, told, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rlhf-train", *shlex.split(line)])
    with pytest.raises(SystemExit) as caught:
        check_command_line("train")
    error = capsys.readouterr().err
    assert told in error
    assert (caught.value.code, error.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    "words",
    [
        ["+experiment=ppo", "+dataset.source.num_texts=24", "~callbacks.samples"],
        ["+experiment=sft", "dataset=files", "dataset.path='a, b.jsonl'", "dataset.name='2026'"],
        ["+experiment=sft", "dataset.name='1e-5'", "data.max_length=null", "logger.tags=[a,'1']"],
        ["+experiment=grpo", *shlex.split(both("length short", "{short: 1e-3}"))],
        ["+experiment=ppo", "+sweeps=ppo_kl_coef", "hydra.mode=RUN", "model.license='it\\'s'"],
    ],
)
def test_the_file_of_a_run_composes_to_its_configuration(words, tmp_path):
    (tmp_path / "run.yaml").write_text(run_yaml(words))
    again = with_file(["--config", "run.yaml"])
    ours, theirs = (OmegaConf.to_container(composed("train", w)) for w in (words, again))
    assert isinstance(ours, dict)
    assert ours.pop("hydra")["mode"] == theirs.pop("hydra")["mode"]  # type: ignore[union-attr]
    assert ours == theirs


def test_a_file_may_be_nested_and_the_command_line_comes_behind_it(tmp_path, monkeypatch):
    (tmp_path / "run.yaml").write_text(
        "experiment: dpo\nmodel: smollm2_135m\nmodule: {dpo: {beta: 0.2, label_smoothing: 0.1}}\n"
        "module.dpo.learning_rate: 1e-5\nseed: 4\ndata.num_iterations: 3\n"
    )
    line = ["rlhf-train", "--config=run.yaml", "module.dpo.beta=0.3", "model=qwen3_0_6b"]
    monkeypatch.setattr(sys, "argv", line)
    words = words_of("train")
    assert sys.argv[1:] == words  # which ranks and jobs are started with
    assert words[-1] == "data.num_epochs=null"  # which has a default
    settings = settings_of(*words)
    dpo = settings.hparams
    assert (dpo.beta, dpo.label_smoothing, dpo.learning_rate) == (0.3, 0.1, 1e-5)
    assert (settings.seed, settings.model.name) == (4, "qwen3_0_6b")


def test_other_commands_with_a_run_folder_take_its_file_too(tmp_path, monkeypatch):
    (tmp_path / "run.yaml").write_text("seed: 2\nconfig_dir: [/a/b]\npaths: {outputs: o}\n")
    monkeypatch.setattr(sys, "argv", ["rlhf-collect", "--config", "run.yaml", "name=mine"])
    words = ["seed=2", "++paths.outputs=o", "name=mine", "--config-dir=/a/b"]
    assert words_of("collect") == words


@pytest.mark.parametrize("name", ["reward", "kto", "ppo"])
def test_a_recipe_runs_and_its_comments_are_the_defaults(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rlhf-train", "--recipe", name])
    print_recipe(["--recipe", name])
    text = capsys.readouterr().out.replace("FILE\n", "prompts.jsonl\n").replace("MODEL", "small")
    lines = [line for line in text.splitlines() if re.match(r"# [\w.]+: ", line)]
    assert len(lines) >= 10
    assert any(f"module.{name}" in line or "module.dpo" in line for line in lines)
    assert any("# peak learning rate" in line or "policy's rate" in line for line in lines)
    (tmp_path / "run.yaml").write_text(text)
    every = re.sub(r"^# ([\w.]+: )", r"\1", text, flags=re.M)
    (tmp_path / "every.yaml").write_text(every)
    found = [
        composed("train", with_file(["--config", f"{file}.yaml"])) for file in ("run", "every")
    ]
    bare, full = [OmegaConf.to_container(_without_hydra(cfg), resolve=True) for cfg in found]
    assert bare == full


def _without_hydra(cfg: Any) -> Any:
    cfg.hydra = None
    return cfg


@pytest.mark.parametrize("name", choices("experiment"))
def test_the_help_of_an_experiment_fits_and_has_what_it_takes_and_its_defaults(name):
    told, one = experiment_help("train", name), read_experiment(name)
    assert [line for line in told.splitlines() if len(line) > 80] == []
    wanted = ("+experiment=base",) if name == "base" else (one.start, one.records, *one.others)
    assert all(text in told for text in wanted)
    assert ("--reward-model FOLDER" in told) == one.needs_reward
    count = composed("train", [f"+experiment={name}"]).trainer.validations
    assert f"  trainer.validations={count}\n" in told


def test_a_recipe_takes_further_words():
    content = yaml.safe_load(recipe("dpo", ["lora=lora", "module.dpo.beta=0.2"]))
    assert (content["lora"], content["module.dpo.beta"]) == ("lora", 0.2)


@pytest.mark.thorough
def test_a_run_of_the_short_way_says_what_it_stands_for_and_its_file_runs_it_again(tmp_path):
    line = ("dpo", "small", "preferences.jsonl", "module.dpo.beta=0.2", "data.max_length=64", *TINY)
    first = train(tmp_path, *line, "hydra.run.dir=first")
    assert first.returncode == 0, first.stderr
    told = first.stderr.splitlines()[0]
    assert told.startswith("rlhf-train +experiment=dpo model=pretrained model.name=small ")
    file = tmp_path / "first/run.yaml"
    content = yaml.safe_load(file.read_text())
    assert content["artifacts.sft"] == "small"
    assert content["module.dpo.beta"] == 0.2
    assert "hydra.run.dir" not in content
    second = train(tmp_path, "--config", "first/run.yaml", "hydra.run.dir=second")
    assert second.returncode == 0, second.stderr
    before, after = (
        json.loads((tmp_path / run / "summary.json").read_text()) for run in ("first", "second")
    )
    assert before["config_hash"] == after["config_hash"]
    assert before["metrics"] == after["metrics"]
    assert (tmp_path / "second/run.yaml").read_text() == file.read_text()
    printed = settings_of(*shlex.split(told)[1:])
    assert printed.config_hash == before["config_hash"]


def test_the_home_folder_is_read_behind_a_key_and_from_python(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    words = ["+experiment=sft", "artifacts.base=~/m", "paths.outputs=~", "gates=none"]
    monkeypatch.setattr(sys, "argv", ["train", *words])
    settings = check_command_line("train")
    assert settings.artifacts.base == f"{tmp_path}/m"
    assert settings.paths.outputs == str(tmp_path)
    assert RunFolder(Path("~/run")).create().path == tmp_path / "run"
    with replacing_folder("~/made") as staging:
        staging.mkdir()
    assert (tmp_path / "made").is_dir()
