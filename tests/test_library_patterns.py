"""What users do with a module and a Trainer: twice, in halves, with callbacks, compared."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
)

from rlhf_lightning import (
    DemonstrationDataModule,
    DPOModule,
    FileSource,
    FSDP2Strategy,
    PeriodicEvaluation,
    PPOHparams,
    PPOModule,
    PreferenceDataModule,
    PromptDataModule,
    RewardModule,
    SamplingHparams,
    SFTHparams,
    SFTModule,
    compare,
    trainer_arguments,
)
from rlhf_lightning.callbacks.wandb_logger import wandb_logger
from rlhf_lightning.distributed.collectives import leave_process_group
from rlhf_lightning.models.export import export_scalar_model
from rlhf_lightning.runs.folder import RunFolder, read_samples
from rlhf_lightning.runs.lock import FolderTakenError
from rlhf_lightning.runs.summary import read_summary
from rlhf_lightning.runs.verdict import verdict
from tests.builders.library_runs import fit_in, rows
from tests.builders.models import PAD, tiny_scalar_model
from tests.builders.record_files import row_text, write, write_material

pytestmark = pytest.mark.thorough
PPO = PPOHparams(learning_rate=1e-3, value_learning_rate=1e-3, num_minibatches=2, num_ppo_epochs=1)
SHORT = SamplingHparams(max_new_tokens=5)


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("material")
    made = write_material(folder)
    made["other_policy"] = shutil.copytree(made["policy"], folder / "other_policy")
    rows = [{"prompt": row_text(i, 3), "chosen": row_text(i, 5)} for i in range(40)]
    made["pairs"] = write(folder / "p.jsonl", [row | {"rejected": "w3 w4"} for row in rows])
    return made


def length(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def shortness(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [-float(len(text)) for text in completions]


def ppo(material: dict[str, Path], reward: Any = length) -> PPOModule:
    return PPOModule.from_pretrained(material["policy"], reward, ppo=PPO, sampling=SHORT)


def fit_sft(material: dict[str, Path], folder: Path, module: Any = None, **given: Any) -> None:
    module = module or SFTModule.from_pretrained(material["policy"])
    data = DemonstrationDataModule(material["demonstrations"], module.tokenizer, batch_size=4)
    fit_in(folder, module, data, **{"max_iterations": 2} | given)


def test_the_file_of_training_is_the_same_under_every_name(material, tmp_path, monkeypatch):
    monkeypatch.chdir(material["prompts"].parent)
    module = ppo(material)
    source = FileSource(material["prompts"].name, validation_fraction=0.4, seed=9)
    data = PromptDataModule(source, module.tokenizer, batch_size=4)
    fit_in(tmp_path / "run", module, data, max_iterations=1)
    told = {"reward": length, "num_prompts": 100, "max_new_tokens": 2}
    found = [
        compare(module, material["policy"], one, **told) for one in (data, material["prompts"])
    ]
    different = {row.input_ids.tobytes() for row in data.rows("validation")}
    assert [one.num_prompts for one in found] == [len(different)] * 2
    with pytest.raises(ValueError, match="max_new_tokens=90000 leaves no room"):
        compare(module, material["policy"], data, reward=length, max_new_tokens=90_000)


def test_a_loader_that_begins_again_at_a_resume_is_named(material, tmp_path, caplog):
    module = SFTModule.from_pretrained(material["policy"])
    for again in (False, True):
        data = DemonstrationDataModule(
            material["demonstrations"], module.tokenizer, batch_size=4, num_iterations=4
        )
        end = {"max_iterations": 4, "ckpt_path": "last"} if again else {"max_iterations": 2}
        fit_in(tmp_path / "run", module, data.train_dataloader(), **end)
        assert ("the loader may begin again" in caplog.text) == again


def test_a_run_does_not_go_on_with_another_reward_model_of_the_same_name(material, tmp_path):
    scorer, short = tmp_path / "reward", {"max_prompt_length": 20}
    shutil.copytree(material["policy"], scorer)
    for bias in (0.5, 0.0):
        model = tiny_scalar_model("llama", bias=bias)
        export_scalar_model(model, scorer, model.state_dict(), pad_token_id=PAD)
        module = ppo(material, scorer)
        data = PromptDataModule(material["prompts"], module.tokenizer, batch_size=4, **short)
        if bias:
            fit_in(tmp_path / "run", module, data, max_iterations=1)
    with pytest.raises(ValueError, match="trained with another reward than"):
        fit_in(tmp_path / "run", module, data, max_iterations=2, ckpt_path="last")


def test_a_run_under_fsdp2_goes_on_in_its_folder_and_no_other_runs_over_it(material, tmp_path):
    def fit(**given: Any) -> None:
        fit_sft(material, tmp_path, strategy=FSDP2Strategy(compute_dtype=None), devices=1, **given)

    try:
        fit()
        fit(max_iterations=4, ckpt_path="last")
        before = read_summary(RunFolder(tmp_path))
        with pytest.raises(FolderTakenError, match="holds a run"):
            fit()
    finally:
        leave_process_group()
    assert [row["iteration"] for row in rows(tmp_path)] == [1, 2, 3, 4]
    assert read_summary(RunFolder(tmp_path)) == before


def test_the_page_of_an_early_stop_says_whose_weights_were_kept(material, tmp_path):
    module = SFTModule.from_pretrained(material["policy"], sft=SFTHparams(learning_rate=0.5))
    given = {"early_stopping": 1, "max_iterations": 8, "val_check_interval": 1}
    fit_sft(material, tmp_path, module, **given)
    kept = (tmp_path / "checkpoints/best.ckpt").resolve().stem.removeprefix("iteration=")
    assert int(kept) < len(rows(tmp_path)) < 8
    about = read_summary(RunFolder(tmp_path)).about
    assert about["weights"] == f"those of iteration {int(kept)}"
    assert about["weights"] in (tmp_path / "report.html").read_text()


def test_no_average_is_put_over_the_best_weights(material, tmp_path):
    averaging = EMAWeightAveraging(decay=0.5)
    with pytest.raises(ValueError, match="EMAWeightAveraging"):
        fit_sft(material, tmp_path / "run", early_stopping=1, callbacks=averaging)


def test_an_evaluation_of_a_second_run_is_one_of_that_run(material, tmp_path):
    evaluation = PeriodicEvaluation(every_n_iterations=2, num_prompts=4)
    for name, reward in (("first", length), ("second", shortness)):
        module = ppo(material, reward)
        data = PromptDataModule(material["prompts"], module.tokenizer, batch_size=4)
        fit_in(tmp_path / name, module, data, max_iterations=2, callbacks=evaluation)
        assert (rows(tmp_path / name)[-1]["val/baseline_score"] < 0) == (name == "second")
    with pytest.raises(TypeError, match="PeriodicEvaluation goes with PPO"):
        fit_sft(material, tmp_path / "sft", callbacks=evaluation)
    loader = data.train_dataloader()
    with pytest.raises(TypeError, match="PeriodicEvaluation needs fit"):
        fit_in(tmp_path / "other", ppo(material), loader, callbacks=evaluation)


def test_what_was_measured_before_the_end_is_no_final_figure(material, tmp_path):
    evaluation = PeriodicEvaluation(every_n_iterations=2, num_prompts=4)
    module, folder = ppo(material), RunFolder(tmp_path)
    data = PromptDataModule(material["prompts"], module.tokenizer, batch_size=4)
    fit_in(folder.path, module, data, max_iterations=3, callbacks=evaluation)
    assert "val/score" in rows(folder.path)[1]
    summary = read_summary(folder)
    assert not [name for name in summary.metrics if name.startswith("val/")]
    assert verdict(summary).tone == "neutral"


def test_hyper_parameters_that_no_checkpoint_holds_are_refused_before_training(material, tmp_path):
    class Own(SFTModule):
        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            self.save_hyperparameters()

    with pytest.raises(TypeError, match=r"save_hyperparameters\(ignore=\["):
        fit_sft(material, tmp_path / "run", Own.from_pretrained(material["policy"]))


@pytest.mark.parametrize(
    ("name", "own", "said"),
    [
        ("configure_optimizers", lambda self: torch.optim.SGD(self.parameters()), "schedule="),
        ("training_step", lambda self, *_: torch.zeros((), requires_grad=True), "trained nothing"),
        ("on_save_checkpoint", lambda self, checkpoint: None, r"call super\(\)\.on_save_check"),
    ],
)
def test_a_method_of_ours_is_not_left_out_silently(material, tmp_path, name, own, said):
    def fit() -> None:
        cls = type("Own", (SFTModule,), {name: own})
        fit_sft(material, tmp_path / "run", cls.from_pretrained(material["policy"]))

    with pytest.raises(TypeError, match=said):
        fit()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda module: module.half(), r"torch.float16.*module.float\(\)"),
        (lambda module: module.freeze(), r"frozen: call module.unfreeze\(\)"),
    ],
)
def test_weights_that_cannot_be_trained_are_refused(material, tmp_path, change, said):
    module = SFTModule.from_pretrained(material["policy"])
    module.configure_model()
    change(module)
    with pytest.raises(ValueError, match=said):
        fit_sft(material, tmp_path / "run", module)


STAGES = {
    "sft": (SFTModule, DemonstrationDataModule),
    "reward": (RewardModule, PreferenceDataModule),
    "dpo": (DPOModule, PreferenceDataModule),
}


@pytest.mark.parametrize("stage", STAGES)
def test_callbacks_get_the_loss_and_the_last_screen_names_the_report(
    stage, material, tmp_path, capsys
):
    losses = []

    class Seen(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            losses.append(float(outputs["loss"]))

    cls, data = STAGES[stage]
    module = cls.from_pretrained(material["policy"])
    pairs = [{"prompt": f"w{n}", "chosen": "w3", "rejected": "w4"} for n in range(2, 22)]
    trainer = L.Trainer(
        accelerator="cpu",
        **trainer_arguments(tmp_path / "run", max_iterations=2, callbacks=Seen()),
    )
    trainer.fit(module, data(pairs, module.tokenizer, batch_size=4))
    logged = [row[f"{module.stage}/loss"] for row in rows(tmp_path / "run")]
    assert losses == pytest.approx(logged, rel=1e-6)
    assert len(losses) == 2
    said = capsys.readouterr()
    assert "run/report.html" in said.out.split("completed")[-1]
    assert "GPU available" not in said.err


def held_out(folder: RunFolder) -> list[dict[str, Any]]:
    return [line for line in read_samples(folder.distributions) if "held_out" in line]


@pytest.fixture(scope="module")
def trained(material, tmp_path_factory):
    folder = RunFolder(tmp_path_factory.mktemp("ppo") / "run")
    usual = PPOHparams(num_minibatches=2, num_ppo_epochs=1)
    module = PPOModule.from_pretrained(material["policy"], length, ppo=usual, sampling=SHORT)
    data = PromptDataModule(material["prompts"], module.tokenizer, batch_size=4)
    often = PeriodicEvaluation(every_n_iterations=1, gold=lambda p, c, finished: length(p, c))
    fit_in(folder.path, module, data, max_iterations=3, callbacks=[often])
    return module, data, folder


def test_compare_adds_its_figures_responses_and_histograms_to_the_page_of_the_run(
    material, trained
):
    module, data, folder = trained
    assert held_out(folder) == []
    found = compare(module, material["policy"], data, reward=length)
    summary, (values,) = read_summary(folder), held_out(folder)
    assert summary.metrics["val/score_win_rate"] == found.win_rate
    assert len(values["length"]) == len(values["baseline_length"]) == found.num_prompts
    page = folder.report.read_text()
    assert "before, mean" in page
    assert f"{found.num_prompts} held-out prompts" in page
    enough = replace(summary, metrics={**summary.metrics, "val/num_prompts": 30.0})
    assert "the reward it was trained on" in verdict(enough).sentence


def test_the_last_comparison_is_the_one_on_the_page_and_says_by_what_and_against_what(
    material, trained
):
    module, data, folder = trained
    compare(module, material["policy"], data, reward=length)
    found = compare(module, material["other_policy"], data, reward=shortness)
    summary = read_summary(folder)
    assert summary.about["compared by"] == "shortness"
    assert summary.about["reward"] == "length"
    assert summary.about["baseline"].endswith(material["other_policy"].name)
    assert "trained on" not in verdict(summary).sentence
    assert len(held_out(folder)) == 1
    domains = {name for name in summary.metrics if "/domain/" in name}
    others = [{"prompt": f"w1 w{i}"} for i in range(2, 12)]
    compare(module, material["policy"], others, reward=length)
    assert not domains & set(read_summary(folder).metrics), "of the comparison before"
    compare(module, material["other_policy"], data, reward=shortness)
    sides = [row for row in read_samples(folder.samples) if "baseline_response" in row]
    assert len(sides) == found.num_prompts


class DuringTraining(L.Callback):
    def __init__(self, policy: Path, data: Any) -> None:
        self.policy, self.data = policy, data

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        compare(pl_module, self.policy, self.data, reward=length, num_prompts=2)


def test_a_comparison_during_training_is_none_of_the_end(material, tmp_path):
    module = ppo(material)
    data = PromptDataModule(material["prompts"], module.tokenizer, batch_size=4)
    folder = RunFolder(tmp_path / "run")
    own = DuringTraining(material["policy"], data)
    fit_in(folder.path, module, data, max_iterations=2, callbacks=[own])
    assert "val/score_win_rate" not in read_summary(folder).metrics
    assert held_out(folder) == []


def test_a_prediction_that_fails_leaves_the_record_of_the_run_alone(material, tmp_path):
    module, folder = ppo(material), RunFolder(tmp_path)
    data = PromptDataModule(material["prompts"], module.tokenizer, batch_size=4)
    logger = wandb_logger(folder, mode="offline")
    trainer = fit_in(tmp_path, module, data, max_iterations=1, logger=logger)
    compare(module, material["policy"], data, reward=length, num_prompts=2)
    before = read_summary(folder)
    with pytest.raises(TypeError, match="predict was given rows"):
        trainer.predict(module, [{"prompt": "w1"}])
    assert read_summary(folder) == before
    assert isinstance(logger.experiment.id, str), "not ended as failed"
    compared = before.metrics["val/score_win_rate"]
    assert logger.experiment.summary["val/score_win_rate"] == compared
    logger.finish()


def test_a_reward_model_from_python_shows_its_held_out_pairs(material, tmp_path):
    folder = RunFolder(tmp_path / "run")
    module = RewardModule.from_pretrained(material["policy"])
    data = PreferenceDataModule(material["pairs"], module.tokenizer, batch_size=4)
    fit_in(folder.path, module, data, max_iterations=3)
    metrics, (values,) = read_summary(folder).metrics, held_out(folder)
    right = sum(margin > 0 for margin in values["margin"]) / len(values["margin"])
    assert right == pytest.approx(metrics["val/accuracy"])
    assert {"reliability", "wrong"} <= values.keys()
    assert "val/accuracy_chosen_longer" in metrics or "val/accuracy_chosen_shorter" in metrics
    assert f"Margins of {len(values['margin'])} pairs" in folder.report.read_text()
    assert metrics["val/num_pairs"] == len(values["margin"])


@pytest.mark.parametrize("cls", [RewardModule, DPOModule])
def test_of_pairs_that_are_validated_in_part_the_number_is_that_of_the_part(
    cls, material, tmp_path
):
    module = cls.from_pretrained(material["policy"])
    source = FileSource(material["pairs"], validation_fraction=0.5)
    data = PreferenceDataModule(source, module.tokenizer, batch_size=4)
    fit_in(tmp_path, module, data, max_iterations=1, limit_val_batches=1)
    batch, metrics = next(iter(data.val_dataloader())), read_summary(RunFolder(tmp_path)).metrics
    assert len(batch) < len(data.rows("validation"))
    assert metrics["val/num_pairs"] == len(batch)
    assert metrics["val/num_pair_prompts"] == len({*batch.prompt_keys})


@pytest.mark.parametrize(
    ("given", "measured", "about"),
    [
        ({"validations": 2}, [2, 4, 5], None),
        ({"val_check_interval": 3}, [3], "at iteration 3, not at the end"),
    ],
)
def test_the_last_weights_are_validated_or_figures_said_to_be_earlier(
    given, measured, about, material, tmp_path
):
    fit_sft(material, tmp_path, max_iterations=5, **given)
    losses = {row["iteration"]: row["val/loss"] for row in rows(tmp_path) if "val/loss" in row}
    summary = read_summary(RunFolder(tmp_path))
    assert [*losses] == measured
    assert summary.metrics["val/loss"] == losses[measured[-1]]
    assert summary.about.get("validated") == about
