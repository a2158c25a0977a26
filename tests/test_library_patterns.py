"""What users of Lightning do with a module and a Trainer: twice, in halves, with callbacks."""

from __future__ import annotations

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
    DPOHparams,
    DPOModule,
    FileSource,
    PeriodicEvaluation,
    PolicyGradientModule,
    PPOHparams,
    PPOModule,
    PreferenceDataModule,
    PromptDataModule,
    RewardModule,
    SamplingHparams,
    SFTModule,
    compare,
    trainer_arguments,
)
from rlhf_lightning.runs.folder import RunFolder, read_metrics
from tests.builders.record_files import write_material

pytestmark = pytest.mark.thorough
PPO = PPOHparams(learning_rate=1e-3, value_learning_rate=1e-3, num_minibatches=2, num_ppo_epochs=1)
SHORT = SamplingHparams(max_new_tokens=5)


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_material(tmp_path_factory.mktemp("material"))


def length(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def below(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [-100.0 - len(text) for text in completions]


def ppo(material: dict[str, Path], reward: Any = length) -> PPOModule:
    return PPOModule.from_pretrained(material["policy"], reward, ppo=PPO, sampling=SHORT)


def arguments(folder: Path, **given: Any) -> dict[str, Any]:
    usual = {"max_iterations": 2, "accelerator": "cpu", "enable_progress_bar": False}
    return trainer_arguments(folder, **usual | given)


def fit_sft(material: dict[str, Path], folder: Path, module: Any = None, **given: Any) -> Any:
    module = module or SFTModule.from_pretrained(material["policy"])
    data = DemonstrationDataModule(material["demonstrations"], module.tokenizer, batch_size=4)
    L.Trainer(**arguments(folder, **given)).fit(module, data)
    return module


@pytest.mark.parametrize("cls", [PPOModule, PolicyGradientModule])
def test_no_checkpoint_sends_anything_to_a_server_unless_its_reader_names_it(
    cls, material, tmp_path
):
    module = cls.from_pretrained(material["policy"], length, sampling=SHORT)
    given = {**module.hparams, "teacher": "http://127.0.0.1:9"}
    torch.save({"hyper_parameters": given, "state_dict": {}}, tmp_path / "theirs.ckpt")
    with pytest.raises(ValueError, match=r"load_from_checkpoint\(path, teacher="):
        cls.load_from_checkpoint(tmp_path / "theirs.ckpt", reward=length)


def test_the_file_of_training_is_the_same_under_every_name(material, tmp_path, monkeypatch):
    monkeypatch.chdir(material["prompts"].parent)
    module = ppo(material)
    source = FileSource(material["prompts"].name, validation_fraction=0.4, seed=9)
    data = PromptDataModule(source, module.tokenizer, batch_size=4)
    L.Trainer(**arguments(tmp_path / "run", max_iterations=1)).fit(module, data)
    told = {"reward": length, "num_prompts": 100, "max_new_tokens": 2}
    found = [
        compare(module, material["policy"], one, **told) for one in (data, material["prompts"])
    ]
    assert [one.num_prompts for one in found] == [len(data.rows("validation"))] * 2
    with pytest.raises(ValueError, match="max_new_tokens=90000 leaves no room"):
        compare(module, material["policy"], data, reward=length, max_new_tokens=90_000)


def test_a_loader_that_begins_again_at_a_resume_is_named(material, tmp_path, caplog):
    module = SFTModule.from_pretrained(material["policy"])
    for again in (False, True):
        data = DemonstrationDataModule(
            material["demonstrations"], module.tokenizer, batch_size=4, num_iterations=4
        )
        run = arguments(tmp_path / "run", max_iterations=4 if again else 2)
        options = {"ckpt_path": "last", "weights_only": True} if again else {}
        L.Trainer(**run).fit(module, train_dataloaders=data.train_dataloader(), **options)
        assert ("its loader may begin again" in caplog.text) == again


def test_no_average_is_put_over_the_best_weights(material, tmp_path):
    averaging = EMAWeightAveraging(decay=0.5)
    with pytest.raises(ValueError, match="EMAWeightAveraging"):
        fit_sft(material, tmp_path / "run", early_stopping=1, callbacks=averaging)


def test_an_evaluation_of_a_second_run_is_one_of_that_run(material, tmp_path):
    evaluation = PeriodicEvaluation(every_n_iterations=2, num_prompts=4)
    for name, reward in (("first", length), ("second", below)):
        module = ppo(material, reward)
        data = PromptDataModule(material["prompts"], module.tokenizer, batch_size=4)
        L.Trainer(**arguments(tmp_path / name, callbacks=evaluation)).fit(module, data)
        header, *lines = (tmp_path / name / "metrics.csv").read_text().splitlines()
        score = dict(zip(header.split(","), lines[-1].split(","), strict=True))
        assert (float(score["val/baseline_score"]) < 0) == (name == "second")
    with pytest.raises(TypeError, match="PeriodicEvaluation goes with PPO"):
        fit_sft(material, tmp_path / "sft", callbacks=evaluation)
    loader = data.train_dataloader()
    with pytest.raises(TypeError, match="PeriodicEvaluation needs fit"):
        L.Trainer(**arguments(tmp_path / "other", callbacks=evaluation)).fit(module, loader)


def test_hyper_parameters_that_no_checkpoint_holds_are_refused_before_training(material, tmp_path):
    class Own(SFTModule):
        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            self.save_hyperparameters()

    with pytest.raises(TypeError, match=r"save_hyperparameters\(ignore=\["):
        fit_sft(material, tmp_path / "run", Own.from_pretrained(material["policy"]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda module: module.half(), r"torch.float16.*module.float\(\)"),
        (lambda module: module.bfloat16(), "torch.bfloat16"),
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
    "sft": (SFTModule, DemonstrationDataModule, {}),
    "reward": (RewardModule, PreferenceDataModule, {}),
    "dpo": (DPOModule, PreferenceDataModule, {}),
    "kto": (DPOModule, PreferenceDataModule, {"dpo": DPOHparams(kind="kto", beta=0.1)}),
}


@pytest.mark.parametrize("stage", STAGES)
def test_callbacks_get_the_loss_and_the_last_screen_names_the_report(
    stage, material, tmp_path, capsys
):
    losses = []

    class Seen(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            losses.append(float(outputs["loss"]))

    cls, data, hparams = STAGES[stage]
    module = cls.from_pretrained(material["policy"], **hparams)
    rows = [{"prompt": f"w{n}", "chosen": "w3", "rejected": "w4"} for n in range(2, 22)]
    kind = {"kind": "unpaired"} if stage == "kto" else {}
    trainer = L.Trainer(
        accelerator="cpu",
        **trainer_arguments(tmp_path / "run", max_iterations=2, callbacks=Seen()),
    )
    trainer.fit(module, data(rows, module.tokenizer, batch_size=4, **kind))
    logged = [
        row[f"{module.stage}/loss"] for row in read_metrics(RunFolder(tmp_path / "run").metrics)
    ]
    assert losses == pytest.approx(logged, rel=1e-6)
    assert len(losses) == 2
    said = capsys.readouterr()
    assert "run/report.html" in said.out.split("completed")[-1]
    assert "GPU available" not in said.err
