"""`run=` of evaluation and collection: what they take over from a training run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from rlhf_lightning.app.config.saved import write_settings
from rlhf_lightning.app.evaluate import named_sides
from rlhf_lightning.app.pipeline_steps import plan
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.manifest import write_manifest
from rlhf_lightning.runs.summary import new_summary, write_summary
from tests.builders.command_lines import settings_of
from tests.entry.test_pipeline import composed, settings_of_step

TLDR = [
    *(f"experiments.{stage}={stage}" for stage in ("sft", "reward", "ppo")),
    "train:model=smollm2_135m",
    "train:lora=lora",
    "train:dataset=tldr",
    "ppo:artifacts.publish=null",
]


@pytest.mark.thorough
def test_the_evaluation_asks_what_ppo_was_trained_on_and_of_its_models(tmp_path: Path) -> None:
    folder = tmp_path / "it's a\\"
    settings = composed(*TLDR, "collect=true", "collect:annotator=page")
    steps = {step.stage: step for step in plan(settings, folder)}
    ppo, evaluation, collection = (
        settings_of_step(steps[name]) for name in ("ppo", "evaluate", "collect")
    )
    assert ppo.dataset.name != "demo_seed1"
    assert evaluation.dataset == collection.dataset == ppo.dataset
    assert evaluation.policy == str(folder / "round_1/ppo/export")
    assert evaluation.baseline == ppo.artifacts.sft
    assert collection.candidates.policies["sft"] == ppo.artifacts.sft
    assert evaluation.gates == ppo.gates
    assert evaluation.prompts.max_length == ppo.data.get("max_prompt_length")
    assert collection.candidates.max_prompt_length == ppo.data.get("max_prompt_length")
    assert evaluation.trainer.precision == ppo.trainer.precision
    for key in ("gold", "num_prompts", "max_new_tokens"):
        assert getattr(evaluation.evaluation, key) == getattr(ppo.evaluation, key)
    for key in ("chat_template_arguments", "revision", "trust_remote_code"):
        wanted = getattr(ppo.model, key)
        assert getattr(evaluation.model, key) == getattr(collection.model, key) == wanted
    assert evaluation.scorer.get("source") == ppo.artifacts.reward  # with its adapter merged


def run_of(folder: Path, *overrides: str) -> RunFolder:
    """Write the settings of a run that was started in this working folder."""
    made, settings = RunFolder(folder), settings_of(*overrides)
    made.config.parent.mkdir(parents=True)
    write_settings(made.config, settings)
    summary = new_summary(settings.stage, seed=settings.seed, config_hash=None)
    write_summary(made, summary)
    runtime = {"hydra": {"runtime": {"cwd": os.getcwd()}}}
    made.config.with_name("hydra.yaml").write_text(yaml.safe_dump(runtime))
    return made


@pytest.mark.thorough
def test_the_models_of_a_run_are_found_from_another_folder(tmp_path, monkeypatch) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for kind in ("sft", "reward"):
        (here / "artifacts/demo_seed7" / kind).mkdir(parents=True)
    elsewhere.mkdir()
    monkeypatch.chdir(here)
    run_of(here / "outputs/ppo/1", "+experiment=ppo", "seed=7")
    monkeypatch.chdir(elsewhere)
    settings = settings_of("run=../here/outputs/ppo/1", entry="evaluate")
    assert settings.policy == "../here/outputs/ppo/1/export"
    assert settings.baseline == str(here / "artifacts/demo_seed7/sft")
    assert settings.scorer.get("source") == str(here / "artifacts/demo_seed7/reward")
    assert settings.seed == 7
    artifact = here / "artifacts/demo_seed7/ppo"
    artifact.mkdir()
    for name in ("config.json", "model.safetensors"):
        (artifact / name).write_bytes(b"{}")
    write_manifest(artifact, stage="ppo", run=str(here / "outputs/ppo/1"))
    published = settings_of("run=../here/outputs/ppo/1", entry="evaluate")
    assert published.policy == str(artifact)
    assert named_sides(published)["policy"] == "../here/outputs/ppo/1"
    collection = settings_of("run=../here/outputs/ppo/1", entry="collect")
    assert collection.candidates.policies["sft"] == settings.baseline
    again = settings_of("run=../here/outputs/ppo/1", "artifacts.reward=other", entry="evaluate")
    assert again.scorer.get("source") == "other"


def test_what_the_command_line_names_is_not_taken_over(working_folder) -> None:
    words = ["+experiment=ppo", "evaluation.num_prompts=77", "module.sampling.max_new_tokens=33"]
    made = run_of(working_folder / "outputs/ppo/1", *words, "trainer.precision=bf16-mixed")
    taken = settings_of(f"run={made.path}", entry="evaluate")
    assert (taken.evaluation.num_prompts, taken.trainer.precision) == (77, "bf16-mixed")
    named = ["evaluation.num_prompts=5", "trainer.precision=32-true", "scorer=none", "seed=9"]
    settings = settings_of(f"run={made.path}", *named, "artifacts.sft=mine", entry="evaluate")
    assert (settings.evaluation.num_prompts, settings.trainer.precision) == (5, "32-true")
    assert settings.scorer is None
    assert settings.seed == 9
    assert settings.baseline == "mine"
    assert settings_of(f"run={made.path}", entry="collect").candidates.max_new_tokens == 33


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("given", "precision"),
    [
        (["trainer.precision=bf16-mixed"], "bf16-mixed"),
        # FSDP2 computes in bf16 under 32-true; what is whole on a GPU is held and computed alike.
        (["strategy=fsdp", "trainer.precision=32-true"], "bf16-mixed"),
    ],
)
def test_evaluation_and_collection_compute_in_the_precision_that_the_run_computed_in(
    working_folder: Path, given: list[str], precision: str
) -> None:
    folder = RunFolder(working_folder)  # models that `make ppo` left in the checkout are elsewhere
    folder.config.parent.mkdir(parents=True)
    trained = settings_of("+experiment=sft", *given)
    write_settings(folder.config, trained)
    for entry in ("evaluate", "collect"):
        settings = settings_of(f"run={working_folder}", entry=entry)
        assert settings.trainer.precision == precision, entry
        assert settings.trainer.matmul_precision == "high", entry
    assert trained.compute_precision == precision
