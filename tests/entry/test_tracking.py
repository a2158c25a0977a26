"""What a real PPO run leaves in an offline W&B run, read back by W&B's own reader."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra.core.hydra_config import HydraConfig

from rlhf_lightning.app.build import sweep_group
from rlhf_lightning.app.config.compose import composed, register
from rlhf_lightning.app.dashboard import MEDIA, sections
from rlhf_lightning.app.tracking import artifact_name
from rlhf_lightning.callbacks.wandb_logger import Origin, as_artifact, records_fingerprint
from rlhf_lightning.runs.folder import RunFolder, read_metrics, read_samples
from rlhf_lightning.runs.manifest import source_fingerprint
from rlhf_lightning.runs.metric_catalog import FAMILIES, QUANTITIES
from rlhf_lightning.runs.summary import read_summary
from tests import offline_wandb
from tests.builders.metrics import is_known
from tests.builders.runs import completed

NUM_ITERATIONS = 11  # one more than W&B's tables of samples wait


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory, start: Path) -> RunFolder:
    """A PPO run in an offline W&B run; its weights are random, so it misses its gates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WANDB_DATA_DIR", raising=False)
        return completed(
            tmp_path_factory.mktemp("tracked") / "ppo",
            "ppo",
            start,
            "artifacts.reward=null",
            "logger=wandb",
            "logger.mode=offline",
            "gates=ppo",
            "trainer.limit_train_batches=null",
            f"data.num_iterations={NUM_ITERATIONS}",
            "callbacks.samples.num_samples=3",
            "evaluation.num_samples=5",
        )


@pytest.fixture(scope="module")
def records(tracked):
    (found,) = offline_wandb.segments(tracked.path)
    return found


@pytest.mark.timeout(120)
def test_every_metric_has_iteration_as_its_axis_and_the_values_of_metrics_csv(tracked, records):
    defined = {r["metric"].get("name"): r["metric"] for r in records if "metric" in r}
    for name in QUANTITIES:
        assert defined[name]["step_metric"] == "iteration", name
    globs = {r["metric"].get("glob_name") for r in records if "metric" in r}
    assert {*(f for f in FAMILIES if f.endswith("*")), "*"} <= globs
    logged = offline_wandb.by_iteration(offline_wandb.history(records))
    rows = read_metrics(tracked.metrics)
    assert len(rows) == NUM_ITERATIONS
    for row in rows:
        for name, value in row.items():
            assert logged[int(row["iteration"])][name] == pytest.approx(value, rel=1e-6), name
    assert {name for row in rows for name in row if not is_known(name)} == {"iteration"}


def test_the_panels_of_the_dashboard_name_what_ppo_logs(records):
    of_others = {"rollout/informative_groups", "rollout/teacher_kl_per_token"}
    wanted = {*sections()["rollout"], *sections()["ppo"], *MEDIA} - of_others
    assert len(wanted) > 14
    # A table or histogram is told by its parts, `samples/best.nrows`.
    logged = {name.partition(".")[0] for name in offline_wandb.logged_names(records)}
    assert wanted <= logged, sorted(wanted - logged)


def test_the_final_metrics_and_gates_are_in_the_summary_and_an_alert_names_what_failed(
    tracked, records
):
    kept = offline_wandb.summary_of(records)
    summary = read_summary(tracked)
    for name, value in summary.metrics.items():
        assert is_known(name), name
        assert kept[name] == pytest.approx(value), name
    failed = [gate.name for gate in summary.gates if not gate.passed]
    assert failed
    for gate in summary.gates:
        verdict = None if gate.word == "not measured" else int(gate.passed)
        assert kept.get(f"gates/{gate.name}") == verdict
    rows = offline_wandb.table(tracked.path, "gates")
    assert [row["gate"] for row in rows] == [gate.name for gate in summary.gates]
    assert [row["reason"] for row in rows] == [gate.reason for gate in summary.gates]
    alerts = [r["alert"] for r in records if "alert" in r]
    # The doctor has alerts of its own.
    (alert,) = [alert for alert in alerts if alert["title"].endswith("gates failed")]
    assert alert["title"] == f"{len(failed)} of {len(summary.gates)} gates failed"
    assert all(name in alert["text"] for name in failed)


def test_tables_hold_the_held_out_prompts_and_the_best_and_worst_of_a_rollout(tracked):
    held_out = offline_wandb.table(tracked.path, "samples/held_out")
    compared = [s for s in read_samples(tracked.samples) if "baseline_response" in s]
    assert len(held_out) == 5 == len(compared)
    for row, sample in zip(held_out, compared, strict=True):
        assert row["iteration"] == NUM_ITERATIONS
        assert row["baseline response"] == sample["baseline_response"]
        assert row["score"] == pytest.approx(sample["score"])
    best = offline_wandb.table(tracked.path, "samples/best")
    worst = offline_wandb.table(tracked.path, "samples/worst")
    assert {row["iteration"] for row in best + worst} == {10}
    assert len(best) == len(worst) == 3
    scores = [row["score"] for row in best]
    assert scores == sorted(scores, reverse=True)
    assert [row["score"] for row in worst] == sorted(row["score"] for row in worst)
    assert scores[0] >= worst[-1]["score"]


def test_histograms_count_what_was_sampled_and_updated_on(tracked, records):
    rows = offline_wandb.history(records)
    shown = [row for row in rows if "histograms/scores.values" in row]
    assert [row["iteration"] for row in shown] == list(range(1, NUM_ITERATIONS + 1))
    csv = {int(row["iteration"]): row for row in read_metrics(tracked.metrics)}
    for row in shown:
        measured = csv[row["iteration"]]
        tokens = round(measured["rollout/response_length"] * 4)  # of 4 rows
        assert sum(row["histograms/scores.values"]) == 4
        assert sum(row["histograms/advantages.values"]) == tokens
        assert sum(row["histograms/ratios.values"]) == tokens


def test_configuration_commit_and_lineage_are_in_the_run(tracked, records):
    summary = read_summary(tracked)
    first = next(r["run"] for r in records if "run" in r)["config"]["update"]
    assert first["git_commit"] == summary.git_commit
    assert first["config_hash"]
    assert first["versions"]["torch"] == summary.versions["torch"]
    assert first["module"]["ppo"]["kl_coef"] == 0.05
    updates = [r["config"]["update"] for r in records if "config" in r]
    assert all(update.keys() == {"lineage"} for update in updates), "no hyper-parameter twice"
    lineage = next(r["config"]["update"] for r in records if "config" in r)["lineage"]
    assert set(lineage["used"]) == {"data", "sft"}
    assert set(lineage["made"]) == {"ppo"}
    made = [r["artifact"] for r in records if r.get("artifact", {}).get("type") == "model"]
    assert [artifact["name"] for artifact in made] == ["demo_seed1-ppo"]
    assert lineage["made"]["ppo"]["artifact"] == "demo_seed1-ppo"


def test_what_a_stage_makes_has_the_digest_under_which_the_next_one_uses_it(tracked, start):
    mark = source_fingerprint(str(start))
    made = as_artifact(Origin("sft", "w-sft", "model", mark, {"metrics": {"val/loss": 1.0}}))
    used = as_artifact(Origin("base", artifact_name("artifacts/w/sft"), "model", mark))
    assert (made.name, made.digest) == (used.name, used.digest)
    other = as_artifact(Origin("sft", "w-sft", "model", "0" * 64))
    assert other.digest != made.digest
    assert records_fingerprint([1, 2]) != records_fingerprint([2, 1])


def test_the_jobs_of_a_sweep_share_a_group_and_a_single_run_has_none():
    register()
    overrides = ["+experiment=ppo", "hydra.sweep.dir=outputs/multirun/today", "hydra.job.num=0"]
    for mode, group in (("MULTIRUN", "ppo/today"), ("RUN", None)):
        HydraConfig.instance().set_config(composed("train", [*overrides, f"hydra.mode={mode}"]))
        assert sweep_group("ppo") == group
    HydraConfig.instance().cfg = None
    assert sweep_group("ppo") is None
