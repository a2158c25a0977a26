"""The whole spine as a user runs it, in a few steps: base, SFT, reward model, PPO, resume."""

import json
import math
import os
from pathlib import Path

import pytest
import torch

from rlhf_lightning.models.factory import load_policy, load_scalar_model
from rlhf_lightning.runs.folder import read_metrics
from tests.builders.command_lines import FEW
from tests.builders.processes import run_python
from tests.multiprocess.kills import different

SMALL = [
    *FEW,
    "logger=none",
    "evaluation.num_prompts=8",
    "+dataset.source.num_texts=96",
    "+dataset.source.num_demonstrations=96",
    "+dataset.source.num_preferences=96",
    "+dataset.source.num_validation_preferences=64",
]
BATCH = "data.batch_size=8"
# All of them, or the fixture, which runs four commands, would be made in both sets of tests.
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]
ONE_STEP = ["module.ppo.num_ppo_epochs=1", "module.ppo.num_minibatches=1"]  # an iteration


def train(folder, *arguments, timeout=240, check=True):
    done = run_python("-m", "rlhf_lightning.train", *arguments, folder=folder, timeout=timeout)
    if check:
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """Train SFT in an empty folder, which trains the base first, then reward model and PPO."""
    folder = tmp_path_factory.mktemp("chain")
    done = train(folder, "+experiment=sft", *SMALL, BATCH)
    train(folder, "+experiment=reward", *SMALL, BATCH)
    train(folder, "+experiment=ppo", *SMALL, BATCH, *ONE_STEP)
    return folder, done


def only(folder: Path, pattern: str) -> Path:
    found = list(folder.glob(pattern))
    assert len(found) == 1, (pattern, found)
    return found[0]


def summary(folder, name):
    return json.loads(only(folder, f"outputs/{name}/*/summary.json").read_text())


def test_a_fresh_folder_trains_what_is_missing_first_and_says_so(chain):
    folder, done = chain
    assert "The base model of the built-in world is not in" in done.stdout
    artifacts = folder / "artifacts/demo_seed1"
    for kind in ("base", "sft", "reward", "ppo"):
        manifest = json.loads((artifacts / kind / "manifest.json").read_text())
        assert len(manifest["fingerprint"]) == 64


def test_every_stage_leaves_its_summary_with_the_fixed_keys(chain):
    folder, _ = chain
    reward = summary(folder, "reward")["metrics"]
    for key in ("accuracy", "accuracy_low", "accuracy_high", "longer_wins_accuracy"):
        assert 0 <= reward[f"val/{key}"] <= 1
    assert 0.88 <= reward["val/label_ceiling"] <= 0.95
    assert reward["val/calibration_error"] >= 0
    ppo = summary(folder, "ppo")
    assert (ppo["status"], ppo["stage"], ppo["seed"]) == ("completed", "ppo", 1)
    for key in ("gold_win_rate", "gold_win_rate_low", "gold_win_rate_high", "kl_per_token"):
        assert isinstance(ppo["metrics"][f"val/{key}"], float)
    for key in ("score", "response_length", "distinct_2"):
        assert isinstance(ppo["metrics"][f"val/{key}"], float)
    assert {gate["name"] for gate in ppo["gates"]} == {
        "gold_win_rate",
        "gold_win_rate_low",
        "kl_per_token",
        "policy_moved",
        "refuses_no_more",
        "still_refuses",
    }


def test_policy_and_reference_agree_exactly_before_the_first_update(chain):
    folder, _ = chain
    rows = read_metrics(only(folder, "outputs/ppo/*/metrics.csv"))
    assert [row["iteration"] for row in rows] == [1, 2, 3]
    assert rows[0]["rollout/kl_per_token"] == 0.0
    assert rows[1]["rollout/kl_per_token"] != 0.0
    for row in rows:
        assert row["ppo/approx_kl"] == row["ppo/clipfrac"] == 0.0
        assert abs(row["ppo/policy_loss"]) < 1e-6  # minus the mean of whitened advantages
        assert row["ppo/policy_grad_norm"] > 0


def test_exports_reload_to_the_models_that_were_trained_and_samples_show_both_answers(chain):
    folder, _ = chain
    run = only(folder, "outputs/ppo/*/summary.json").parent
    checkpoint = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    assert not list((run / "export").rglob("*value*")), "the policy alone"
    exported = load_policy(run / "export")
    for name, value in exported.state_dict().items():
        assert torch.equal(value, checkpoint["state_dict"][f"policy.{name}"]), name
    card = (run / "export/README.md").read_text()
    assert "| val/gold_win_rate |" in card
    assert "gate | outcome" in card
    reward = load_scalar_model(folder / "artifacts/demo_seed1/reward")
    assert reward.head.weight.abs().sum() > 0
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert any("baseline_response" in sample for sample in samples)
    assert "<html" in (run / "report.html").read_text()


@pytest.mark.parametrize(
    "stage",
    [
        pytest.param("sft", marks=pytest.mark.slow),
        pytest.param("reward", marks=pytest.mark.slow),
        "ppo",
    ],
)
def test_a_run_that_is_killed_resumes_to_the_same_bits(chain, tmp_path, monkeypatch, stage):
    folder, _ = chain
    artifacts = f"paths.artifacts={folder}/artifacts"
    common = [f"+experiment={stage}", *SMALL, BATCH, artifacts]
    common += ["artifacts.publish=null"]
    if stage == "reward":  # dropout draws from the global generator, which must come back too
        common += ["module.dropout=0.1"]
    common += ["callbacks.checkpoint.every_n_iterations=1"]
    killer = tmp_path / "killer.py"
    killer.write_text(
        "import os, signal\n"
        "from lightning.pytorch.callbacks import Callback\n"
        "class Kill(Callback):\n"
        "    def on_train_batch_start(self, trainer, module, batch, batch_idx):\n"
        "        if batch_idx == 2 and not os.path.exists('killed'):\n"
        "            open('killed', 'w').close()\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir(), broken.mkdir()
    (whole / "killed").touch()
    if stage == "ppo":  # the run of the chain was not killed
        whole, common = folder, [*common, *ONE_STEP]
    path = str(tmp_path) + os.pathsep + os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("RLHF_ALLOWED_TARGETS", "killer.")
    common += ["+callbacks.extra.kill._target_=killer.Kill", "resume=auto"]
    if stage != "ppo":
        train(whole, *common)
    assert train(broken, *common, check=False).returncode == -9
    train(broken, *common)
    runs = [only(root, f"outputs/{stage}/*/summary.json").parent for root in (whole, broken)]
    states = [torch.load(run / "checkpoints/last.ckpt", weights_only=True) for run in runs]
    for part in ("state_dict", "optimizer_states"):
        assert different(*(state[part] for state in states)) == []
    tables = [read_metrics(run / "metrics.csv") for run in runs]
    for one, other in zip(*tables, strict=True):
        for key in one:
            if not key.startswith(("time/", "throughput/")):
                assert one[key] == other[key], key
    samples = [run / "samples.jsonl" for run in runs]
    if stage == "ppo":
        assert samples[0].read_text() == samples[1].read_text()


def test_dpo_starts_at_log_2_and_leaves_a_policy_that_an_evaluation_takes(chain):
    folder, _ = chain
    train(folder, "+experiment=dpo", *SMALL, BATCH, "data.num_epochs=1")
    done = summary(folder, "dpo")
    assert (done["status"], done["stage"]) == ("completed", "dpo")
    for key in ("accuracy", "chosen_reward", "gold_win_rate", "kl_per_token"):
        assert isinstance(done["metrics"][f"val/{key}"], float)
    assert {gate["name"] for gate in done["gates"]} >= {"gold_win_rate", "policy_moved"}
    run = only(folder, "outputs/dpo/*/summary.json").parent
    first = read_metrics(run / "metrics.csv")[0]
    assert first["dpo/loss"] == pytest.approx(math.log(2), abs=1e-7)
    assert first["dpo/margin"] == first["dpo/accuracy"] == 0
    checkpoint = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    for name, value in load_policy(run / "export").state_dict().items():
        assert torch.equal(value, checkpoint["state_dict"][f"policy.{name}"]), name
    words = [f"run={run}", "scorer=none", "evaluation.num_prompts=16"]
    evaluated = run_python("-m", "rlhf_lightning.evaluate", *words, folder=folder, timeout=120)
    assert evaluated.returncode == 0, evaluated.stdout[-3000:] + evaluated.stderr[-3000:]
    assert summary(folder, "evaluate")["metrics"]["val/gold_win_rate"] >= 0
