"""An objective and a scorer of a user's: a class and a YAML file each, and all works with them.

`tests/own` is the user's package, and its `conf` the user's folder of configurations.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_lightning import PolicyGradientModule
from rlhf_lightning.app import plan, train
from rlhf_lightning.app.as_python import as_python
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.start import start as start_command
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.summary import read_summary
from tests.builders.command_lines import ROOT, SMALL, overrides_of, settings_of
from tests.entry.test_as_python import figures
from tests.own.words import WordScorer

ESTIMATOR = """
class Halved:
    scale_free = False

    def __call__(self, rewards, values, mask, group_ids):
        return (rewards.sum(-1, keepdim=True) / 2).expand_as(rewards) * mask, None


class NoEstimator:
    pass
"""
CONF = f"--config-dir={ROOT / 'tests/own/conf'}"
WORDS = [
    CONF,
    "+experiment=online_dpo",
    *SMALL,
    "module.sampling.max_new_tokens=6",
    "module.online_dpo.micro_batch_size=4",
]


@pytest.fixture(autouse=True, scope="module")
def trusted() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLHF_ALLOWED_TARGETS", "tests.own.")
        yield


@pytest.fixture(scope="module")
def command(start: Path, trusted: None, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The folder of a whole run."""
    return trained(start, tmp_path_factory.mktemp("command") / "run")


def settings(start: Path, *more: str) -> TrainSettings:
    found: TrainSettings = settings_of(*WORDS, f"artifacts.sft={start}", *more)
    return found


def trained(start: Path, folder: Path, *more: str) -> RunFolder:
    made = RunFolder(folder).create()
    train.run(settings(start, *more), made, [])
    return made


def same_weights(one: RunFolder, other: RunFolder) -> bool:
    files = [folder.export / "model.safetensors" for folder in (one, other)]
    return files[0].read_bytes() == files[1].read_bytes()


def test_a_command_trains_it_and_its_program_does_the_same_to_the_bit(
    start, command, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(as_python(settings(start), WORDS), "program", "exec"), names)
    (found,) = tmp_path.glob("outputs/*/program/summary.json")
    program = RunFolder(found.parent)
    assert same_weights(program, command)
    assert figures(program) == figures(command)
    summary = read_summary(command)
    assert (summary.stage, summary.status) == ("online_dpo", "completed")
    assert {"val/gold_win_rate", "val/score_win_rate"} <= set(summary.metrics)
    assert summary.title == "Online DPO"
    rows = figures(command)
    assert len(rows) == 3
    assert {"online_dpo/loss", "online_dpo/accuracy", "online_dpo/grad_norm"} <= set(rows[0])
    assert rows[0]["online_dpo/loss"] == pytest.approx(math.log(2), rel=0.01)  # at first ratio 1


def test_a_run_of_it_goes_on_from_a_checkpoint_to_the_same_bits(start, command, tmp_path) -> None:
    (checkpoint,) = command.checkpoints.glob("*2.ckpt")
    resumed = trained(start, tmp_path / "resumed", f"ckpt_path='{checkpoint}'")
    assert same_weights(command, resumed)


@pytest.mark.thorough
def test_the_example_of_a_loss_is_trained_by_a_command(start, tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setenv("RLHF_ALLOWED_TARGETS", "online_dpo")
    words = [*overrides_of("grpo", start), "data.num_generations=2"]
    words += ["module.grpo.micro_batch_size=1"]
    words += ["module._target_=online_dpo.OnlineDPOModule.from_pretrained"]
    made = RunFolder(tmp_path / "run").create()
    train.run(settings_of(*words), made, [])
    assert (read_summary(made).status, read_summary(made).title) == ("completed", "Online DPO")
    assert figures(made)[0]["grpo/policy_loss"] <= math.log(2)


@pytest.mark.thorough
def test_an_estimator_is_named_by_its_file(start, tmp_path) -> None:
    (tmp_path / "mine.py").write_text(ESTIMATOR)
    named = f"{tmp_path}/mine.py:Halved"
    made = RunFolder(tmp_path / "run").create()
    words = [*overrides_of("grpo", start), f"module.estimator={named}"]
    train.run(settings_of(*words), made, [])
    assert (read_summary(made).status, len(figures(made))) == ("completed", 3)
    assert f'estimator="{named}"' in as_python(settings_of(*words), words)
    checkpoint = made.checkpoints / "last.ckpt"
    with pytest.raises(ValueError, match=r"load_from_checkpoint\(path, estimator="):
        PolicyGradientModule.load_from_checkpoint(checkpoint, reward=WordScorer(wanted=3))
    read = PolicyGradientModule.load_from_checkpoint(
        checkpoint, reward=WordScorer(wanted=3), estimator=named
    )
    assert type(read.estimator).__name__ == "Halved"


def test_a_file_without_such_an_estimator_is_refused(start, tmp_path) -> None:
    (tmp_path / "mine.py").write_text(ESTIMATOR)
    told = {"Nowhere": "estimator .*'Nowhere'", "NoEstimator": "AdvantageEstimator"}
    for name, message in told.items():
        with pytest.raises((TypeError, ValueError), match=message):
            PolicyGradientModule.from_pretrained(
                start, WordScorer(wanted=3), estimator=f"{tmp_path}/mine.py:{name}"
            )


@pytest.mark.thorough
def test_commands_take_its_folder_of_configurations(start, monkeypatch, capsys) -> None:
    given = ["--config-dir", CONF.partition("=")[2], *WORDS[1:], f"artifacts.sft={start}"]
    monkeypatch.setattr("sys.argv", ["plan", *given, "plan.device=cpu", "plan.format=json"])
    plan.main()
    assert {"generate", "update"} <= set(json.loads(capsys.readouterr().out)["phases"])
    monkeypatch.setattr("sys.argv", ["train", *given, "--as-python"])
    start_command("train")
    assert "reward=WordScorer(wanted=6),\n" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["train", *given, "module.online_dpo.betta=1"])
    with pytest.raises(SystemExit):
        start_command("train")
    assert "did you mean module.online_dpo.beta" in capsys.readouterr().err


@pytest.mark.thorough
def test_adapters_gates_and_the_doctor_work_with_it(start, tmp_path) -> None:
    made = trained(start, tmp_path / "run", "lora=lora", "gates=ppo", "doctor=act")
    summary = read_summary(made)
    assert (summary.status, bool(summary.gates)) == ("completed", True)
    assert (made.export / "adapter").is_dir()
