"""The library from Python: no Hydra, a Trainer of one's own."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import rlhf_lightning
from rlhf_lightning import (
    PPOHparams,
    PPOModule,
    PromptDataModule,
    SamplingHparams,
    SFTModule,
    WeightedScorer,
    compare,
    export_model,
)
from rlhf_lightning.callbacks.console import ProgressBar
from rlhf_lightning.distributed.collectives import leave_process_group
from rlhf_lightning.rollout.scorers.text_reward_model import TextRewardModelScorer
from rlhf_lightning.runs.folder import RunFolder, read_metrics
from rlhf_lightning.runs.metric_catalog import quantity
from tests.builders.library_runs import Stop, assert_same_weights, fit_in, rows, samples
from tests.builders.record_files import write_material

PPO = PPOHparams(learning_rate=1e-3, value_learning_rate=1e-3, num_minibatches=2, num_ppo_epochs=1)


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_material(tmp_path_factory.mktemp("material"))


def length(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def ppo(material: dict[str, Path], **changes: Any) -> PPOModule:
    sampling = SamplingHparams(max_new_tokens=5)
    given = {"reward": length, "ppo": PPO, "sampling": sampling} | changes
    return PPOModule.from_pretrained(material["policy"], **given)


def prompts(material: dict[str, Path], module: PPOModule) -> PromptDataModule:
    return PromptDataModule(material["prompts"], module.tokenizer, batch_size=4)


def train(material: dict[str, Path], folder: Path, **changes: Any) -> PPOModule:
    module = ppo(material)
    fit_in(folder, module, prompts(material, module), **changes)
    return module


@pytest.fixture(scope="module")
def whole(material, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    return train(material, folder), folder


def test_every_public_name_is_there_and_a_misspelt_one_is_refused():
    for name in rlhf_lightning.__all__:
        assert getattr(rlhf_lightning, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'PPOModul'"):
        rlhf_lightning.PPOModul  # noqa: B018


def test_a_run_that_stopped_goes_on_from_last_to_the_same_bits(material, whole, tmp_path):
    with pytest.raises(RuntimeError, match="the power went"):
        train(material, tmp_path / "run", checkpoint_every_n_iterations=1, callbacks=Stop())
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "failed"
    module = ppo(material)
    fit_in(tmp_path / "run", module, prompts(material, module), ckpt_path="last")
    expected, folder = whole
    assert rows(tmp_path / "run") == rows(folder)
    assert len(rows(folder)) == 4
    assert_same_weights(module, expected)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"max_epochs": None}, r"Trainer\(max_epochs=1000\), its default"),
        ({"max_epochs": -1}, r"Trainer\(max_epochs=-1\), given"),
        ({"precision": "bf16-true"}, r"precision='bf16-true'"),
        ({"max_steps": 2}, r"Trainer\(max_steps=2\) .* 2 an iter.*max_iterations="),
        ({"overfit_batches": 1}, "overfit_batches.* max_iterations"),
        ({"strategy": ModelParallelStrategy()}, "use strategy=FSDP2Strategy"),
        ({"gradient_clip_val": 1.0}, "gradient_clip_val"),  # by Lightning, as is the next
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches"),
        ({"callbacks": EMAWeightAveraging(update_every_n_steps=2)}, "could aver"),
    ],
)
def test_a_flag_that_trains_something_else_is_refused_before_a_model_is_read(
    material, tmp_path, flags, said
):
    module = ppo(material)
    with pytest.raises((ValueError, MisconfigurationException), match=said):
        fit_in(tmp_path, module, prompts(material, module), max_iterations=1, **flags)
    leave_process_group()
    assert module.policy is None


def test_a_dry_run_leaves_nothing_in_the_folder_of_the_run_that_follows(material, tmp_path):
    run = tmp_path / "run"
    for dry in (True, False):
        train(material, run, max_iterations=1, fast_dev_run=dry)
        assert not dry or not list(run.glob("*"))
    assert json.loads((run / "summary.json").read_text())["status"] == "completed"


def test_a_checkpoint_is_loaded_with_its_hyper_parameters(material, whole):
    trained, checkpoint = whole[0], whole[1] / "checkpoints/last.ckpt"
    with pytest.raises(ValueError, match=r"load_from_checkpoint\(path, reward=function\)"):
        PPOModule.load_from_checkpoint(checkpoint)
    with pytest.raises(ValueError, match=r"give .*/checkpoints/last\.ckpt"):
        PPOModule.load_from_checkpoint(whole[1], reward=length)
    with pytest.raises(ValueError, match="load_from_checkpoint of the module"):
        SFTModule.load_from_checkpoint(checkpoint)
    loaded = PPOModule.load_from_checkpoint(checkpoint, reward=length)
    assert loaded.algorithm == PPO
    assert loaded.sampling.max_new_tokens == 5
    assert_same_weights(loaded, trained)
    assert not loaded.training


def test_an_export_is_the_trained_policy_and_wins_by_what_it_learnt(material, whole, tmp_path):
    trained, _ = whole
    folder = export_model(trained, tmp_path / "export")
    held_out = rlhf_lightning.FileSource(material["prompts"])
    one = compare(folder, material["policy"], held_out, reward=length, max_new_tokens=5)
    two = compare(trained, material["policy"], material["prompts"], reward=length, max_new_tokens=5)
    assert dict(one.metrics) == pytest.approx(dict(two.metrics), nan_ok=True)
    assert one.low <= one.win_rate <= one.high
    assert one.samples[0].keys() >= {"prompt", "response", "baseline_response"}


def few(prompts: list[str], completions: list[str]) -> list[float | None]:
    return [None if len(text) > 8 else -float(len(text)) for text in completions]


def test_a_list_of_rewards_is_their_weighted_sum_and_resumes_with_its_weights(material, tmp_path):
    given = {"reward": [length, few, few], "reward_weights": [1.0, 0.5, 2]}
    module = ppo(material, **given)
    assert isinstance(module.scorer, WeightedScorer)
    assert module.scorer.weights == {"length": 1.0, "few": 0.5, "few#2": 2}
    fit_in(tmp_path / "run", module, prompts(material, module), max_iterations=1)
    last = tmp_path / "run/checkpoints/last.ckpt"
    again = PPOModule.load_from_checkpoint(last, reward=given["reward"])
    assert again.scorer.weights == module.scorer.weights
    for wrong, message in (
        ({"reward_weights": [1.0]}, "3 entries and reward_weights 1"),
        ({"reward": length}, "reward_weights"),
        ({"reward": []}, "0 entries"),
        ({"reward_weights": [1, "2", 3]}, "reward_weights"),
        ({"reward": [length, lambda queries, prompts, labels: 0, few]}, "queries"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            ppo(material, **(given | wrong))


def test_a_folder_of_somebody_else_is_refused_as_it_is(material, tmp_path):
    (tmp_path / "report.html").write_text("my thesis")
    with pytest.raises(FileExistsError, match=r"report\.html.*choose another folder"):
        train(material, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
    assert (tmp_path / "report.html").read_text() == "my thesis"


def test_a_resume_with_another_seed_is_refused_and_loading_with_one_is_not(
    material, whole, tmp_path
):
    copy = shutil.copytree(whole[1], tmp_path / "copy", symlinks=True)
    module = ppo(material, seed=7)
    data = PromptDataModule(material["prompts"], module.tokenizer, batch_size=4, seed=1)
    with pytest.raises(ValueError, match=r"seed=1, not 7: .*seed=1"):
        fit_in(copy, module, data, ckpt_path="last", max_iterations=5)
    loaded = PPOModule.load_from_checkpoint(copy / "checkpoints/last.ckpt", reward=length, seed=7)
    assert loaded.hparams["seed"] == 7


def test_a_reward_with_another_tokenizer_reads_text(material, tmp_path):
    other = shutil.copytree(material["policy"], tmp_path / "other")
    named = json.loads((other / "tokenizer.json").read_text())
    vocabulary = named["model"]["vocab"]
    vocabulary["w5"], vocabulary["w6"] = vocabulary["w6"], vocabulary["w5"]
    (other / "tokenizer.json").write_text(json.dumps(named))
    module = PPOModule.from_pretrained(material["policy"], other)
    assert isinstance(module.scorer, TextRewardModelScorer)


def test_a_trainer_that_fits_a_second_time_leaves_the_run_as_it_is(material, tmp_path):
    module = ppo(material)
    data = prompts(material, module)
    trainer = fit_in(tmp_path / "run", module, data)
    before = (tmp_path / "run/summary.json").read_text()
    assert json.loads(before)["status"] == "completed"
    with pytest.raises(FileExistsError, match="another folder"):
        trainer.fit(module, data)
    assert (tmp_path / "run/summary.json").read_text() == before
    trainer.fit(module, data, ckpt_path="last", weights_only=True)
    with pytest.raises(FileExistsError, match="another folder"):
        trainer.fit(module, data)
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "completed"


def test_a_checkpoint_of_another_run_opens_no_folder_that_is_taken(material, whole, tmp_path):
    checkpoint = (whole[1] / "checkpoints/last.ckpt").resolve()

    def fork() -> None:
        module = ppo(material)
        data = prompts(material, module)
        fit_in(tmp_path / "fork", module, data, ckpt_path=str(checkpoint), max_iterations=5)

    fork()
    assert [row["iteration"] for row in rows(tmp_path / "fork")] == [5]
    before = (tmp_path / "fork/summary.json").read_text()
    with pytest.raises(FileExistsError, match="another folder"):
        fork()
    assert (tmp_path / "fork/summary.json").read_text() == before


def test_what_a_run_without_a_checkpoint_left_is_on_no_page_of_the_next_one(material, tmp_path):
    with pytest.raises(RuntimeError, match="the power went"):
        train(material, tmp_path, callbacks=Stop())
    assert len(rows(tmp_path)) == 1
    assert (tmp_path / "doctor.jsonl").exists()
    module = ppo(material, reward=lambda **_: 1 / 0)
    with pytest.raises(RuntimeError, match="division by zero"):
        fit_in(tmp_path, module, prompts(material, module), doctor=False)
    for name in ("metrics.csv", "samples.jsonl", "distributions.jsonl", "doctor.jsonl"):
        assert not (tmp_path / name).exists(), name


@pytest.mark.parametrize("logger", [lambda run: "wandb", lambda run: [CSVLogger(run / "logs")]])
def test_a_logger_may_write_into_the_run_folder(material, tmp_path, logger, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    run, taken = tmp_path / "run", tmp_path / "taken"
    train(material, run, max_iterations=1, logger=logger(run), doctor=False)
    assert json.loads((run / "summary.json").read_text())["status"] == "completed"
    assert not (run / "doctor.jsonl").exists()
    (taken / "notes").mkdir(parents=True)
    with pytest.raises(FileExistsError, match="holds notes"):
        train(material, taken, max_iterations=1, logger=logger(taken))


@pytest.mark.parametrize(("every_n_seconds", "num_lines"), [(0, 3), (1000, 1)])
def test_progress_lines_have_the_metrics_of_their_iteration_and_a_response_with_its_score(
    material, tmp_path, every_n_seconds, num_lines
):
    out = io.StringIO()
    bar = ProgressBar("ppo", every_n_seconds=every_n_seconds, file=out)
    train(material, tmp_path, max_iterations=3, enable_progress_bar=True, callbacks=bar)
    told = out.getvalue().splitlines()
    lines = [line for line in told if line.startswith("ppo ")]
    *_, last = read_metrics(RunFolder(tmp_path).metrics)
    assert len(lines) == num_lines
    assert lines[-1].startswith("ppo 3/3")
    for name in ("rollout/kl_per_token", "rollout/response_length"):
        assert f"{quantity(name).label} {quantity(name).show(last[name])}" in lines[-1]
    shown = [line for line in told if " -> " in line]
    assert len(shown) == (0 if every_n_seconds else num_lines)
    first = next(row for row in map(json.loads, samples(tmp_path)) if row["iteration"] == 3)
    for line in shown[-1:]:
        assert line.startswith(f"sample  score {first['score']:.2f}  {first['prompt']} -> ")
        assert " ".join(first["response"].split())[:40] in line
