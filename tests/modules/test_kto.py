from __future__ import annotations

import json
import re
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch

from rlhf_lightning import DPOHparams, DPOModule, PreferenceDataModule
from rlhf_lightning.batches import PreferenceBatch
from rlhf_lightning.data.sources.given import GivenRows
from rlhf_lightning.functional.statistics import wilson_interval
from rlhf_lightning.modules import dpo
from rlhf_lightning.modules.dpo import by_label, pair_logprobs
from rlhf_lightning.runs.summary import new_summary
from rlhf_lightning.runs.verdict import verdict
from tests.builders.library_runs import Stop, assert_same_weights, fit_in, rows
from tests.builders.models import EOS
from tests.builders.record_files import row_text, write_material
from tests.builders.stages import (
    assert_two_ranks_step_as_one,
    preference_batch,
    tiny_dpo,
    untaken_step,
    without_trainer,
)

LABEL = torch.tensor([True, False, True, True, False, False, True, False])


def unpaired_batch(**options: Any) -> Any:
    return replace(preference_batch(**options), label=LABEL)


def module_of(shift: float = 1.5, **hparams: Any) -> Any:
    """Return a KTO module whose reference is the policy plus noise; the KL is near `shift`."""
    module = without_trainer(tiny_dpo(kind="kto", beta=0.3, **hparams))
    with torch.no_grad():
        table = torch.stack(pair_logprobs(module.policy, preference_batch()), -1)
    table = table + 2 * torch.randn(table.shape, generator=torch.Generator().manual_seed(2))
    table[:, 1] -= shift
    module.references.tables = {"train": table}
    return module


def test_gradient_and_measures_do_not_depend_on_micro_batches_or_padding():
    whole, expected = untaken_step(module_of(), unpaired_batch())
    assert whole["dpo/kl"] > 0.5
    assert expected.abs().max() > 1e-3
    split = module_of(micro_batch_size=3)
    measures, got = untaken_step(split, unpaired_batch(width=40, fill=EOS))
    for name in ("loss", "kl", "accuracy", "chosen_reward", "rejected_reward", "margin"):
        assert measures[f"dpo/{name}"] == pytest.approx(whole[f"dpo/{name}"], abs=1e-5)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_two_ranks_take_the_same_steps_as_one(monkeypatch):
    measures = [f"dpo/{name}" for name in ("loss", "kl", "accuracy", "margin", "chosen_logprob")]
    assert_two_ranks_step_as_one(
        monkeypatch, lambda: module_of(micro_batch_size=2), [unpaired_batch()] * 3, measures
    )


def test_the_reference_point_is_at_least_0_and_the_rewards_are_means_of_their_own_rows():
    module = module_of(shift=-5.0)
    measures, _ = untaken_step(module, unpaired_batch())
    assert measures["dpo/kl"] == 0
    with torch.no_grad():
        own, _ = pair_logprobs(module.policy, unpaired_batch())
    rewards = 0.3 * (own - module.references.tables["train"][:, 0])
    assert measures["dpo/chosen_reward"] == pytest.approx(float(rewards[LABEL].mean()), abs=1e-5)
    assert measures["dpo/rejected_reward"] == pytest.approx(float(rewards[~LABEL].mean()), abs=1e-5)


def test_a_batch_of_one_label_says_nothing_of_the_other():
    module = module_of()
    untaken_step(module, unpaired_batch())
    measures, _ = untaken_step(
        module, replace(unpaired_batch(), label=torch.ones(8, dtype=torch.bool))
    )
    assert measures["dpo/chosen_reward"] == measures["dpo/chosen_reward"]
    for name in ("rejected_reward", "margin"):  # not a number, and not the last batch's
        assert measures[f"dpo/{name}"] != measures[f"dpo/{name}"]
    sums = torch.tensor([[2.0, 4.0, -6.0], [1.0, 1.0, -8.0]])
    found = by_label({"by_label": sums, "dpo/loss": torch.tensor(1.0)})
    assert {k: float(v) for k, v in found.items()} == {
        "dpo/loss": 1.0, "dpo/chosen_reward": 2.0, "dpo/rejected_reward": 1.0, "dpo/margin": 1.0,
        "dpo/chosen_logprob": -3.0, "dpo/rejected_logprob": -8.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("good", "bad", "desirable", "message"),
    [
        (50, 50, 1.0, None),
        (90, 10, 1.0, "undesirable_weight=9 "),
        (10, 90, 1.0, r"module\.dpo\.desirable_weight=9 "),
        (10, 90, 9.0, None),
        (50, 0, 1.0, "50 training rows are labelled true and 0 false"),
    ],
)
def test_labels_that_weigh_unequally_are_named_with_the_weight_that_mends_it(
    good, bad, desirable, message
):
    hparams = DPOHparams(kind="kto", desirable_weight=desirable)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dpo.warn_of_weights(hparams, [True] * good + [False] * bad)
    assert len(caught) == (message is not None)
    if message is not None:
        assert re.search(message, str(caught[0].message))


@pytest.mark.parametrize(("share", "word"), [(0.5, "better"), (0.9, "Undecided")])
def test_an_accuracy_is_judged_by_the_more_frequent_label(share, word):
    metrics = {
        "val/kl": 0.1,
        "val/accuracy": 0.9,
        "val/accuracy_low": 0.8,
        "val/accuracy_high": 0.95,
    }
    summary = new_summary("dpo", seed=1, config_hash="")
    found = verdict(replace(summary, metrics=metrics | {"val/majority_accuracy": share}))
    assert word in found.sentence
    assert "more frequent label" in found.sentence


@pytest.mark.parametrize("kind", ["sigmoid", "kto"])
def test_held_out_rows_of_one_prompt_do_not_narrow_the_interval(monkeypatch, kind):
    module = without_trainer(tiny_dpo(kind=kind))
    module.references.tables = {"validation": torch.zeros(8, 2)}
    module._trainer.state = SimpleNamespace(fn="validate")
    won = torch.tensor([1.0] * 6 + [-1.0] * 2).repeat(5)
    monkeypatch.setattr(dpo, "by_micro_batch", lambda *_, **__: (won, -won))
    batch = replace(PreferenceBatch.cat([preference_batch()] * 5), label=torch.ones(40).bool())
    with torch.no_grad():
        module.validation_step(batch, 0)
    module.on_validation_epoch_end()
    (measures,) = module.logged
    assert measures["val/accuracy"] == pytest.approx(0.75)
    low, high = wilson_interval(6, 8, confidence=0.95)
    assert measures["val/accuracy_low"] < low < high < measures["val/accuracy_high"]


# -- whole runs -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = write_material(tmp_path_factory.mktemp("material"))
    rows = [
        {"prompt": row_text(i, 1 + i % 5), "completion": f" {row_text(i + k, 1 + i * 7 % 13)} w{k}",
         "label": k == 3}
        for i in range(40)
        for k in (3, 4)
    ]  # fmt: skip
    made["rows"] = made["pairs"].parent / "rows.jsonl"
    made["rows"].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


def train(material: dict[str, Path], folder: Path, **changes: Any) -> tuple[Any, L.Trainer]:
    hparams = DPOHparams(learning_rate=1e-3, micro_batch_size=3, kind="kto")
    module = DPOModule.from_pretrained(material["policy"], dpo=hparams)
    data = PreferenceDataModule(
        material["rows"], module.tokenizer, batch_size=8, kind="unpaired", max_length=64
    )
    return module, fit_in(folder, module, data, **{"max_iterations": 5} | changes)


def test_a_run_starts_at_reward_0_learns_the_labels_and_resumes_to_the_bit(material, tmp_path):
    whole, _ = train(material, tmp_path / "whole")
    first, *_, last = table = rows(tmp_path / "whole")
    assert first["dpo/loss"] == 0.5
    for name in ("kl", "chosen_reward", "rejected_reward", "margin", "accuracy"):
        assert first[f"dpo/{name}"] == 0, name
    assert last["dpo/margin"] > 0
    assert last["val/loss"] < 0.5
    assert last["val/majority_accuracy"] >= 0.5
    assert "<strong>KTO</strong>" in (tmp_path / "whole/report.html").read_text()
    with pytest.raises(RuntimeError, match="the power went"):
        train(material, tmp_path / "cut", callbacks=Stop(), checkpoint_every_n_iterations=1)
    resumed, _ = train(material, tmp_path / "cut", ckpt_path="last")
    assert_same_weights(resumed, whole)
    assert rows(tmp_path / "cut") == table


def test_pairs_are_two_rows_each_and_other_answers_are_of_other_prompts(material, tmp_path):
    pairs = [
        {"prompt": f"w{i}", "chosen": f" w{i + 1} w9", "rejected": f" w{i + 2} w8 w7"}
        for i in range(10)
    ]
    tokenizer = DPOModule.from_pretrained(material["policy"]).tokenizer
    data = PreferenceDataModule(pairs, tokenizer, batch_size=4, kind="unpaired", max_length=5)
    rows = data.rows("train")
    assert [row.label for row in rows[:4]] == [True, False, True, False]
    assert len(rows) == 18
    data.show_examples = 2
    shown = data.render_summary()
    assert "example 1, label true: " in shown
    assert "example 2, label false: " in shown
    assert "rejected" not in shown
    assert re.search(r"labels\W+true 9, false 9\b", shown)
    answers = {
        row.chosen_input_ids[row.prompt_length :].tobytes(): row.chosen_input_ids[
            : row.prompt_length
        ].tolist()
        for row in rows
    }
    for row in rows:
        cut = row.prompt_length
        own, other = row.chosen_input_ids, row.rejected_input_ids
        assert (own[:cut] == other[:cut]).all()
        assert cut < len(other) <= 5
        of_prompt = answers.get(other[cut:].tobytes())  # None where it was cut
        assert of_prompt != own[:cut].tolist()


def test_a_response_with_both_labels_is_counted_and_is_no_duplicate(material):
    tokenizer = DPOModule.from_pretrained(material["policy"]).tokenizer
    rows = [{"prompt": f"w{i}", "completion": "w2", "label": i % 2 == 0} for i in range(3, 30)]
    rows += [{"prompt": "w5", "completion": "w2", "label": True}]
    rows += [{"prompt": "w5", "completion": "w2", "label": False}]
    source = GivenRows(rows, validation_fraction=0)
    data = PreferenceDataModule(source, tokenizer, batch_size=4, kind="unpaired")
    data.setup()
    assert (data.summary.num_contradictions, data.summary.num_duplicates) == (3, 1)
    assert "responses with both labels" in data.render_summary()
