from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback

from rlhf_lightning.batches import FINISHED_BY_LENGTH, FINISHED_BY_STOP, RolloutBatch
from rlhf_lightning.callbacks import run_tables
from rlhf_lightning.callbacks.run_tables import SampleLog, describe_rollout, rollout_values
from rlhf_lightning.hparams import SamplingHparams
from rlhf_lightning.runs.folder import RunFolder, SamplesAppender, read_metrics, read_samples
from tests.builders.models import tiny_tokenizer
from tests.callbacks.tiny_run import KilledError, run


def make_rollout() -> RolloutBatch:
    """Two rows: prompt 5 with response 7 8 EOS, and prompt 5 6 with response 9 9 9 9 cut off."""
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]).bool()
    per_token = torch.zeros(2, 4)
    logprobs = torch.tensor([[-1.0, -1.0, -1.0, 99.0], [-2.0, -2.0, -2.0, -2.0]])
    ref_logprobs = torch.tensor([[-1.3, -1.6, -1.0, -99.0], [-2.0, -2.0, -2.0, -1.0]])
    return RolloutBatch(
        sequences=torch.tensor([[0, 5, 7, 8, 1, 0], [5, 6, 9, 9, 9, 9]]),
        attention_mask=torch.tensor([[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]).bool(),
        response_mask=mask,
        logprobs=logprobs,
        ref_logprobs=ref_logprobs,
        values=per_token,
        scores=torch.tensor([1.5, -0.5]),
        rewards=per_token,
        advantages=per_token,
        returns=per_token,
        entropy=per_token,
        finish_reason=torch.tensor([FINISHED_BY_STOP, FINISHED_BY_LENGTH]),
        row_ids=torch.arange(2),
        prompt_length=2,
        domains=("sums", "lists"),
        score_components={"reward": torch.zeros(2)},
    )


def test_a_sample_has_text_score_kl_per_token_and_length_with_eos():
    first, second = describe_rollout(make_rollout(), tiny_tokenizer(), 8)
    assert first == {
        "prompt": "w5",
        "response": "w7 w8",
        "score": 1.5,
        "kl": pytest.approx((0.3 + 0.6 + 0.0) / 3, rel=1e-5),
        "length": 3,
        "domain": "sums",
        "finished": True,
    }
    assert second["kl"] == pytest.approx(-1.0 / 4)
    assert second["prompt"] == "w5 w6"
    assert second["length"] == 4
    assert second["finished"] is False
    assert len(describe_rollout(make_rollout(), tiny_tokenizer(), 1)) == 1


class Rollouts(Callback):
    """Makes the step return a rollout, as PPO's does."""

    def setup(self, trainer, pl_module, stage):
        pl_module.tokenizer, pl_module.sampling = tiny_tokenizer(), SamplingHparams()
        step = pl_module.training_step

        def training_step(batch, batch_idx):
            step(batch, batch_idx)
            return {"rollout": make_rollout()}

        pl_module.training_step = training_step


def test_samples_are_written_at_the_first_last_and_every_nth_iteration_and_cut_on_resume(tmp_path):
    def callbacks(folder: Path) -> list[Callback]:
        log = SampleLog(RunFolder(folder), every_n_iterations=3, num_samples=1)
        return [Rollouts(), log]

    whole = tmp_path / "whole"
    run(whole, num_iterations=7, callbacks=callbacks(whole))
    assert [s["iteration"] for s in read_samples(whole / "samples.jsonl")] == [1, 3, 6, 7]
    folder = tmp_path / "killed"
    with pytest.raises(KilledError):
        run(folder, num_iterations=7, die_at=("train", 4), callbacks=callbacks(folder))
    for name in ("samples.jsonl", "distributions.jsonl"):
        SamplesAppender(folder / name).append(5, [{"response": "of the dead run"}])
    run(folder, num_iterations=7, resume=True, callbacks=callbacks(folder))
    for name in ("samples.jsonl", "distributions.jsonl"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()


def test_all_rows_of_a_rollout_have_score_and_length_and_those_of_a_prompt_are_counted(tmp_path):
    rollout = make_rollout()
    values = rollout_values(rollout)
    assert values["score"] == rollout.scores.tolist()
    assert values["length"] == rollout.response_mask.sum(1).tolist()
    assert "groups" not in values  # a prompt has one response
    scored, groups = torch.tensor([True, False]), torch.tensor([7, 7])
    values = rollout_values(replace(rollout, group_ids=groups, group_size=None, scored=scored))
    assert values["groups"] == [2]
    assert [math.isnan(score) for score in values["score"]] == [False, True]


def test_the_values_of_all_ranks_are_written(tmp_path, monkeypatch):
    other = {"score": [7.0], "length": [9]}
    monkeypatch.setattr(run_tables, "gathered", lambda own: [own, other])
    run(tmp_path, num_iterations=2, callbacks=[Rollouts(), SampleLog(RunFolder(tmp_path))])
    row, _ = read_samples(tmp_path / "distributions.jsonl")
    assert row["score"] == [*make_rollout().scores.tolist(), 7.0]
    assert row["length"] == [*make_rollout().response_mask.sum(1).tolist(), 9]


def test_validation_stands_on_the_row_of_its_iteration_and_on_no_other(tmp_path):
    run(tmp_path, num_iterations=7, validate_every=3)
    rows = read_metrics(tmp_path / "metrics.csv")
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert [row["iteration"] for row in rows if "val/loss" in row] == [3, 6]
    assert all("ppo/loss" in row for row in rows)
    assert len({row["ppo/batch"] for row in rows}) == 7


class StopLate(Callback):
    """Asks for the end after `MetricsLog` has written its row; Lightning then validates."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop = batch_idx + 1 >= 4


def test_a_validation_nobody_expected_joins_the_row_that_is_already_written(tmp_path):
    run(tmp_path, num_iterations=9, validate_every=3, callbacks=[StopLate()])
    rows = read_metrics(tmp_path / "metrics.csv")
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4]
    assert [row["iteration"] for row in rows if "val/loss" in row] == [3, 4]
