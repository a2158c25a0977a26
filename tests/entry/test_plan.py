"""The plan of a run: what is certain. `tests/memory` holds its sums against measured peaks."""

from __future__ import annotations

import json

import pytest

from rlhf_lightning import plan
from rlhf_lightning.composition import ConfigError, check_hparams, register
from rlhf_lightning.memory.process import KEPT, PROCESS
from rlhf_lightning.plan_request import read_run

GIB = 2**30


@pytest.fixture(autouse=True)
def resolvers() -> None:
    register()


def report_of(*overrides: str):
    return plan.run(*plan.compose_run(list(overrides)))


def tensors(report) -> int:
    parts = report.phases[report.peak_phase]
    return sum(size for part, size in parts.items() if part not in (PROCESS, KEPT))


def as_json(capsys, monkeypatch, *overrides: str) -> dict:
    monkeypatch.setattr("sys.argv", ["plan", *overrides, "plan.format=json"])
    plan.main()
    return json.loads(capsys.readouterr().out)


@pytest.mark.timeout(200)
def test_a_plan_needs_no_weights_and_fits_8b_adapters_on_one_80_gib_device(capsys, monkeypatch):
    found = as_json(
        capsys, monkeypatch, "+experiment=ppo_llama3_1_8b_lora", "plan.device_memory=80GiB"
    )
    text = json.dumps(found)
    assert "update" in text
    assert "generate" in text
    report = report_of("+experiment=ppo_llama3_1_8b_lora", "plan.device_memory=80GiB")
    bf16_weights = 2 * 8.03e9
    assert bf16_weights < report.total < 80 * GIB


@pytest.mark.timeout(200)
def test_whole_models_take_more_than_adapters():
    lora = report_of("+experiment=ppo_smollm2_135m_lora", "plan.device=cpu")
    full = report_of("+experiment=ppo_smollm2_135m", "plan.device=cpu")
    # 16 bytes a weight of policy and value model, the latter without a head.
    assert tensors(full) - tensors(lora) > 0.8 * 16 * 2 * 106e6


def test_devices_are_planned_in_the_groups_that_share_a_copy():
    four = ["+experiment=ppo_smollm2_135m", "plan.device=cpu", "strategy=fsdp", "trainer.devices=4"]
    run = read_run(*plan.compose_run([*four, "strategy.shard_over=2"])).run
    assert (run.num_devices, run.sharded) == (4, 2)
    assert read_run(*plan.compose_run(four)).run.sharded == 4
    with pytest.raises(ConfigError, match=r"strategy\.shard_over=3 must divide the 4 devices"):
        check_hparams(plan.compose_run([*four, "strategy.shard_over=3"])[0])


def test_a_setting_that_does_not_exist_is_named():
    with pytest.raises(ConfigError, match=r"unknown key plan\.device_memry; did you mean"):
        plan.compose_run(["+experiment=ppo", "plan.device_memry=80GiB"])
