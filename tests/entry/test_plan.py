"""`rlhf-plan`: a table from a formula, beside peaks that were measured."""

from __future__ import annotations

import json

import pytest

from benchmarks import memory
from benchmarks.shapes import SHAPES
from rlhf_lightning.app import plan
from rlhf_lightning.app.config.compose import register
from rlhf_lightning.app.config.settings import PlanSettings
from rlhf_lightning.app.config.validate import load_settings
from tests.builders.models import tiny_policy

GIB = 2**30
ULTRA = "dataset=ultrafeedback"
SHAPE = ["model=smollm2_135m"]


@pytest.fixture(autouse=True)
def resolvers() -> None:
    register()


def plan_of(*overrides: str) -> plan.Plan:
    """Return the plan of a command line."""
    words = [f"++{one}" if one.startswith("plan.") else one for one in overrides]
    settings = load_settings(PlanSettings, "train", words)
    return plan.Plan(settings, settings.plan)


@pytest.mark.parametrize("form", ["table", "json"])
def test_a_plan_is_printed_for_people_and_for_programs(capsys, monkeypatch, form):
    words = ["+experiment=ppo", *SHAPE, ULTRA, "plan.device=cpu", f"plan.format={form}"]
    monkeypatch.setattr("sys.argv", ["plan", *words])
    plan.main()
    said = capsys.readouterr().out
    parts = ("generate", "score", "update", "evaluate", "optimizer", "reference")
    for part in (*parts, *["134,515,008 weights"] * (form == "table")):
        assert part in said
    if form == "json":
        found = json.loads(said)
        assert found["total"] == sum(found["phases"][found["peak_phase"]].values())
        assert any("lora=lora" in choice for choice in found["choices"])


# Of docs/scaling.md, fp32: resident memory above the imports, in GiB. Adapters on a CPU are left
# out, as its allocator keeps up to twice their tensors.
ON_A_CPU = {"sft full": 2.71, "reward full": 3.24, "ppo full": 5.42}
# Of docs/scaling.md: tensors on an H200, in bf16, before norms were fused.
ON_CUDA = {
    "sft full": 3_215_827_968,
    "sft lora": 1_194_667_520,
    "reward full": 3_319_391_744,
    "reward lora": 1_677_850_112,
}


def planned(name: str, precision: str, folder, *more: str) -> int:
    (folder / "config.json").write_text(json.dumps(SHAPES["135m"]))
    found = plan_of(*memory.overrides(name, precision, folder, folder), *more)
    return found.total - (plan.CUDA_RUNTIME if found.device == "cuda" else 0)


@pytest.mark.parametrize("name", ON_CUDA)
def test_tensors_on_a_gpu_take_what_the_plan_says_within_a_fifth(tmp_path, name):
    words = ("plan.device=cuda", "plan.device_memory=140GiB", "model.kernels=torch")
    assert planned(name, "bf16", tmp_path, *words) == pytest.approx(ON_CUDA[name], rel=0.2)


@pytest.mark.parametrize("name", ON_A_CPU)
def test_whole_models_on_a_cpu_take_what_the_plan_says_within_a_fifth(tmp_path, name):
    found = planned(name, "fp32", tmp_path, "trainer.accelerator=cpu")
    assert found == pytest.approx(ON_A_CPU[name] * GIB, rel=0.2)


def test_ranks_that_share_the_models_hold_what_fsdp2_held_on_fake_ranks():
    """8B on 8 and 70B on 64 GPUs: simulated in November 2026, in GB (docs/scaling.md)."""
    large = ["model.shape.hidden_size=8192", "model.shape.intermediate_size=28672"]
    large += ["model.shape.num_hidden_layers=80", "model.shape.num_attention_heads=64"]
    for more, rollout, update in (([], 53.4, 46.0), (["trainer.num_nodes=8", *large], 178, 56.7)):
        words = ["+experiment=ppo", "model=llama3_1_8b", ULTRA, "strategy=fsdp", *more]
        found = plan_of(*words, "trainer.devices=8", "plan.device=cuda", "plan.device_memory=80GB")
        for phase, expected in (("generate", rollout), ("update", update)):
            size = sum(found.phases[phase].values()) - plan.CUDA_RUNTIME
            assert size / 1e9 == pytest.approx(expected, rel=0.2), phase


def test_every_model_that_is_held_is_counted_with_its_own_shape(tmp_path):
    words = ["+experiment=ppo", *SHAPE, ULTRA, "plan.device=cuda"]
    one = plan_of(*words)
    ensemble = plan_of(*words, "scorer=reward_ensemble", "scorer.sources=[a,b,c]")
    assert ensemble.models["reward models"] == 3 * one.models["reward models"] > 0
    larger = tiny_policy("llama", hidden_size=256, intermediate_size=512, num_hidden_layers=4)
    larger.model.save_pretrained(tmp_path / "teacher")
    taught = plan_of(*words, f"artifacts.teacher={tmp_path / 'teacher'}")
    weights = sum(p.numel() for p in larger.parameters())
    assert 2 * weights < taught.models["teacher"] <= 4 * weights
    served = plan_of(*words, "artifacts.teacher=http://h:1", "rollout=transformers")
    assert "teacher" not in served.models
    assert "captured" not in served.phases["update"]


def test_an_evaluation_after_training_holds_no_optimizer_state_and_a_captured_decode_is_kept():
    found = plan_of("+experiment=ppo", *SHAPE, ULTRA, "plan.device=cuda", "lora=lora")
    assert "optimizer" not in found.phases["evaluate"]
    assert found.phases["update"]["captured"] <= sum(found.phases["generate"].values())


def test_a_reward_model_that_judges_dpo_at_its_end_is_counted_there():
    words = ["+experiment=dpo", *SHAPE, ULTRA, "plan.device=cuda"]
    without, judged = plan_of(*words), plan_of(*words, "scorer=reward_model", "artifacts.reward=a")
    weights = [found.phases["evaluate"]["weights"] for found in (without, judged)]
    assert weights[1] - weights[0] == judged.counts.held(judged.frozen, trunk=True) > 0
    assert judged.phases["update"] == without.phases["update"]


@pytest.mark.gpu
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", memory.KINDS)
@pytest.mark.parametrize("stage", memory.STAGES)
def test_a_run_on_a_gpu_holds_what_its_plan_says(tmp_path, stage, kind):
    words = ["--device", "cuda", "--stages", stage, "--kinds", kind, "--precision", "bf16"]
    found = memory.main([*words, "--out", str(tmp_path / "peaks.json")])
    assert abs(found["summary"]["rows"][f"{stage} {kind}"]["error"]) <= 0.2
