from __future__ import annotations

import math
from dataclasses import replace

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from rlhf_lightning.callbacks.checkpointing import IterationCheckpoint
from rlhf_lightning.evaluation.final_metrics import held_out_loss
from rlhf_lightning.models.factory import load_policy
from rlhf_lightning.modules import base
from tests.builders.models import EOS, config_fields, flat_parameters
from tests.builders.stages import (
    ANSWER_LENGTHS,
    assert_two_ranks_step_as_one,
    sft_batch,
    tiny_sft,
    trainer,
    untaken_step,
    without_trainer,
)


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_the_loss_is_the_mean_cross_entropy_of_the_answers_without_any_padding(model_type):
    module = tiny_sft(model_type)
    module.configure_model()
    batch = sft_batch(fill=EOS)
    num_tokens = batch.loss_mask.sum()
    with torch.no_grad():
        loss = module.loss(batch, num_tokens)
        total = 0.0
        for row in range(len(batch)):
            ids = batch.input_ids[row][batch.attention_mask[row]]
            first = len(ids) - ANSWER_LENGTHS[row]
            logits = module.policy.model(ids[None]).logits[0]
            total += float(cross_entropy(logits[first - 1 : -1], ids[first:], reduction="sum"))
    assert float(loss) == pytest.approx(total / sum(ANSWER_LENGTHS), abs=1e-5)


def test_loss_and_gradient_do_not_depend_on_micro_batches_or_padding():
    module = without_trainer(tiny_sft())
    expected, gradient = untaken_step(module, sft_batch())
    assert gradient.abs().max() > 1e-2
    for micro_batch_size, shape in ((1, {}), (3, {}), (None, {"fill": EOS, "width": 40})):
        module.algorithm = replace(module.algorithm, micro_batch_size=micro_batch_size)
        got, other = untaken_step(module, sft_batch(**shape))
        assert got["sft/loss"] == pytest.approx(expected["sft/loss"], abs=1e-6)
        torch.testing.assert_close(other, gradient, rtol=0, atol=1e-5)


def test_two_ranks_take_the_same_steps_as_one(monkeypatch):
    batches = [sft_batch(seed=seed) for seed in range(3)]
    assert_two_ranks_step_as_one(
        monkeypatch,
        lambda: without_trainer(tiny_sft(micro_batch_size=3)),
        batches,
        ("sft/loss", "sft/grad_norm"),
    )


class Checked(L.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, *rest) -> None:
        self.losses.append(float(trainer.callback_metrics["sft/loss"]))


def test_it_learns_demonstrations_and_validates_by_the_token():
    module, checked = tiny_sft(learning_rate=3e-3), Checked()
    the_trainer = trainer(callbacks=[checked], val_check_interval=10)
    train = DataLoader([sft_batch() for _ in range(30)], batch_size=None)
    # Two validation batches of other sizes: a mean of means would be another number.
    held_out = [sft_batch(seed=9)[:1], sft_batch(seed=9)[1:]]
    the_trainer.fit(module, train, DataLoader(held_out, batch_size=None))
    assert the_trainer.global_step == len(checked.losses) == 30
    assert checked.losses[-1] < 0.3 * checked.losses[0]
    whole = sft_batch(seed=9)
    with torch.no_grad():
        expected = module.loss(whole, whole.loss_mask.sum())
    assert float(the_trainer.callback_metrics["val/loss"]) == pytest.approx(
        float(expected), abs=1e-5
    )
    assert held_out_loss(module, module.policy, held_out) == pytest.approx(
        float(expected), abs=1e-5
    )
    other = load_policy(from_scratch=config_fields("gpt2"))
    with torch.no_grad():
        others = float(module.loss(whole, whole.loss_mask.sum(), other))
    assert abs(others - float(expected)) > 0.05
    assert held_out_loss(module, other, held_out) == pytest.approx(others, abs=1e-5)
    names = {"sft/loss", "sft/grad_norm", "sft/learning_rate", "time/update", "val/loss"}
    names |= {"sft/skipped_steps", "time/validate"}
    assert names | {"throughput/tokens_per_second"} == set(the_trainer.callback_metrics)


class Breaking(L.Callback):
    """After the second iteration one of two held-out batches has a loss that is not finite."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        if batch_idx == 1:
            whole = module.loss
            module.loss = lambda batch, *rest: (
                whole(batch, *rest) * (math.nan if len(batch) == 1 else 0.1)
            )


def test_a_held_out_batch_that_is_not_finite_makes_no_better_loss(tmp_path):
    best = IterationCheckpoint(tmp_path, monitor="val/loss")
    stopping = EarlyStopping("val/loss", check_on_train_epoch_end=False)
    the_trainer = trainer(
        callbacks=[Breaking(), stopping, best], val_check_interval=1, enable_checkpointing=True
    )
    train = DataLoader([sft_batch() for _ in range(4)], batch_size=None)
    held_out = [sft_batch(seed=9)[:1], sft_batch(seed=9)[1:]]
    the_trainer.fit(tiny_sft(), train, DataLoader(held_out, batch_size=None))
    assert math.isnan(float(the_trainer.callback_metrics["val/loss"]))
    assert best.best_iteration == 1
    assert the_trainer.global_step == 2, "early stopping ends the run"
    assert math.isfinite(float(stopping.best_score))


def test_dropout_trains_and_the_validation_has_none():
    module = tiny_sft()
    module.build_models = lambda: load_policy(from_scratch=config_fields("gpt2"), dropout=0.2)
    batch = sft_batch()
    the_trainer = trainer()
    loader = DataLoader([batch], batch_size=None)
    the_trainer.fit(module, loader)
    module.train()
    count = batch.loss_mask.sum()
    with torch.no_grad():
        assert module.loss(batch, count) != module.loss(batch, count)
        (first,) = the_trainer.validate(module, loader, verbose=False)
        (second,) = the_trainer.validate(module, loader, verbose=False)
    assert first == second


def test_ranks_that_are_seeded_alike_drop_otherwise(monkeypatch):
    found = []
    for rank in (0, 1, 1):
        monkeypatch.setattr(base, "rank", lambda rank=rank: rank)
        module = tiny_sft()
        module.build_models = lambda: load_policy(from_scratch=config_fields("gpt2"), dropout=0.2)
        torch.manual_seed(5)
        trainer().fit(module, DataLoader([sft_batch()], batch_size=None))
        found.append(flat_parameters(module))
    assert torch.equal(found[1], found[2])
    assert not torch.equal(found[0], found[1])
