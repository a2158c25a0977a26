"""What a module says, from Python, and what a comparison asks it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from torch.utils.data import DataLoader

from rlhf_lightning import (
    FileSource,
    LoraHparams,
    MixedSource,
    PPOHparams,
    PPOModule,
    PreferenceDataModule,
    PromptDataModule,
    RewardModule,
    SamplingHparams,
    SFTModule,
    compare,
    normalize_reward_model,
)
from rlhf_lightning.data.sources.given import GivenRows
from tests.builders.library_runs import fit_in
from tests.builders.record_files import write_material

PPO = PPOHparams(learning_rate=1e-3, value_learning_rate=1e-3, num_minibatches=1, num_ppo_epochs=1)


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_material(tmp_path_factory.mktemp("material"))


def length(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def module_of(material: dict[str, Path], **options: Any) -> PPOModule:
    sampling = SamplingHparams(max_new_tokens=5, temperature=0.7)
    return PPOModule.from_pretrained(
        material["policy"], length, ppo=PPO, sampling=sampling, **options
    )


@pytest.fixture(scope="module")
def trained(material: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> PPOModule:
    folder = tmp_path_factory.mktemp("run")
    module = module_of(material)
    source = FileSource(material["prompts"], validation_fraction=0.5)
    data = PromptDataModule(source, module.tokenizer, batch_size=4, max_prompt_length=40)
    fit_in(folder / "run", module, data, max_iterations=3)
    module.folder = folder / "run"
    return module


def num_different(rows) -> int:
    return len({row.columns["prompt"] for row in rows})


def test_a_module_answers_prompts_before_and_after_training(material, trained):
    prompts = ["w2 w3", {"prompt": "w4"}, "w5 w6 w7"]
    before = module_of(material).generate(prompts)
    after = trained.generate(prompts)
    assert [len(texts) for texts in (before, after)] == [3, 3]
    assert all(isinstance(text, str) and len(text.split()) <= 5 for text in [*before, *after])
    assert after == trained.generate(prompts)
    assert after == [text for one in prompts for text in trained.generate([one])][:1] + after[1:]
    assert trained.generate(prompts, seed=2, max_new_tokens=12) != after
    greedy = [trained.generate(prompts, temperature=0, seed=seed) for seed in (1, 2)]
    assert greedy[0] == greedy[1]


def test_sft_and_adapters_answer_and_a_reward_model_does_not(material):
    module = SFTModule.from_pretrained(material["policy"], lora=LoraHparams(r=2, alpha=4))
    (text,) = module.generate(["w2 w3"], max_new_tokens=3)
    assert len(text.split()) <= 3
    with pytest.raises(TypeError, match="RewardModule has no policy"):
        RewardModule.from_pretrained(material["policy"]).generate(["w2"])


def test_a_trainer_predicts_the_held_out_prompts_and_given_ones(material, trained):
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    source = FileSource(material["prompts"], validation_fraction=0.5)
    data = PromptDataModule(source, trained.tokenizer, batch_size=4, num_iterations=1)
    found = trainer.predict(trained, data)
    assert sum(map(len, found)) == len(data.rows("validation"))
    (texts,) = trainer.predict(trained, DataLoader(["w2 w3", "w4"], batch_size=2))
    assert texts == trained.generate(["w2 w3", "w4"])


def test_a_prediction_samples_each_prompt_anew_in_whatever_batches_it_comes(trained):
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    asked = ["w2 w3"] * 6
    texts = trained.generate(asked)
    assert len(set(texts)) > 1
    rows = [{"prompt": one} for one in asked]
    loaders = (
        DataLoader(asked, batch_size=1),
        DataLoader(asked, batch_size=4),
        DataLoader(rows, batch_size=4),
        DataLoader(rows, batch_size=4, collate_fn=list),
    )
    for loader in loaders:
        assert [one for batch in trainer.predict(trained, loader) for one in batch] == texts
    with pytest.raises(TypeError, match="predict was given rows"):
        trainer.predict(trained, rows)
    parts = trainer.predict(trained, [DataLoader(asked[:2]), DataLoader(asked[2:])])
    assert [one for part in parts for batch in part for one in batch] == texts


def test_rows_that_share_a_prompt_get_a_response_each(trained):
    rows = [{"prompt": "w2 w3", "completion": "w4"}, {"prompt": "w2 w3", "completion": "w5"}]
    rows.append({"prompt": "w6", "completion": "w7"})
    asked = [row["prompt"] for row in rows]
    assert trained.generate(rows) == trained.generate(asked)
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    (texts,) = trainer.predict(trained, DataLoader(rows, batch_size=4, collate_fn=list))
    assert texts == trained.generate(asked)


def test_a_prompt_that_leaves_no_room_is_named(material):
    with pytest.raises(ValueError, match="prompt 2 of 2"):
        module_of(material).generate(["w2", "w3 " * 5000])


def test_a_comparison_asks_what_training_held_out_with_its_length_and_temperature(
    material, trained
):
    held_out = num_different(trained.fitted_by.datamodule.rows("validation"))
    assert held_out > 3
    for prompts in (material["prompts"], trained.fitted_by.datamodule):
        found = compare(trained, material["policy"], prompts, reward=length)
        assert found.num_prompts == held_out
        assert max(row["length"] for row in found.samples) <= 5
    longer = compare(
        trained, material["policy"], material["prompts"], reward=length, max_new_tokens=12
    )
    assert max(row["length"] for row in longer.samples) > 5
    other = FileSource(material["prompts"], validation_fraction=0.2)
    assert compare(trained, material["policy"], other, reward=length).num_prompts < held_out
    test_set = [{"prompt": f"w{i % 9 + 2} w{i // 9 + 2}"} for i in range(40)]
    assert compare(trained, material["policy"], test_set, reward=length).num_prompts == 40
    greedy = [
        compare(trained, trained, material["prompts"], reward=length, temperature=t)
        for t in (None, 0)
    ]
    assert greedy[1].win_rate == 0.5
    assert greedy[0].samples != greedy[1].samples


def test_of_one_source_of_a_mix_what_training_held_out_is_asked(material, tmp_path):
    module = module_of(material)
    own = FileSource(material["prompts"], validation_fraction=0.5)
    other = GivenRows([{"prompt": f"w9 w{i}"} for i in range(2, 8)], validation_fraction=0.0)
    mix = MixedSource([own, other], [1, 1])
    data = PromptDataModule(mix, module.tokenizer, batch_size=4, max_prompt_length=40)
    fit_in(tmp_path / "run", module, data, max_iterations=1)
    found = compare(module, material["policy"], material["prompts"], reward=length)
    assert found.num_prompts == num_different(data.rows("validation")) > 3


def test_a_comparison_by_a_reward_that_applies_nowhere_says_so(material, trained):
    rows = [{"prompt": f"w{i} w{i + 1}"} for i in range(2, 30)]
    nowhere = {"reward": lambda prompts, completions: [None] * len(completions)}
    with pytest.raises(ValueError, match="no score"):
        compare(trained, material["policy"], rows, num_prompts=4, **nowhere)


def test_another_trainer_leaves_a_run_its_comparison_and_held_out_prompts(material, trained):
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    trainer.predict(trained, DataLoader(["w2 w3"]))
    data = trained.fitted_by.datamodule
    found = compare(trained, material["policy"], material["prompts"], reward=length, seed=3)
    assert found.num_prompts == num_different(data.rows("validation")) > 3
    summary = json.loads((trained.folder / "summary.json").read_text())
    assert summary["metrics"]["val/score_win_rate"] == found.win_rate


def test_a_reward_model_is_normalized_after_another_trainer_and_from_a_checkpoint(
    material, tmp_path
):
    module = RewardModule.from_pretrained(material["policy"])
    data = PreferenceDataModule(material["pairs"], module.tokenizer, batch_size=4)
    fit_in(tmp_path / "run", module, data, max_iterations=2)
    loaded = RewardModule.load_from_checkpoint(tmp_path / "run/checkpoints/last.ckpt")
    plain = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    plain.validate(module, data, verbose=False)
    found = normalize_reward_model(module, data, num_samples=16)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["metrics"]["reward/sample_mean"] == found["reward/sample_mean"]
    assert normalize_reward_model(loaded, data, num_samples=16) == found
    assert len(data.rows("train")) < 100  # each is asked several times
    assert normalize_reward_model(loaded, data, num_samples=100).keys() == found.keys()
