"""Every command in bf16, as a person types it, on one process and where it can on two ranks."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf_lightning.distributed.checkpoint import read_full
from tests.builders.command_lines import SMALL
from tests.builders.processes import run_python
from tests.builders.ranks import run_ranks
from tests.builders.runs import make_start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
STAGES = ("sft", "reward", "ppo")
PATIENCE = 600
PLACES = {
    "alone": ["trainer.precision=bf16-mixed"],
    "ddp": ["trainer.precision=bf16-mixed", "strategy=ddp", "trainer.devices=2"],
    # Weights are gathered in bf16; masters, and what autocast would be told, stay fp32.
    "fsdp": ["strategy=fsdp", "trainer.devices=2"],
}
# Full weights that are sharded are in test_on_gpus.py.
PAIRED = [("alone", "lora"), ("ddp", "none"), ("fsdp", "lora")]
FEW_UPDATES = ["module.ppo.num_minibatches=1", "module.ppo.num_ppo_epochs=1"]
FEW_ANSWERS = ["evaluation.num_prompts=8", "evaluation.batch_size=8", "evaluation.max_new_tokens=8"]
FEW_LABELS = ["candidates.num_prompts=24", "candidates.max_new_tokens=8", "lab.num_pairs=40"]
FEW_LABELS += ["lab.keep_unfinished=true", "artifacts.base=null", "artifacts.publish=null"]


@dataclass(frozen=True)
class Chain:
    """The runs of all stages at one place, and what each was started with."""

    place: str
    folder: Path
    commands: dict[str, list[str]]

    def run(self, stage: str) -> Path:
        return self.folder / stage

    def command(self, name: str, *arguments: str) -> str:
        words = ["-m", f"rlhf_lightning.{name}", *arguments]
        no_gpu = {"CUDA_VISIBLE_DEVICES": ""}
        done = run_python(*words, folder=self.folder, timeout=PATIENCE, **no_gpu)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout


@pytest.fixture(scope="module", params=PAIRED, ids=str)
def chain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """SFT, the reward model on it and PPO against that, trained for three iterations each."""
    place, lora = request.param
    folder = tmp_path_factory.mktemp(f"{place}_{lora}")
    start, sft, reward = make_start(folder / "start"), "sft/export", "reward/export"
    given = {
        "sft": [f"artifacts.base={start}"],
        "reward": [f"artifacts.sft={folder}/{sft}"],
        "ppo": [f"artifacts.sft={folder}/{sft}", f"artifacts.reward={folder}/{reward}"],
    }
    given["ppo"] += [*FEW_UPDATES, "module.sampling.max_new_tokens=8"]
    commands: dict[str, list[str]] = {}
    for stage in STAGES:
        commands[stage] = [f"+experiment={stage}", *SMALL, *given[stage], *PLACES[place]]
        commands[stage] += [f"lora={lora}", "data.batch_size=8", "trainer.accelerator=cpu"]
        run_ranks(
            ["-m", "rlhf_lightning.train", *commands[stage], f"hydra.run.dir={folder}/{stage}"],
            world_size=1 if place == "alone" else 2,
            folder=folder / f"logs_{stage}",
            fresh=True,
            timeout=PATIENCE,
        ).check()
    return Chain(place, folder, commands)


def summary(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    assert found["status"] == "completed"
    assert found["metrics"]
    assert all(math.isfinite(value) for value in found["metrics"].values())
    return found


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("stage", STAGES)
def test_train_and_export_leave_the_same_trained_model_in_fp32(chain: Chain, stage: str) -> None:
    run = chain.run(stage)
    summary(run)
    with (run / "metrics.csv").open() as file:
        assert [int(row["iteration"]) for row in csv.DictReader(file)] == [1, 2, 3]
    chain.command("export", str(run), f"to={run / 'again'}")
    own, again = weights(run / "export"), weights(run / "again")
    assert own.keys() == again.keys()
    for name, tensor in own.items():
        assert tensor.dtype == torch.float32
        assert tensor.isfinite().all()
        torch.testing.assert_close(again[name], tensor, msg=lambda m, n=name: f"{n}: {m}")
    if stage != "reward":
        before = {"sft": chain.folder / "start", "ppo": chain.run("sft") / "export"}[stage]
        assert any(not torch.equal(tensor, weights(before)[name]) for name, tensor in own.items())


def test_a_reward_model_is_exported_with_the_normalization_that_its_summary_tells(
    chain: Chain,
) -> None:
    metrics = summary(chain.run("reward"))["metrics"]
    checkpoint = chain.run("reward") / "checkpoints/last.ckpt"
    # Under FSDP2 it is a folder of shards.
    read = read_full if checkpoint.is_dir() else partial(torch.load, weights_only=True)
    state = read(checkpoint)["state_dict"]
    mean, std = metrics["reward/sample_mean"], metrics["reward/sample_std"]
    exported = weights(chain.run("reward") / "export")["score.weight"]
    torch.testing.assert_close(exported, state["model.head.weight"] / std)
    config = json.loads((chain.run("reward") / "export/config.json").read_text())
    expected = (state["model.head.bias"].item() - mean) / std
    assert config["reward_offset"] == pytest.approx(expected, abs=1e-6)


def test_the_other_commands_take_what_was_trained(chain: Chain) -> None:
    planned = json.loads(chain.command("plan", *chain.commands["ppo"], "plan.format=json"))
    assert planned["total"] > 0
    pages = [chain.run(stage) / "report.html" for stage in STAGES]
    for page in pages:
        page.unlink()
    chain.command("report", *(str(page.parent) for page in pages))
    assert all(page.is_file() for page in pages)
    if chain.place == "ddp":
        return  # the rest uses no ranks, and the exports are those of one process
    policy = f"{chain.run('ppo')}/export"
    sides = [f"policy={policy}", f"baseline={chain.run('sft')}/export"]
    sides += [f"artifacts.reward={chain.run('reward')}/export", "trainer.precision=bf16-mixed"]
    run = chain.folder / "evaluate"
    chain.command("evaluate", *sides, f"hydra.run.dir={run}", *FEW_ANSWERS)
    assert 0 <= summary(run)["metrics"]["val/score_win_rate"] <= 1
    run = chain.folder / "collect"
    chain.command("collect", f"artifacts.sft={policy}", f"hydra.run.dir={run}", *FEW_LABELS)
    summary(run)
    # Of nonsense all may tie, and no record be left.
    assert len((run / "labels.jsonl").read_text().splitlines()) > 40
