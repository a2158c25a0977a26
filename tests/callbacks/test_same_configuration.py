"""What must be the same on every rank, and after a resume, is compared before it trains."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlhf_lightning.app.train import run
from rlhf_lightning.callbacks.exact_resume import SameConfiguration, SameRewards, reward_digests
from rlhf_lightning.data.datamodules import DemonstrationDataModule
from rlhf_lightning.data.demo.vocabulary import demo_tokenizer
from rlhf_lightning.data.record_datamodule import RecordDataModule
from rlhf_lightning.modules.base import RLHFModule
from rlhf_lightning.rollout.scorers.base import FunctionScorer, NoReward, WeightedScorer
from rlhf_lightning.rollout.scorers.functions import load_function
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.summary import read_summary, write_summary
from tests.builders.ranks import SimulatedRanks
from tests.builders.runs import completed, settings_for

REWARD = "def f(prompts, completions, **columns):\n    return [{} for c in completions]\n"
NONE: Any = None
FITTING: Any = SimpleNamespace(state=SimpleNamespace(fn="fit"))


def reward(folder: Path, score: str) -> str:
    file = folder / "reward.py"
    file.write_text(REWARD.format(score))
    return f"{file}:f"


def rewards_of(scorer: Any) -> SameRewards:
    callback = SameRewards()
    callback.setup(NONE, cast(Any, SimpleNamespace(scorer=scorer)), "fit")
    return callback


def test_a_reward_function_has_the_digest_of_its_file(tmp_path):
    name = reward(tmp_path, "len(c)")
    inner = FunctionScorer(name)
    digest = hashlib.sha256((tmp_path / "reward.py").read_bytes()).hexdigest()
    assert reward_digests(inner) == {name: f"{digest}:f"}
    assert reward_digests(WeightedScorer({"a": inner})) == {name: f"{digest}:f"}
    ours = "rlhf_lightning.rollout.scorers.verifiable.command_reward"
    assert reward_digests(FunctionScorer(ours)) == reward_digests(None) == {}


def test_a_function_that_is_given_itself_is_compared_by_its_file_or_in_a_program_alone(tmp_path):
    def digests(score: str, more: str = "", module: str = "mine", **bound: float) -> dict[str, str]:
        file = tmp_path / "reward.py"
        file.write_text(REWARD.format(score) + more)
        function = load_function(f"{file}:f")
        function.__module__ = module
        return reward_digests(FunctionScorer(partial(function, **bound) if bound else function))

    assert digests("len(c)") == digests("len(c)") != digests("-len(c)")
    assert digests("len(c)") != digests("len(c)", "more = 1\n")
    program = digests("len(c)", module="__main__")
    assert program == digests("len(c)", "more = 1\n", "__main__")
    assert program != digests("-len(c)", module="__main__")
    assert digests("len(c)", weight=1.0) != digests("len(c)", weight=2.0)


def test_a_function_that_was_edited_is_refused_at_a_resume(tmp_path, caplog):
    checkpoint: dict[str, Any] = {}
    name = reward(tmp_path, "len(c)")
    rewards_of(FunctionScorer(name)).on_save_checkpoint(NONE, NONE, checkpoint)
    (tmp_path / "moved").mkdir()
    moved = rewards_of(FunctionScorer(reward(tmp_path / "moved", "len(c)")))
    moved.on_load_checkpoint(FITTING, NONE, checkpoint)
    edited = rewards_of(FunctionScorer(reward(tmp_path, "-len(c)")))
    with pytest.raises(ValueError, match=r"another reward than .*reward\.py:f \(\w{12}\)"):
        edited.on_load_checkpoint(FITTING, NONE, checkpoint)
    edited.on_load_checkpoint(FITTING, NONE, {})  # of a Trainer without the callback
    assert "does not say with which reward it was trained" in caplog.text


@pytest.mark.thorough
def test_the_older_run_that_has_checkpoints_is_continued(start, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = settings_for("sft", start, "resume=auto", "paths.outputs=outputs")
    runs = Path("outputs") / "sft"
    older = completed(runs / "2026-01-01_00-00-00", "sft", start)
    summary = replace(read_summary(older), status="failed", config_hash=asked.config_hash)
    write_summary(older, summary)
    (newer := RunFolder(runs / "2026-01-02_00-00-00")).path.mkdir()
    write_summary(newer, summary)
    run(asked, RunFolder(runs / "2026-01-03_00-00-00"), [])
    assert read_summary(older).status == "completed"
    assert read_summary(newer).status == "failed"


def refusals(monkeypatch: pytest.MonkeyPatch, check: Callable[[int], object]) -> list[str]:
    def one(rank: int) -> str:
        try:
            check(rank)
        except RuntimeError as error:
            return str(error)
        return ""

    return SimulatedRanks(monkeypatch, 2).run(one)


def test_ranks_with_other_data_are_refused_on_each(monkeypatch, tmp_path):
    monkeypatch.setattr(RecordDataModule, "_world_size", 2)
    tokenizer = demo_tokenizer()
    for rank in range(2):
        rows = [{"prompt": f"what is {i} ?", "completion": "it is good ."} for i in range(8)]
        rows[-1]["completion"] = ("no .", "it is .")[rank]
        (tmp_path / f"{rank}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def loader(file: str) -> object:
        path = tmp_path / file
        data = DemonstrationDataModule(path, tokenizer, batch_size=2, num_iterations=1)
        return data.train_dataloader()

    assert refusals(monkeypatch, lambda rank: loader("0.jsonl")) == ["", ""]
    found = refusals(monkeypatch, lambda rank: loader(f"{rank}.jsonl"))
    assert ["same data" in text for text in found] == [True, True]


def test_other_configurations_are_named_before_the_data_that_they_change(monkeypatch):
    # Lightning asks for the batches between `setup` and `on_fit_start`.
    found = refusals(
        monkeypatch, lambda r: SameConfiguration(f"{r}", "runs").setup(NONE, NONE, "fit")
    )
    assert ["same configuration" in text for text in found] == [True, True]


def test_ranks_with_another_reward_or_start_are_refused_on_each(monkeypatch):
    def other(rank: int) -> None:
        callback = rewards_of(NoReward())
        callback.found = {"it": f"{rank}"}
        callback.on_fit_start(NONE, NONE)

    assert ["same reward" in text for text in refusals(monkeypatch, other)] == [True, True]

    def start(rank: int) -> None:
        module: Any = SimpleNamespace(fingerprint=f"{rank}", more_sources=())
        RLHFModule.on_fit_start(module)

    assert ["same start" in text for text in refusals(monkeypatch, start)] == [True, True]
