from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch.nn.functional import logsigmoid

from rlhf_lightning import DPOHparams, DPOModule, LoraHparams, PreferenceDataModule
from rlhf_lightning.batches import PreferenceBatch
from rlhf_lightning.data.sources.base import PreferenceFolder
from rlhf_lightning.models.factory import load_policy
from rlhf_lightning.modules import dpo
from rlhf_lightning.modules.dpo import pair_logprobs
from tests.builders.library_runs import Stop, assert_same_weights, fit_in, rows
from tests.builders.models import EOS, flat_gradients
from tests.builders.record_files import row_text, write_material
from tests.builders.stages import (
    assert_two_ranks_step_as_one,
    preference_batch,
    tiny_dpo,
    untaken_step,
    without_trainer,
)
from tests.builders.stages import trainer as trainer_of

ITERATIONS = 4


def with_references(module: Any, offset: float = 0.0) -> Any:
    """Give a module without data the references of `preference_batch`, moved by `offset`."""
    module = without_trainer(module)
    with torch.no_grad():
        table = torch.stack(pair_logprobs(module.policy, preference_batch()), -1)
    noise = torch.randn(table.shape, generator=torch.Generator().manual_seed(2))
    module.references.tables = {"train": table + offset * noise}
    return module


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_log_probabilities_are_those_of_single_answers_by_transformers(model_type):
    module = without_trainer(tiny_dpo(model_type))
    batch = preference_batch(width=40, fill=EOS)
    with torch.no_grad():
        for name, got in zip(
            ("chosen", "rejected"), pair_logprobs(module.policy, batch), strict=True
        ):
            ids, mask = (
                getattr(batch, f"{name}_input_ids"),
                getattr(batch, f"{name}_attention_mask"),
            )
            for row, length in enumerate(getattr(batch, f"{name}_length").tolist()):
                alone = ids[row][mask[row]][None]
                assert alone[0, -1] == EOS
                logprobs = module.policy.model(input_ids=alone).logits[0].log_softmax(-1)
                by_token = logprobs[:-1].gather(1, alone[0, 1:, None])
                assert float(got[row]) == pytest.approx(float(by_token[-length:].sum()), abs=1e-4)


@pytest.mark.parametrize(
    ("hparams", "formula"),
    [
        ({"beta": 0.3}, lambda h: -logsigmoid(0.3 * h)),
        (
            {"beta": 0.3, "label_smoothing": 0.2},
            lambda h: -0.8 * logsigmoid(0.3 * h) - 0.2 * logsigmoid(-0.3 * h),
        ),
        ({"beta": 0.3, "kind": "ipo"}, lambda h: (h - 1 / 0.6) ** 2),
    ],
)
def test_the_loss_is_as_written_and_its_gradient_that_of_the_formula(hparams, formula):
    module = with_references(tiny_dpo(**hparams), offset=2.0)
    batch = preference_batch()
    chosen, rejected = pair_logprobs(module.policy, batch)
    of_chosen, of_rejected = (
        x - ref
        for x, ref in zip((chosen, rejected), module.references.of(batch, "train"), strict=True)
    )
    expected = formula(of_chosen - of_rejected).mean()
    expected.backward()
    gradient = flat_gradients(module.policy)
    module.zero_grad()
    measures, got = untaken_step(module, batch)
    assert measures["dpo/loss"] == pytest.approx(float(expected), abs=1e-5)
    assert measures["dpo/chosen_reward"] == pytest.approx(0.3 * float(of_chosen.mean()), abs=1e-5)
    assert measures["dpo/accuracy"] == float((of_chosen > of_rejected).float().mean())
    assert measures["dpo/chosen_logprob"] == pytest.approx(float(chosen.mean()), abs=1e-4)
    torch.testing.assert_close(got, gradient, rtol=0, atol=1e-5)


def test_the_gradient_does_not_depend_on_micro_batches_or_padding():
    loss, expected = untaken_step(with_references(tiny_dpo(), offset=2.0), preference_batch())
    assert expected.abs().max() > 1e-2
    split = with_references(tiny_dpo(micro_batch_size=3), offset=2.0)
    measures, got = untaken_step(split, preference_batch(width=40, fill=EOS))
    for name in ("loss", "accuracy", "chosen_reward", "rejected_reward", "margin"):
        assert measures[f"dpo/{name}"] == pytest.approx(loss[f"dpo/{name}"], abs=1e-5)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_two_ranks_take_the_same_steps_as_one(monkeypatch):
    measures = ("dpo/loss", "dpo/accuracy", "dpo/margin", "dpo/grad_norm")
    assert_two_ranks_step_as_one(
        monkeypatch,
        lambda: with_references(tiny_dpo(micro_batch_size=2)),
        [preference_batch()] * 3,
        measures,
    )


# -- whole runs -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = write_material(tmp_path_factory.mktemp("material"))
    rows = [
        {
            "prompt": row_text(i, 1 + i % 5),
            "chosen": f" {row_text(i, 1 + i * 7 % 13)} w3",
            "rejected": f" {row_text(i + 1, 1 + i * 5 % 11)} w4",
        }
        for i in range(40)
    ]
    made["pairs"].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


def train(
    material: dict[str, Path],
    folder: Path,
    *,
    lora: LoraHparams | None = None,
    ckpt_path: str | None = None,
    **changes: Any,
) -> tuple[DPOModule, L.Trainer]:
    hparams = DPOHparams(learning_rate=1e-3, micro_batch_size=3)
    module = DPOModule.from_pretrained(material["policy"], dpo=hparams, lora=lora)
    data = PreferenceDataModule(material["pairs"], module.tokenizer, batch_size=8)
    return module, fit_in(folder, module, data, ckpt_path=ckpt_path, **changes)


@pytest.fixture(scope="module", params=[None, LoraHparams(r=4)], ids=["whole", "lora"])
def trained(material, tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("trained") / "run"
    return (*train(material, folder, lora=request.param), folder, request.param)


def test_a_run_starts_at_the_reference_to_the_bit_and_learns_the_pairs(trained):
    module, _, folder, lora = trained
    first, *_, last = rows(folder)
    for name in ("accuracy", "chosen_reward", "rejected_reward", "margin"):
        assert first[f"dpo/{name}"] == 0
    assert first["dpo/loss"] == pytest.approx(math.log(2), abs=1e-7)
    assert last["dpo/loss"] < 0.69
    assert last["dpo/margin"] > 0
    assert len(module.state_dict()) > 0
    held_by_adapter = all("/lora_" in name for name in module.state_dict() if "policy." in name)
    assert held_by_adapter == (lora is not None)


@pytest.mark.thorough
def test_a_killed_and_resumed_run_is_bitwise_the_run_never_killed(material, trained, tmp_path):
    whole, _, folder, lora = trained
    with pytest.raises(RuntimeError, match="the power went"):
        train(material, tmp_path, lora=lora, checkpoint_every_n_iterations=1, callbacks=Stop())
    module, _ = train(material, tmp_path, lora=lora, ckpt_path="last")
    assert rows(tmp_path) == rows(folder)
    assert len(rows(folder)) == ITERATIONS
    assert_same_weights(module, whole)


def test_the_reference_is_kept_by_row_and_is_the_start_of_each_row(material, trained):
    module, trainer, _, lora = trained
    data: Any = trainer.datamodule
    assert [row.row_id for row in data.rows("train")] == list(range(len(data.rows("train"))))
    table = module.references.tables["train"]
    needed = data.rows_of_batches(ITERATIONS)
    assert 0 < len(needed) <= len(table)
    start = load_policy(material["policy"])
    with torch.no_grad():
        for row in needed:
            pair = pair_logprobs(start, data.collator(training=True)([data.rows("train")[row]]))
            # An adapted base is the same numbers by other kernels.
            atol = 0 if lora is None else 1e-5
            torch.testing.assert_close(table[row], torch.cat(pair), rtol=0, atol=atol)


def test_rows_of_no_batch_are_computed_when_a_longer_run_needs_them(material, tmp_path):
    _, one = train(material, tmp_path, max_iterations=1)
    module, _ = train(material, tmp_path, max_iterations=3, ckpt_path="last")
    data: Any = one.datamodule
    assert len(data.rows_of_batches(1)) == 8
    unknown = module.references.tables["train"].isnan().any(-1)
    assert 0 < int(unknown.sum()) <= len(unknown) - 16


class Rates(L.Callback):
    """Keeps the learning rate of each iteration."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.seen.append(trainer.optimizers[0].param_groups[0]["lr"])


def test_a_finished_run_that_is_extended_goes_on_at_the_rates_of_the_longer_schedule(
    material, tmp_path, caplog
):
    """Its own schedule ended at 0, and the checkpoint's optimizer holds that rate."""
    rates = Rates()
    train(material, tmp_path, max_iterations=2, callbacks=rates)
    assert "iterations" not in caplog.text
    train(material, tmp_path, max_iterations=4, callbacks=rates, ckpt_path="last")
    assert rates.seen == [1e-3 * factor for factor in (1.0, 0.5, 0.5, 0.25)]
    assert "this run has 4 iterations, that of the checkpoint had 2: the learning" in caplog.text
    assert "at 0.5 of its full value where it would have been 0" in caplog.text


def test_pairs_that_come_from_no_data_module_are_refused(tmp_path):
    module = tiny_dpo()
    trainer = trainer_of(default_root_dir=tmp_path)
    loader = torch.utils.data.DataLoader([preference_batch()], batch_size=None)
    with pytest.raises(ValueError, match="give fit or validate a PreferenceDataModule"):
        trainer.fit(module, loader)


def test_a_validation_by_itself_has_the_measures_of_the_pairs(material, trained, tmp_path):
    module, trainer, folder, _ = trained
    loaded = DPOModule.load_from_checkpoint(folder / "checkpoints/last.ckpt")
    assert loaded.algorithm == module.algorithm
    data: Any = trainer.datamodule
    again = trainer_of(default_root_dir=tmp_path)
    (metrics,) = again.validate(loaded, datamodule=data, verbose=False)
    batch = data.collator(training=True)(data.rows("validation"))
    with torch.no_grad():
        chosen, rejected = pair_logprobs(loaded.policy, batch)
        ref_chosen, ref_rejected = (x.clone() for x in loaded.references.of(batch, "validation"))
    rewards = 0.1 * (chosen - ref_chosen), 0.1 * (rejected - ref_rejected)
    difference = rewards[0] - rewards[1]
    assert difference.abs().max() > 1e-4
    expected = {
        "val/loss": -logsigmoid(difference).mean(),
        "val/accuracy": (difference > 0).float().mean(),
        "val/chosen_reward": rewards[0].mean(),
        "val/margin": difference.mean(),
        "val/chosen_logprob": chosen.mean(),
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(float(value), abs=1e-4), name
    assert metrics["val/accuracy_low"] <= metrics["val/accuracy"] <= metrics["val/accuracy_high"]


def test_a_held_out_pair_that_is_not_finite_is_not_left_out_of_the_loss(monkeypatch):
    module, batch = with_references(tiny_dpo()), preference_batch()
    module.references.tables["validation"] = module.references.tables["train"]
    module._trainer.state = SimpleNamespace(fn="validate")

    def broken(policy: Any, rows: PreferenceBatch) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, rejected = pair_logprobs(policy, rows)
        return torch.where(rows.row_ids == 0, math.nan, chosen + 1), rejected

    monkeypatch.setattr(dpo, "pair_logprobs", broken)
    with torch.no_grad():
        module.validation_step(batch, 0)
    module.on_validation_epoch_end()
    (measures,) = module.logged
    assert math.isnan(measures["val/loss"])
    assert measures["val/accuracy"] == 7 / 8


def test_lightnings_sanity_check_and_the_training_have_their_references(material, tmp_path):
    changes = {"num_sanity_val_steps": 1, "max_iterations": 1, "callbacks": None}
    pairs = PreferenceFolder(material["pairs"], validation_fraction=0.5)
    module, _ = train(material | {"pairs": pairs}, tmp_path, **changes)
    assert set(module.references.tables) == {"train", "validation"}
    assert not module.references.tables["validation"].isnan().any()


def test_a_validation_before_any_training_earns_no_reward_to_the_bit(material, tmp_path):
    hparams = DPOHparams(micro_batch_size=3)
    module = DPOModule.from_pretrained(material["policy"], dpo=hparams)
    pairs = PreferenceFolder(material["pairs"], validation_fraction=0.5)
    data = PreferenceDataModule(pairs, module.tokenizer, batch_size=8)
    trainer = trainer_of(precision="bf16-mixed", default_root_dir=tmp_path)
    (metrics,) = trainer.validate(module, datamodule=data, verbose=False)
    assert metrics["val/chosen_reward"] == 0
    assert metrics["val/rejected_reward"] == 0
    assert metrics["val/loss"] == pytest.approx(math.log(2), abs=1e-7)
