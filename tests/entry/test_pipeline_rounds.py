"""`python -m rlhf_lightning.pipeline rounds=2`: what the rounds after the first run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rlhf_lightning.app.config.compose import given
from rlhf_lightning.app.pipeline import run, where_to_run
from rlhf_lightning.app.pipeline_steps import plan
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.lock import FolderTakenError, claim_run
from rlhf_lightning.runs.summary import new_summary, write_summary
from tests.builders.runs import make_start
from tests.entry.test_collect import DECIDED
from tests.entry.test_pipeline import (
    TINY,
    composed,
    only,
    pipeline,
    settings_of_step,
    summary,
)

pytestmark = pytest.mark.timeout(900)
FEW = [
    "candidates.num_prompts=24",
    "candidates.max_new_tokens=8",
    "lab.keep_unfinished=true",
    "lab.num_pairs=40",
]


@pytest.mark.thorough
def test_a_later_round_goes_on_from_the_last_policy_with_all_pairs(tmp_path: Path) -> None:
    steps = {step.name: step for step in plan(composed("rounds=3"), tmp_path)}
    stages = ["collect", "adversarial", "reward", "ppo", "evaluate"]
    assert list(steps)[5:] == [f"round_{k}/{s}" for k in (2, 3) for s in stages]
    one, two, three = (tmp_path / f"round_{k}" for k in (1, 2, 3))
    # The SFT policy of round 1 is the start of reward models, the reference and the baseline.
    artifacts = given("paths.artifacts", one / "artifacts")
    assert all(artifacts in step.words for step in steps.values())
    start = settings_of_step(steps["round_2/ppo"]).artifacts.sft
    assert start == str(one / "artifacts/demo_seed1/sft")
    collect = steps["round_3/collect"].words
    assert given("+candidates.policies.policy", two / "ppo/export") in collect
    assert "candidates.policies.sft=null" in collect
    adversarial = steps["round_3/adversarial"]
    assert adversarial.command == "collect"
    assert given("adversarial.run", three / "collect") in adversarial.words
    assert given("artifacts.reward", two / "reward/export") in adversarial.words
    (also,) = [w for w in steps["round_3/reward"].words if w.startswith("data.also=")]
    places = [r / name / "data" for r in (two, three) for name in ("collect", "adversarial")]
    assert also == "data.also=[" + ",".join(f"'{place}'" for place in places) + "]"
    ppo = steps["round_3/ppo"].words
    assert given("artifacts.ppo", two / "ppo/export") in ppo
    assert given("artifacts.reward", three / "artifacts/reward") in ppo
    assert given("artifacts.publish", three / "artifacts/ppo") in ppo
    assert given("run", three / "ppo") in steps["round_3/evaluate"].words


@pytest.mark.thorough
def test_the_newest_pipeline_decides_what_is_gone_on_with(working_folder: Path) -> None:
    root, digest = working_folder / "outputs/pipeline", composed().config_hash
    new = RunFolder(root / "2026-11-09_09-00-00")
    made = new_summary("pipeline", seed=1, config_hash=digest)
    made = replace(made, about={"stages": "round_1/sft, round_1/ppo"})
    days = {"2026-11-02": "failed", "2026-11-03": "completed", "2026-11-04": "failed"}
    for day, status in days.items():
        folder = RunFolder(root / f"{day}_09-00-00").create()
        known = "another" if day == "2026-11-04" else digest
        write_summary(folder, replace(made, status=status, config_hash=known))
    # Monday's failure was given up for Tuesday's success; Wednesday's is of other experiments.
    assert where_to_run(composed(), new) == new
    assert where_to_run(composed("rounds=2"), new).path.name == "2026-11-03_09-00-00"
    thursday = RunFolder(root / "2026-11-05_09-00-00").create()
    write_summary(thursday, replace(made, status="stopped"))
    assert where_to_run(composed("rounds=2"), new).path.name == thursday.path.name
    with claim_run(thursday.path), pytest.raises(FolderTakenError, match="in use by process"):
        run(composed("rounds=2"), new)


def check_second_round(made: Path, start: Path) -> None:
    """What round 2 was made of, before anything of it ran again."""
    # The policy of round 1 answered; what its reward model overrated was labelled again.
    models = {row["model"] for row in rows(made / "round_2/collect/candidates.jsonl")}
    assert models == {"policy"}
    paired = rows(made / "round_2/adversarial/data/train.jsonl")
    assert paired
    first = {row["rejected"] for row in rows(made / "round_2/collect/data/train.jsonl")}
    assert all(first & {row["chosen"], row["rejected"]} for row in paired)
    # PPO went on from that policy, and measures its KL from the one that round 1 started with.
    one, two = (load_file(made / f"round_{k}/ppo/export/model.safetensors") for k in (1, 2))
    before = load_file(start / "model.safetensors")
    name = next(key for key in one if key.endswith("q_proj.weight"))
    assert 0 < (two[name] - one[name]).norm() < (two[name] - before[name]).norm()
    metrics = summary(made)["metrics"]
    kl = [metrics[f"round_{k}/ppo/kl_per_token"] for k in (1, 2)]
    assert kl[1] > kl[0]
    assert json.loads((made / "round_2/artifacts/ppo/manifest.json").read_text())["stage"] == "ppo"


@pytest.mark.slow
def test_a_second_round_goes_on_from_the_first_and_its_changed_step_runs_anew_alone(
    tmp_path: Path,
) -> None:
    start = make_start(tmp_path / "start")
    # So little is learnt that every gate fails; what is tested is that the rounds fit together.
    common = [
        "evaluate=false",
        "experiments.base=null",
        "experiments.sft=null",
        *TINY,
        f"train:artifacts.sft={start}",
        "ppo:data.batch_size=16",
        *(f"collect:{word}" for word in (f"artifacts.sft={start}", *FEW, *DECIDED)),
    ]
    pipeline(tmp_path, *common, "rounds=2", "accept=[reward,round_1/ppo]", code=4)
    made = only(tmp_path)
    # With the settings of PPO, which what comes before it takes over.
    made_of = ["adversarial", "artifacts", "collect", "ppo", "ppo.yaml", "reward"]
    assert sorted(path.name for path in (made / "round_2").iterdir()) == made_of
    found = summary(made)
    assert found["status"] == "stopped"
    assert "accept=[round_2/ppo]" in found["cause"]
    rates = [found["metrics"][f"round_{k}/ppo/gold_win_rate"] for k in (1, 2)]
    assert all(0 <= rate <= 1 for rate in rates)
    assert found["metrics"]["val/gold_win_rate"] == rates[1]
    assert "<h2>Rounds</h2>" in (made / "report.html").read_text()
    check_second_round(made, start)
    # Another word for one step of round 2 runs that step and what is behind it.
    kept = {
        name: (made / name / "summary.json").stat().st_mtime_ns
        for name in ("round_1/ppo", "round_2/collect", "round_2/adversarial", "round_2/reward")
    }
    again = ["rounds=2", "round_2/ppo:module.ppo.kl_coef=0.2", "accept=[reward,ppo]"]
    told = pipeline(tmp_path, *common, *again)
    assert summary(made)["status"] == "completed"
    assert only(tmp_path) == made
    for step in ("round_1/ppo", "round_2/reward"):
        assert f"{step}: done before" in told
    assert (made / "round_2/ppo_before_1/summary.json").is_file()
    assert {n: (made / n / "summary.json").stat().st_mtime_ns for n in kept} == kept


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]
