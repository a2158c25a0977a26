"""A loss, gradient or score that is not finite: skipped, counted, told, and in the end fatal."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from rlhf_lightning.callbacks.run_tables import SaveFaultyBatch
from rlhf_lightning.modules.non_finite import NonFiniteError, SkippedSteps
from rlhf_lightning.modules.optimization import Schedule
from rlhf_lightning.runs.folder import RunFolder
from tests.builders.models import tiny_tokenizer
from tests.builders.stages import (
    ROWS,
    ppo_hparams,
    preference_batch,
    prompts,
    sft_batch,
    tiny_module,
    tiny_reward,
    tiny_sft,
    trainer,
)
from tests.faults.poison import Poison, scorer_with

NUM_ITERATIONS = 4


def stage(name: str, **hparams: Any) -> tuple[Any, list[Any]]:
    iterations = range(NUM_ITERATIONS)
    if name == "sft":
        return tiny_sft(micro_batch_size=3, **hparams), [sft_batch(seed=i) for i in iterations]
    if name == "reward":
        batches = [preference_batch(seed=i) for i in iterations]
        return tiny_reward(micro_batch_size=3, **hparams), batches
    module = tiny_module(ppo=ppo_hparams(num_minibatches=2, **hparams))
    return module, [prompts(i) for i in iterations]


def fit(module: Any, batches: list[Any], *callbacks: Any) -> Any:
    module.tokenizer = tiny_tokenizer()
    the_trainer = trainer(callbacks=list(callbacks))
    the_trainer.fit(module, DataLoader(batches, batch_size=None))
    return the_trainer


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("name", ["sft", "reward", "ppo"])
def test_a_step_that_is_not_finite_touches_neither_weights_nor_adam(name, where, caplog):
    module, batches = stage(name)
    module.schedule = Schedule("linear")
    poison = Poison(where, {2})
    fit(module, batches, poison)
    steps = {"sft": 1, "reward": 1, "ppo": 4}[name]
    assert [poison.moved(i + 1) for i in range(4)] == [True, False, True, True]
    assert [row[f"{name}/skipped_steps"] for row in poison.rows] == [0, steps, 0, 0]
    rates = [row[f"{name}/learning_rate"] for row in poison.rows]
    assert rates == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4]), "the schedule goes on"
    told = [r.getMessage() for r in caplog.records if r.name.endswith("non_finite")]
    assert len(told) == steps, "once an occurrence"
    assert f"module.{name}.max_skipped_steps=10" in told[0]
    if name == "ppo":
        assert [row["ppo/num_updates"] for row in poison.rows] == [4, 0, 4, 4]
    # What was not finite is not logged; what was, is.
    loss = {"ppo": "ppo/policy_loss"}.get(name, f"{name}/loss")
    assert [loss in row for row in poison.rows] == [
        True,
        where == "gradient" and name != "ppo",
        True,
        True,
    ]


def test_one_bad_minibatch_does_not_keep_ppo_from_the_others():
    module, batches = stage("ppo")
    update, calls = module.update, []

    def update_with_one_bad(minibatch, steps, **where):
        calls.append(where)
        poison.now = len(calls) == 2
        return update(minibatch, steps, **where)

    poison = Poison("loss")
    module.update = update_with_one_bad
    fit(module, batches, poison)
    assert [row["ppo/num_updates"] for row in poison.rows] == [3, 4, 4, 4]
    assert [row["ppo/skipped_steps"] for row in poison.rows] == [1, 0, 0, 0]


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_score_that_is_not_finite_skips_the_rollout_and_spares_the_controller(bad, caplog):
    hparams = {"kl_target": 0.5, "kl_horizon": 200, "score_clip": None}
    module, batches = stage("ppo", **hparams)
    module.scorer = scorer_with({2: bad}, ROWS)
    poison = Poison("nothing")
    fit(module, batches, poison)
    assert [poison.moved(i + 1) for i in range(4)] == [True, False, True, True]
    assert [row["ppo/num_updates"] for row in poison.rows] == [4, 0, 4, 4]
    assert [row["ppo/skipped_steps"] for row in poison.rows] == [0, 1, 0, 0]
    assert "rollout/score" not in poison.rows[1]
    assert "rollout/kl_per_token" in poison.rows[1]
    assert math.isfinite(module.controls.kl_coef)
    assert "iteration 2: 1 of 16 scores is not finite" in caplog.text


@pytest.mark.parametrize("name", ["sft", "reward", "ppo"])
def test_too_many_in_a_row_stop_the_run_and_keep_the_batch(name, tmp_path):
    module, batches = stage(name, max_skipped_steps={"ppo": 7}.get(name, 1))
    folder = RunFolder(tmp_path)
    poison = Poison("loss", {2, 3})
    with pytest.raises(NonFiniteError) as caught:
        fit(module, batches, poison, SaveFaultyBatch(folder))
    message = str(caught.value)
    assert f"module.{name}.max_skipped_steps={7 if name == 'ppo' else 1}" in message
    saved = folder.faults / "iteration=000003"
    assert str(saved) in message
    tensors = load_file(saved / "rank_0.safetensors")
    if name == "sft":
        assert torch.equal(tensors["input_ids"], batches[2].input_ids)
        assert torch.equal(tensors["loss_mask"], batches[2].loss_mask)
    if name == "reward":
        assert torch.equal(tensors["chosen_input_ids"], batches[2].chosen_input_ids)
    rows = [json.loads(line) for line in (saved / "rank_0.jsonl").read_text().splitlines()]
    assert [row["row"] for row in rows] == list(range(8))
    texts = {"sft": ["text"], "reward": ["chosen", "rejected"], "ppo": ["prompt", "response"]}
    assert all(row[key].startswith(("w", "<eos>")) for row in rows for key in texts[name])


def test_a_stopped_rollout_says_which_rows_were_not_finite(tmp_path):
    module, batches = stage("ppo", max_skipped_steps=0)
    module.scorer = scorer_with({1: math.nan}, ROWS)
    folder = RunFolder(tmp_path)
    with pytest.raises(NonFiniteError, match="1 of 16 scores"):
        fit(module, batches, SaveFaultyBatch(folder))
    saved = folder.faults / "iteration=000001"
    rows = [json.loads(line) for line in (saved / "rank_0.jsonl").read_text().splitlines()]
    assert len(rows) == ROWS
    assert "scores" in rows[0]["not_finite"]
    assert all("scores" not in row.get("not_finite", ()) for row in rows[1:])


def test_the_count_in_a_row_is_in_the_checkpoint():
    counter, other = SkippedSteps(5, "k"), SkippedSteps(5, "k")
    batch = sft_batch()
    for _ in range(3):
        assert not counter.should_step({"x": math.nan}, batch, 0)
    other.load_state_dict(counter.state_dict())
    assert other.consecutive_skips == 3
    assert not other.should_step({"x": math.nan}, batch, 1)
    assert not other.should_step({"x": math.nan}, batch, 1)
    with pytest.raises(NonFiniteError):
        other.should_step({"x": math.nan}, batch, 1)
