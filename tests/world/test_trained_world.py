"""The built-in world is no toy: what its trained models show, judged by the hidden gold reward."""

import json
from pathlib import Path

import pytest
import torch

from rlhf_lightning.data.datamodules import PromptDataModule
from rlhf_lightning.data.demo.gold import gold_scores
from rlhf_lightning.data.demo.grammar import I_DO_NOT_KNOW
from rlhf_lightning.data.demo.source import DemoSource
from rlhf_lightning.evaluation.generate import Sampling, sample_batches
from rlhf_lightning.evaluation.generate import gold_scores as gold_of
from rlhf_lightning.evaluation.win_rate import win_rate
from rlhf_lightning.models.factory import frozen, load_policy
from rlhf_lightning.rollout.generators.base import CachedGenerator
from rlhf_lightning.rollout.noise import RowNoise
from rlhf_lightning.runs.folder import RunFolder, read_metrics
from rlhf_lightning.text.tokenizers import load_tokenizer
from tests.builders.processes import run_python
from tests.entry.test_as_python import check_same_bits

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def train(folder, *arguments, timeout=600):
    run_module("train", folder, *arguments, "logger=none", timeout=timeout)


def run_module(name, folder, *arguments, timeout=600):
    done = run_python("-m", f"rlhf_lightning.{name}", *arguments, folder=folder, timeout=timeout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def summary(folder: Path, name: str) -> dict:
    newest = max(folder.glob(f"outputs/{name}/*/summary.json"))
    return json.loads(newest.read_text())


@pytest.fixture(scope="module")
def trained(world_sft):
    """Base model and SFT policy of seed 1, as a user makes them."""
    return world_sft


def test_kto_learns_from_thumbs_and_passes_its_gates(trained):
    train(trained, "+experiment=kto")
    found = summary(trained, "kto")
    assert len(found["gates"]) == 6
    assert all(gate["passed"] for gate in found["gates"]), found["gates"]
    assert found["metrics"]["val/margin"] > 1
    rows = read_metrics(max(trained.glob("outputs/kto/*")) / "metrics.csv")
    assert rows[0]["dpo/loss"] == 0.5
    assert rows[-1]["dpo/loss"] < 0.4


@pytest.fixture(scope="module")
def sft_answers(trained):
    """Sixteen answers and one more of the SFT policy to each of 128 held-out prompts, by gold."""
    folder = trained / "artifacts/demo_seed1/sft"
    tokenizer = load_tokenizer(folder)
    data = PromptDataModule(
        DemoSource(seed=1),
        tokenizer,
        batch_size=128,
        num_iterations=1,
        max_prompt_length=64,
        seed=1,
        max_validation_rows=128,
        validation_batch_size=128,
    )
    generator = CachedGenerator([tokenizer.eos_token_id], tokenizer.pad_token_id)
    sampling = Sampling(generator, tokenizer, temperature=1.0, max_new_tokens=40)
    policy = frozen(load_policy(folder))
    draws = []
    for draw in range(17):
        noise = RowNoise(1, "evaluation", draw)
        answers = sample_batches(policy, data.val_dataloader(), sampling, noise=noise)
        draws.append(gold_of(gold_scores, answers))
    return answers.prompts, draws


def rate(ones: list[float], others: list[float]) -> float:
    return win_rate(torch.tensor(ones), torch.tensor(others), confidence=0.95).rate


def test_sft_beats_base_in_more_than_seventy_percent_of_comparisons(trained):
    assert summary(trained, "sft")["metrics"]["val/gold_win_rate"] > 0.7


def test_the_best_of_sixteen_answers_wins_so_there_is_something_to_learn(sft_answers):
    _, draws = sft_answers
    best = [max(row) for row in zip(*draws[:16], strict=True)]
    assert rate(best, draws[16]) >= 0.85


def test_another_sample_of_the_same_policy_wins_half_so_the_measure_is_fair(sft_answers):
    """Eight disjoint pairs of draws, 1,024 comparisons: 0.06 is almost four standard errors."""
    _, draws = sft_answers
    ones = [score for draw in draws[0:16:2] for score in draw]
    others = [score for draw in draws[1:16:2] for score in draw]
    assert rate(ones, others) == pytest.approx(0.5, abs=0.06)


def test_always_saying_i_do_not_know_loses_to_the_sft_policy(sft_answers):
    prompts, draws = sft_answers
    evasive = gold_scores(prompts, [I_DO_NOT_KNOW] * len(prompts), [True] * len(prompts))
    assert rate(evasive, draws[0]) < 0.35


@pytest.mark.parametrize("seed", [1, 2])
def test_reward_model_and_policy_reach_what_the_readme_promises(trained, tmp_path, seed):
    folder = trained if seed == 1 else tmp_path
    train(folder, "+experiment=ppo", f"seed={seed}", timeout=850)
    reward = summary(folder, "reward")["metrics"]
    assert reward["val/accuracy"] >= 0.85
    assert reward["val/accuracy"] > reward["val/longer_wins_accuracy"] + 0.1
    ppo = summary(folder, "ppo")["metrics"]
    assert ppo["val/gold_win_rate"] >= 0.75
    assert ppo["val/gold_win_rate_low"] > 0.70
    assert ppo["val/kl_per_token"] <= 0.5
    assert ppo["val/num_prompts"] >= 400


def test_the_program_of_the_ppo_trains_what_the_command_trained_to_the_bit(trained):
    """After the test above, which made the reward model and the run."""
    written = run_module("train", trained, "+experiment=ppo", "logger=none", "--as-python")
    (trained / "program.py").write_text(written)
    done = run_python("program.py", folder=trained, timeout=850)
    assert done.returncode == 0, done.stderr[-3000:]
    (folder,) = trained.glob("outputs/ppo/2*")
    check_same_bits(RunFolder(trained / "outputs/ppo/program"), RunFolder(folder))


@pytest.mark.timeout(1800)
def test_without_a_kl_penalty_the_learnt_score_is_higher_and_gold_lower(tmp_path, trained):
    """Over-optimization: a long run without the penalty against the run above, on the same data."""
    train(
        tmp_path,
        "+experiment=ppo",
        "module.ppo.kl_coef=0",
        "data.num_iterations=90",
        f"paths.artifacts={trained}/artifacts",
        "artifacts.publish=null",
        timeout=1500,
    )
    kept, loose = (summary(folder, "ppo")["metrics"] for folder in (trained, tmp_path))
    assert loose["val/score"] > kept["val/score"] + 0.1
    assert loose["val/gold"] < kept["val/gold"] - 0.5
    assert loose["val/response_length"] > loose["val/baseline_response_length"] + 1
    newest = max(tmp_path.glob("outputs/ppo/*/metrics.csv"))
    scores = [row["rollout/score"] for row in read_metrics(newest)]
    assert sum(scores[-10:]) / 10 > sum(scores[:10]) / 10 + 0.5


@pytest.mark.timeout(2400)
def test_the_lab_labels_by_budget_and_its_records_train_a_reward_model(tmp_path, trained):
    """5,000 pairs of the base model and the SFT policy; people look at a third of them."""
    artifacts = f"paths.artifacts={trained}/artifacts"
    records = tmp_path / "preferences"
    run_module("collect", tmp_path, artifacts, f"artifacts.publish={records}", timeout=1500)
    lab = summary(tmp_path, "collect")["metrics"]
    assert lab["collect/num_pairs"] == 5000
    assert 0.6 <= lab["collect/automatic_share"] <= 0.7
    assert lab["collect/hours"] < 0.6 * lab["collect/hours_before"]
    assert lab["collect/money"] < 0.6 * lab["collect/money_before"]
    assert 0.3 < lab["collect/fleiss_kappa"] < 0.9
    rows = {
        part: [json.loads(line) for line in (records / f"{part}.jsonl").read_text().splitlines()]
        for part in ("train", "validation")
    }
    prompts = {part: {row["prompt"] for row in found} for part, found in rows.items()}
    assert not prompts["train"] & prompts["validation"]
    assert {row["labelled_by"] for row in rows["train"]} == {"automatic", "people"}
    assert {row["labelled_by"] for row in rows["validation"]} == {"people"}

    train(
        tmp_path, "+experiment=reward", artifacts, f"data.path={records}", "artifacts.publish=null"
    )
    reward = summary(tmp_path, "reward")["metrics"]
    assert reward["val/label_ceiling"] == pytest.approx(lab["val/label_ceiling"])
    assert reward["val/accuracy"] > reward["val/longer_wins_accuracy"] + 0.1
    assert 0.75 < reward["val/accuracy"] < reward["val/label_ceiling"] + 0.04
