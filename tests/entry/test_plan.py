"""The plan of a run: what is certain. `tests/memory` holds its sums against measured peaks."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from rlhf_lightning.app import plan
from rlhf_lightning.app.config.compose import ConfigError, register
from rlhf_lightning.app.config.settings import PlanSettings
from rlhf_lightning.app.config.validate import load_settings
from rlhf_lightning.app.memory_plan import phases, report
from rlhf_lightning.app.memory_plan.phases import OPTIMIZER, WEIGHTS, Phase, Plan
from rlhf_lightning.app.memory_plan.request import Request, read_run
from rlhf_lightning.app.memory_plan.tracker import HEAD
from rlhf_lightning.functional.linear_logprobs import rows_of_chunk, sized_for
from tests.builders.models import tiny_policy

GIB = 2**30


@pytest.fixture(autouse=True)
def resolvers() -> None:
    register()


ULTRA = "dataset=ultrafeedback"
SHORT = ("data.max_prompt_length=32", "module.sampling.max_new_tokens=32")  # few chunks of logits


def read(*overrides: str) -> Request:
    """Return the run that a command line plans."""
    words = [f"++{one}" if one.startswith("plan.") else one for one in overrides]
    settings = load_settings(PlanSettings, "train", words)
    return read_run(settings, settings.plan)


def plan_of(*overrides: str) -> Plan:
    """Return what a run takes, without what would make it fit."""
    return phases.plan(read(*overrides).run)


def as_json(capsys, monkeypatch, *overrides: str) -> dict:
    monkeypatch.setattr("sys.argv", ["plan", *overrides, "plan.format=json"])
    plan.main()
    return json.loads(capsys.readouterr().out)


@pytest.mark.thorough
def test_a_plan_is_printed_as_json(capsys, monkeypatch):
    found = as_json(capsys, monkeypatch, "+experiment=sft", "plan.device=cpu")
    assert {"update", "validate", "evaluate"} <= set(found["phases"])
    assert found["total"] > 0


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_plan_needs_no_weights_and_fits_8b_adapters_on_one_80_gib_device(capsys, monkeypatch):
    device = ("plan.device=cuda", "plan.device_memory=80GiB")
    found = as_json(
        capsys, monkeypatch, "+experiment=ppo", "model=llama3_1_8b", ULTRA, "lora=lora", *device
    )
    assert {"generate", "update"} <= set(found["phases"])
    bf16_weights = 2 * 8.03e9
    assert bf16_weights < found["total"] < 80 * GIB


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_whole_models_take_more_than_adapters():
    lora = plan_of(
        "+experiment=ppo", "model=smollm2_135m", ULTRA, "lora=lora", "plan.device=cuda", *SHORT
    )
    full = plan_of("+experiment=ppo", "model=smollm2_135m", ULTRA, "plan.device=cuda", *SHORT)
    # 16 bytes a weight of policy and value model, the latter without a head.
    assert full.peak.total - lora.peak.total > 0.8 * 16 * 2 * 106e6


@pytest.mark.thorough
def test_devices_are_planned_in_the_groups_that_share_a_copy():
    four = [
        "+experiment=ppo",
        ULTRA,
        "model=smollm2_135m",
        "plan.device=cpu",
        "strategy=fsdp",
        "trainer.devices=4",
    ]
    run = read(*four, "strategy.shard_over=2").run
    assert (run.num_devices, run.sharded) == (4, 2)
    assert read(*four).run.sharded == 4
    with pytest.raises(ConfigError, match=r"strategy\.shard_over=3 must divide the 4 devices"):
        read(*four, "strategy.shard_over=3")


def test_a_served_rollout_is_planned_without_a_gathered_policy():
    words = ["+experiment=ppo", ULTRA, "model=smollm2_135m", "plan.device=cuda"]
    run, notes = (found := read(*words, "rollout=vllm")).run, found.notes
    assert run.served
    assert "what the servers of rollout=vllm hold is not counted" in notes
    assert not read(*words).run.served


BASE = "rlhf_lightning.rollout.scorers.base"
PACKED = f"{{_target_: {BASE}.RewardModelScorer}}"
FUNCTION = f"{{_target_: {BASE}.FunctionScorer, function: rewards.py:score}}"
OWN = "{_target_: rewards.OwnScorer}"


def weighted(**scorers: str) -> list[str]:
    """Return the words of a weighted sum of scorers."""
    parts = ", ".join(f"{name}: {node}" for name, node in scorers.items())
    words = [f"scorer._target_={BASE}.WeightedScorer", f"scorer.scorers={{{parts}}}"]
    return ["scorer=none", *(f"+{word}" for word in words)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("scorer", "name", "count"),
    [
        (["scorer=reward_ensemble", "scorer.sources=[a,b,c]"], "3 reward models", 3),
        (weighted(one=PACKED, two=FUNCTION), "reward model", 1),
        (weighted(one=PACKED, two=FUNCTION, three=PACKED), "2 reward models", 2),
    ],
)
def test_every_reward_model_that_is_held_is_counted_in_every_phase(scorer, name, count):
    words = ["+experiment=ppo", "plan.device=cuda"]  # the built-in world's models
    one, several = (phases.plan(read(*words, *more).run) for more in ([], scorer))
    size = one.models["reward model"]
    assert several.models[name] == count * size > 0
    for before, after in zip(one.phases, several.phases, strict=True):
        assert after.parts[WEIGHTS] - before.parts[WEIGHTS] == (count - 1) * size, after.name


@pytest.mark.thorough
@pytest.mark.parametrize("lora", ["none", "lora"])
def test_a_teacher_is_counted_in_every_phase_with_its_own_shape(lora, tmp_path):
    words = ["+experiment=ppo", "plan.device=cuda", f"lora={lora}"]
    teacher = tmp_path / "teacher"
    one = phases.plan(read(*words).run)
    found = read(*words, f"artifacts.teacher={teacher}")
    assert any("the teacher has the policy's shape" in note for note in found.notes)
    alike = phases.plan(found.run)
    assert alike.models["teacher"] == alike.models["reference" if lora == "none" else "frozen base"]
    larger = tiny_policy("llama", hidden_size=256, intermediate_size=512, num_hidden_layers=4)
    larger.model.save_pretrained(teacher)
    several = phases.plan(read(*words, f"artifacts.teacher={teacher}").run)
    size = several.models["teacher"]
    assert size == 4 * sum(p.numel() for p in larger.parameters())
    for before, after in zip(one.phases, several.phases, strict=True):
        assert after.parts[WEIGHTS] - before.parts[WEIGHTS] == size, after.name
        assert after.total > before.total


@pytest.mark.thorough
def test_the_chunks_of_both_models_logits_are_counted_where_distributions_are_learnt():
    words = ["+experiment=distillation", "plan.device=cuda", "artifacts.teacher=somebody/teacher"]
    words += ["model=qwen2_5_0_5b", "dataset=ultrachat", "trainer.precision=32-true"]
    held = {}
    for divergence in ("reverse", "jensen_shannon"):
        run = read(*words, f"module.distillation.divergence={divergence}").run
        (update,) = (p for p in phases.plan(run).phases if p.name == "update")
        held[divergence] = update.parts[HEAD]
    vocabulary = int(run.teacher.config().vocab_size)
    with sized_for("cuda"):
        rows = rows_of_chunk(torch.device("cpu"), vocabulary, tables=4)
    table = rows * vocabulary * 4
    head = vocabulary * int(run.shape.config().hidden_size) * 4
    assert 4 * table < held["reverse"] - 2 * head < 6 * table  # its gradients beside the tables
    assert held["jensen_shannon"] > held["reverse"]


@pytest.mark.thorough
def test_what_holds_models_that_are_not_counted_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("RLHF_ALLOWED_TARGETS", "rewards.")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "rewards.py").write_text("def OwnScorer():\n    raise NotImplementedError\n")
    words = ["+experiment=ppo", "plan.device=cuda"]
    second = "doctor.second_scorer is not counted: its models are whole on every device"
    for overrides, expected in (
        ([], []),
        (["scorer=function", "scorer.function=rewards.py:score"], []),
        (weighted(one=FUNCTION, two=OWN), ["what rewards.OwnScorer holds is not counted"]),
        ([f"doctor.second_scorer={PACKED}"], [second]),
        ([f"doctor.second_scorer={OWN}"], [second]),
        ([f"doctor.second_scorer={FUNCTION}"], []),
    ):
        notes = read(*words, *overrides).notes
        assert [note for note in notes if "not counted" in note] == expected, overrides
    larger = "evaluation.larger_reward_model=artifacts/other/reward"
    told = "evaluation.larger_reward_model is not counted: it is held in the evaluation"
    assert told in read("+experiment=reward", "plan.device=cuda", larger).notes
    assert told not in read("+experiment=reward", "plan.device=cuda").notes


@pytest.mark.thorough
def test_an_evaluation_after_training_holds_no_optimizer_state_and_one_during_it_does():
    small = ["+experiment=ppo", "plan.device=cpu"]  # the built-in world's models
    after, during = (
        phases.plan(read(*small, f"evaluation.every_n_iterations={n}").run) for n in ("null", 5)
    )
    assert after.optimizer == during.optimizer > 0
    held = [{p.name: p.parts for p in planned.phases}["evaluate"] for planned in (after, during)]
    assert held[1][OPTIMIZER] == after.optimizer
    assert held[0].get(OPTIMIZER, 0) == 0
    assert held[0][WEIGHTS] == held[1][WEIGHTS]


@pytest.mark.thorough
@pytest.mark.parametrize("stage", ["ppo", "grpo"])
def test_more_devices_are_planned_for_the_batch_that_is_suggested_with_them(stage):
    words = [f"+experiment={stage}", ULTRA, "model=qwen2_5_7b", "plan.device=cuda"]
    run = read(*words).run
    options = list(report._sharded(run, phases.plan(run)))
    assert len(options) > 1
    for option in options:
        again = read(*words, *option.settings).run
        assert (again.num_devices, again.strategy) == (option.run.num_devices, "fsdp")
        assert (again.batch_size, again.update_rows) == (run.batch_size, option.run.update_rows)


@pytest.mark.thorough
@pytest.mark.parametrize("stage", ["base", "sft", "reward", "dpo"])
def test_a_smaller_validation_batch_is_suggested_by_a_key_that_the_command_takes(stage):
    run = replace(read(f"+experiment={stage}", "plan.device=cpu").run, validation_rows=64)
    planned = Plan({}, 0, (Phase("validate", {WEIGHTS: 1}),), 0)
    options = list(report._later_batches(run, planned))
    assert len(options) > 3
    for option in options:
        again = read(f"+experiment={stage}", "plan.device=cpu", *option.settings).run
        assert again.validation_rows == option.run.validation_rows


@pytest.mark.thorough
def test_rows_of_kto_go_through_an_update_one_by_one_and_pairs_of_dpo_two_by_two():
    small = ("model.dpo.micro_batch_size=8", "data.batch_size=64")
    kto, dpo = (read(f"+experiment={name}", *small).run for name in ("kto", "dpo"))
    assert (kto.rows, kto.micro_rows, dpo.rows, dpo.micro_rows) == (64, 8, 128, 16)
    kto, dpo = (report.describe(run, phases.plan(run)) for run in (kto, dpo))
    assert kto["stage"].startswith("KTO")
    assert kto["batch"].startswith("64 rows")
    assert dpo["batch"].startswith("64 pairs")


def test_a_setting_that_does_not_exist_is_named():
    with pytest.raises(ConfigError, match=r"unknown key plan\.device_memry; did you mean"):
        read("+experiment=ppo", "plan.device_memry=80GiB")
