"""The end of a stage: where models stand, what is written, what is done without prompts."""

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from rlhf_lightning.app import train
from rlhf_lightning.evaluation.final_metrics import Findings
from rlhf_lightning.runs.folder import RunFolder, SamplesAppender, read_samples
from rlhf_lightning.runs.summary import new_summary, read_summary, write_summary
from tests import offline_wandb
from tests.builders.runs import completed, settings_for


def test_a_run_that_is_killed_at_its_end_and_resumed_writes_its_comparison_once(tmp_path):
    folder = RunFolder(tmp_path)
    SamplesAppender(folder.samples).append(3, [{"prompt": "a", "response": "b"}])
    SamplesAppender(folder.distributions).append(3, [{"score": [1.0]}])
    values = {"held_out": "answers", "score": [2.0]}
    findings = Findings({}, [{"prompt": "a", "response": "b", "baseline_response": "c"}], values)
    findings.write(folder, 3)
    once = folder.samples.read_text(), folder.distributions.read_text()
    findings.write(folder, 3)
    assert (folder.samples.read_text(), folder.distributions.read_text()) == once
    assert [line["score"] for line in read_samples(folder.distributions)] == [[1.0], [2.0]]
    assert ["baseline_response" in sample for sample in read_samples(folder.samples)] == [
        False,
        True,
    ]


def test_the_optimizer_s_state_is_saved_and_dropped_before_it_would_reach_host_memory(
    start, tmp_path, monkeypatch
):
    found, move_to_host = [], SingleDeviceStrategy.teardown

    def noted(strategy):
        found.append([len(optimizer.state) for optimizer in strategy.optimizers])
        move_to_host(strategy)

    monkeypatch.setattr(SingleDeviceStrategy, "teardown", noted)
    folder = completed(tmp_path / "run", "sft", start, "evaluation.num_prompts=4")
    assert found[0] == [0]  # of `fit`; the others are of evaluations
    (saved,) = torch.load(folder.last_checkpoint, weights_only=True)["optimizer_states"]
    assert len(saved["state"]) > 3


def test_sft_without_a_judge_shows_ten_responses_before_and_after(tmp_path, start):
    made = completed(
        tmp_path / "run", "sft", start, "evaluation.gold=null", "evaluation.num_samples=24",
        "evaluation.num_prompts=24", "evaluation.max_new_tokens=4",
    )  # fmt: skip
    shown = [s for s in read_samples(made.samples) if "baseline_response" in s]
    assert len(shown) == 10
    page = made.report.read_text()
    assert page.count(">before · ") == page.count(">after · ") == 10
    assert "val/kl_per_token" not in read_summary(made).metrics, "ten prompts measure nothing"


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_training_pairs_are_held_against_the_held_out_accuracy(tmp_path, start):
    run = completed(tmp_path / "run", "reward", start, "gates.accuracy.at_least=1.1")
    summary = read_summary(run)
    assert 0 <= summary.metrics["val/train_accuracy"] <= 1
    (reason,) = (gate.reason for gate in summary.gates if gate.name == "accuracy")
    assert reason.split(". ")[1].startswith(("Overfitting: ", "Noise: ", "Capacity"))


@pytest.mark.thorough
@pytest.mark.timeout(200)
def test_a_run_that_fails_after_its_last_iteration_is_closed_with_an_alert(
    start, tmp_path, monkeypatch
):
    monkeypatch.delenv("WANDB_DATA_DIR", raising=False)
    folder = RunFolder(tmp_path / "run")
    write_summary(folder, new_summary("sft", seed=1, config_hash="of a run that failed"))
    folder.export.write_text("a file where the model is to go")
    with pytest.raises(OSError, match="export"):
        train.run(settings_for("sft", start, "logger=wandb", "logger.mode=offline"), folder, [])
    assert read_summary(folder).status == "failed"
    (found,) = offline_wandb.segments(folder.path)
    (alert,) = [r["alert"] for r in found if "alert" in r]
    assert (alert["title"], alert["level"]) == ("the run failed", "ERROR")
    assert "export" in alert["text"]
    assert next(r["exit"] for r in found if "exit" in r)["exit_code"] == 1
