"""Mistakes of one who uses the library from Python, and rows that are given from memory."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging

from rlhf_lightning import (
    DemonstrationDataModule,
    DPOModule,
    FileSource,
    LoraHparams,
    PolicyGradientModule,
    PPOHparams,
    PPOModule,
    PreferenceDataModule,
    PromptDataModule,
    RewardModule,
    SamplingHparams,
    SFTHparams,
    SFTModule,
)
from rlhf_lightning.functional.surrogates import ClippedRatio
from rlhf_lightning.rollout.scorers.base import RewardModelScorer
from tests.builders.library_runs import fit_in, rows, samples
from tests.builders.models import tiny_scalar_model
from tests.builders.record_files import write_material

PPO = PPOHparams(learning_rate=1e-3, value_learning_rate=1e-3, num_minibatches=2, num_ppo_epochs=1)


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_material(tmp_path_factory.mktemp("material"))


def length(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def ppo(material: dict[str, Path], **options: Any) -> PPOModule:
    options = {"ppo": PPO, "sampling": SamplingHparams(max_new_tokens=5), **options}
    return PPOModule.from_pretrained(material["policy"], length, **options)


def plain_trainer(folder: Path, **flags: Any) -> L.Trainer:
    return L.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, default_root_dir=folder,
        enable_progress_bar=False, enable_checkpointing=False, **flags,
    )  # fmt: skip


def num_rows(data: PromptDataModule) -> int:
    return len(data.rows("train")) + len(data.rows("validation"))


def test_the_rows_of_the_docs_are_read_from_memory_and_by_other_names(
    material, tmp_path, monkeypatch
):
    page = (Path(__file__).parents[1] / "docs/library.md").read_text()
    blocks = [part.partition("```")[0] for part in page.split("```python\n")[1:]]
    (block,) = [block for block in blocks if "FileSource(" in block]
    monkeypatch.chdir(tmp_path)
    questions = [{"question": f"w{n} w3"} for n in range(20)]
    Path("questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    found: dict[str, Any] = {"module": ppo(material)}
    exec(block, found)
    assert num_rows(found["in_memory"]) == 40
    assert found["in_memory"].rows("train")[0].columns["solution"].isdigit()
    assert num_rows(found["from_file"]) == 20
    table = pytest.importorskip("datasets").Dataset.from_list(found["rows"])
    data = PromptDataModule(table, found["module"].tokenizer, batch_size=8)
    assert num_rows(data) == 40


def too_long(material: dict[str, Path], tokenizer: Any) -> PromptDataModule:
    return PromptDataModule(
        material["prompts"], tokenizer, batch_size=4, num_iterations=1, max_prompt_length=2044
    )


def of_another(change: Any) -> Any:
    def make(material: dict[str, Path], tokenizer: Any) -> PromptDataModule:
        change(other := SFTModule.from_pretrained(material["policy"]).tokenizer)
        return PromptDataModule(material["prompts"], other, batch_size=4, num_iterations=1)

    return make


def of_another_kind(material: dict[str, Path], tokenizer: Any) -> PreferenceDataModule:
    return PreferenceDataModule(material["pairs"], tokenizer, batch_size=4, num_iterations=1)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (too_long, r"max_prompt_length=2044 .*max_new_tokens=5"),
        (of_another(lambda it: it.add_tokens(["w99"])), "another tokenizer .*other tokens"),
        (of_another(lambda it: setattr(it, "chat_template", "")), "chat template.*module.tok"),
        (of_another(lambda it: setattr(it, "eos_token", it.pad_token)), "tokenizer .*another EOS"),
        (of_another_kind, "PPOModule trains on prompts"),
    ],
)
def test_data_that_do_not_fit_the_module_are_refused(make, said, material, tmp_path):
    module = ppo(material)
    with pytest.raises((TypeError, ValueError), match=said):
        plain_trainer(tmp_path).fit(module, make(material, module.tokenizer))


def test_rows_beyond_the_context_of_a_reward_model_are_refused(material, tmp_path):
    reward = tiny_scalar_model("llama")
    reward.trunk.config.max_position_embeddings = 8
    module = PPOModule.from_pretrained(material["policy"], RewardModelScorer(lambda: reward))
    with pytest.raises(ValueError, match=r"more than the 8 .* reads: lower PromptData"):
        plain_trainer(tmp_path).fit(module, too_long(material, module.tokenizer))


def test_a_second_fit_that_would_repeat_the_noise_of_the_first_is_refused(material, tmp_path):
    module = ppo(material, seed=4)
    data = PromptDataModule(material["prompts"], module.tokenizer, batch_size=4, num_iterations=1)
    for time in range(2):  # before a step is taken nothing is repeated
        module.scorer.function = None if time == 0 else length
        with nullcontext() if time else pytest.raises(RuntimeError, match="not callable"):
            fit_in(tmp_path, module, data, max_iterations=1, record=False)
    path = tmp_path / "checkpoints/last.ckpt"
    again = PPOModule.load_from_checkpoint(path, reward=length)
    for one in (module, again):
        with pytest.raises(ValueError, match=r"PPOModule has been trained with seed=4, .*seed=5"):
            plain_trainer(tmp_path).fit(one, data)
    other = PPOModule.load_from_checkpoint(path, reward=length, seed=5)
    plain_trainer(tmp_path).fit(other, data)
    fit_in(tmp_path, module, data, max_iterations=2, record=False, ckpt_path=str(path))


def test_margins_that_dpo_does_not_read_are_named(material, tmp_path):
    module = DPOModule.from_pretrained(material["policy"])
    rows = [{"prompt": f"w{i}", "chosen": "w2", "rejected": "w3", "margin": 1} for i in range(8)]
    data = PreferenceDataModule(rows, module.tokenizer, batch_size=2)
    with pytest.warns(UserWarning, match="column 'margin' is not read"):
        fit_in(tmp_path, module, data, max_iterations=1)


def test_the_weight_of_a_domain_that_no_prompt_has_is_refused(material, tmp_path):
    module = ppo(material)
    module.controls.domain_weights = {"maths": 2.0}
    data = PromptDataModule(material["prompts"], module.tokenizer, batch_size=4)
    with pytest.raises(ValueError, match=r"domain_weights: no prompt is of domain 'maths': use "):
        fit_in(tmp_path, module, data, max_iterations=1)


def test_lengths_that_are_not_given_fit_the_context(material, tmp_path):
    module = ppo(material, sampling=SamplingHparams(max_new_tokens=1600))
    data = PromptDataModule(material["prompts"], module.tokenizer, batch_size=4, num_iterations=1)
    data.trainer = SimpleNamespace(lightning_module=module)
    data.setup()
    assert data.max_length == 2048 - 1600
    by_hand = PromptDataModule(material["prompts"], module.tokenizer, batch_size=4)
    by_hand.setup()
    assert by_hand.max_length == 512


ADAPTERS = LoraHparams(r=2)


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (None, "lora.r=2 lora.alpha=.*has lora=none"),
        (replace(ADAPTERS, target_modules="q_proj"), "run has lora=lora .*=q_proj"),
    ],
)
def test_a_checkpoint_of_adapters_is_continued_with_the_same_adapters(
    now, said, material, tmp_path
):
    def begun(lora: LoraHparams | None) -> tuple[SFTModule, DemonstrationDataModule]:
        module = SFTModule.from_pretrained(material["policy"], lora=lora)
        rows = [{"prompt": f"w{n}", "completion": "w3"} for n in range(2, 22)]
        return module, DemonstrationDataModule(
            rows, module.tokenizer, batch_size=4, num_iterations=1
        )

    trainer = plain_trainer(tmp_path)
    trainer.fit(*begun(ADAPTERS))
    path = tmp_path / "sft.ckpt"
    trainer.save_checkpoint(path)
    with pytest.raises(ValueError, match=said):
        plain_trainer(tmp_path).fit(*begun(now), ckpt_path=path)


def test_an_object_that_a_checkpoint_has_in_words_is_asked_for_by_its_argument(material, tmp_path):
    own = ClippedRatio(0.1)
    module = ppo(material, surrogate=own)
    data = PromptDataModule(material["prompts"], module.tokenizer, batch_size=4, num_iterations=1)
    trainer = plain_trainer(tmp_path)
    trainer.fit(module, data)
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    with pytest.raises(ValueError, match=r"give load_from_checkpoint\(path, surrogate="):
        PPOModule.load_from_checkpoint(tmp_path / "own.ckpt", module.scorer)
    read = PPOModule.load_from_checkpoint(tmp_path / "own.ckpt", module.scorer, surrogate=own)
    assert read.surrogate == own


def theirs(folder: Path, **hyper_parameters: Any) -> Path:
    """Write the checkpoint of somebody else."""
    torch.save({"hyper_parameters": hyper_parameters, "state_dict": {}}, folder / "theirs.ckpt")
    return folder / "theirs.ckpt"


@pytest.mark.parametrize(
    "cls", [SFTModule, RewardModule, DPOModule, PPOModule, PolicyGradientModule]
)
def test_no_checkpoint_runs_the_code_of_a_model_unless_its_reader_says_so(cls, tmp_path):
    file = theirs(tmp_path, trust_remote_code=True)
    said = r"no checkpoint runs code .* load_from_checkpoint\(path, trust_remote_code="
    with pytest.raises(ValueError, match=said):
        cls.load_from_checkpoint(file)
    for says in (True, False):  # goes on to the next thing that is wrong with it
        with pytest.raises(ValueError, match="load_from_checkpoint of the module"):
            cls.load_from_checkpoint(file, trust_remote_code=says)


def test_no_checkpoint_runs_a_reward_reads_a_file_or_sends_anything_to_a_server(material, tmp_path):
    (tmp_path / "secret").write_text("key")
    code = tmp_path / "theirs.py"
    code.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef score(prompts, completions): ...\n")
    place, module = f"{code}:score", ppo(material)
    for kept, said in (
        ({"reward": [place]}, "no checkpoint runs"),
        ({"reward": (place,)}, "no checkpoint runs"),
        ({"reward": {"a": place}}, "no checkpoint runs"),
        ({"teacher": "http://127.0.0.1:9"}, r"load_from_checkpoint\(path, teacher="),
        ({"chat_template": str(tmp_path / "secret")}, "chat_template"),
    ):
        given = {} if "reward" in kept else {"reward": length}
        with pytest.raises(ValueError, match=said):
            PPOModule.load_from_checkpoint(theirs(tmp_path, **module.hparams | kept), **given)
    assert not (tmp_path / "ran").exists()


def sft_run(material: dict[str, Path], folder: Path, **given: Any) -> None:
    module = SFTModule.from_pretrained(material["policy"], sft=SFTHparams(learning_rate=1e-3))
    source = FileSource(material["demonstrations"], validation_fraction=0)
    data = DemonstrationDataModule(source, module.tokenizer, batch_size=4)
    fit_in(folder, module, data, max_iterations=8, **given)


def test_without_held_out_rows_a_run_has_every_row_and_its_last_checkpoint(material, tmp_path):
    sft_run(material, tmp_path / "run")
    assert [row["iteration"] for row in rows(tmp_path / "run")] == [*range(1, 9)]
    assert (tmp_path / "run/checkpoints/last.ckpt").resolve().name == "iteration=000008.ckpt"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"early_stopping": 1}, "this run does not validate"),
        ({"early_stopping": 1, "enable_checkpointing": False}, "enable_checkpointing=False keeps"),
        ({"early_stopping": {"monitor": "val/accuracy"}}, "'val/accuracy' is no loss: mode=min or"),
        ({"checkpoint": {"monitor": "rollout/score"}}, "checkpoint: monitor='rollout/score' is no"),
        ({"callbacks": StochasticWeightAveraging(1e-4)}, "a stage is one epoch.*EMAWeightAver"),
    ],
)
def test_a_stop_or_an_average_that_could_not_work_is_refused(material, tmp_path, given, said):
    with pytest.raises(ValueError, match=said):
        sft_run(material, tmp_path / "run", **given)


def test_a_run_that_max_steps_ends_has_its_last_checkpoint_and_samples(material, tmp_path):
    module = ppo(material, ppo=replace(PPO, num_minibatches=1))
    data = PromptDataModule(material["prompts"], module.tokenizer, batch_size=4)
    fit_in(tmp_path / "run", module, data, max_iterations=5, max_steps=3)
    last = (tmp_path / "run/checkpoints/last.ckpt").resolve()
    assert last.name == "iteration=000003.ckpt"
    assert {json.loads(line)["iteration"] for line in samples(tmp_path / "run")} == {1, 3}


@pytest.mark.parametrize("ours", [True, False])
def test_the_best_checkpoint_is_found_by_its_word(material, tmp_path, ours):
    module = SFTModule.from_pretrained(material["policy"], sft=SFTHparams(learning_rate=1e-3))
    data = DemonstrationDataModule(material["demonstrations"], module.tokenizer, batch_size=4)
    own = ModelCheckpoint(tmp_path / "own", monitor="val/loss")
    given = {"checkpoint": {"monitor": "val/loss"}} if ours else {"callbacks": own}
    trainer = fit_in(tmp_path / "run", module, data, **given)
    (found,) = trainer.validate(module, data, ckpt_path="best", weights_only=True, verbose=False)
    best = min(row["val/loss"] for row in rows(tmp_path / "run"))
    assert found["val/loss"] == pytest.approx(best)


def test_a_module_from_a_checkpoint_trains_with_its_dropout(material, tmp_path):
    modes = []

    class Modes(L.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
            modes.extend(part.training for part in module.modules())

    module = RewardModule.from_pretrained(material["policy"], dropout=0.5)
    for name in ("first", "second"):
        data = PreferenceDataModule(material["pairs"], module.tokenizer, batch_size=4)
        fit_in(tmp_path / name, module, data, max_iterations=1, callbacks=Modes())
        module = RewardModule.load_from_checkpoint(tmp_path / name / "checkpoints/last.ckpt")
        assert not module.training
    assert modes
    assert all(modes)
