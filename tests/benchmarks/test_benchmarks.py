from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import flops, ppo_iteration, shapes, tables
from benchmarks.command import PEER

# Each measured process imports torch anew, and the machine may be busy.
pytestmark = pytest.mark.timeout(600)

needs_peer = pytest.mark.skipif(
    not PEER.exists(), reason="needs TRL 1.12: benchmarks/peer_env.sh makes its environment"
)
needs_trl = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="needs TRL 1.16 (the dev extra)"
)


def measured(name: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """Run a benchmark on the tiny model, once; return what it wrote."""
    out = folder / "result.json"
    quick = ["--quick", "--repeats", "1", "--threads", "1", "--out", str(out)]
    module = importlib.import_module(f"benchmarks.{name}")
    module.main([*quick, *arguments])
    result = json.loads(out.read_text())
    assert result["benchmark"] == name
    assert result["machine"]["cpu"]
    assert str(folder) not in out.read_text(), "a result names places of this machine"
    assert module.render(result).count("|") > 10
    return result


def test_the_update_of_135m_is_the_11_8_teraflop_that_the_targets_speak_of() -> None:
    counted = flops.update_flops(shapes.SHAPES["135m"], shapes.WORKLOADS["cpu"])
    assert counted["nominal"] == pytest.approx(11.8e12, rel=0.005)
    assert counted["needed"] < counted["nominal"]


@pytest.mark.parametrize("name", ["tiny", "10m", "135m"])
def test_counted_weights_are_those_of_the_real_model(name: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = shapes.SHAPES[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape))
    matrices = [m for m in model.model.modules() if isinstance(m, torch.nn.Linear)]
    assert flops.trunk_weights(shape) == sum(m.weight.numel() for m in matrices)
    assert flops.head_weights(shape) == model.lm_head.weight.numel()


def test_the_tables_of_the_readme_say_what_the_results_say() -> None:
    tables.main(["--check"])


@pytest.mark.slow
def test_ppo_iteration_runs_the_real_module_and_counts_its_steps(tmp_path: Path) -> None:
    result = measured("ppo_iteration", tmp_path, "--only", "ours", "--precisions", "fp32")
    (lap,) = result["runs"]["ours fp32"][0]["iterations"]
    workload = shapes.WORKLOADS["quick"]
    assert lap["optimizer_steps"] == workload.num_ppo_epochs
    assert lap["response_tokens"] == workload.num_prompts * workload.new_tokens
    assert lap["prompt_tokens"] == sum(map(len, shapes.prompts(workload, 128, 0)))
    assert lap["seconds"] >= lap["generate"] + lap["score"] + lap["update"]
    memory = result["runs"]["ours fp32"][0]["memory"]
    assert memory["peak"] > memory["after_imports"] > 2**27


@needs_peer
@pytest.mark.slow
def test_ppo_iteration_runs_trl_with_the_same_steps_and_tokens(tmp_path: Path) -> None:
    result = measured("ppo_iteration", tmp_path, "--precisions", "bf16")
    ours, trl = (result["runs"][f"{side} bf16"][0]["iterations"][0] for side in ("ours", "trl"))
    for key in ("optimizer_steps", "prompt_tokens", "response_tokens"):
        assert ours[key] == trl[key], key
    assert trl["seconds"] >= trl["generate"] + trl["score"] + trl["update"]
    assert min(trl[phase] for phase in ppo_iteration.PHASES) > 0
    assert result["machine"]["versions"]["trl"]["trl"] == "1.12.0"


@pytest.mark.slow
def test_both_engines_generate_the_same_ragged_lengths(tmp_path: Path) -> None:
    result = measured("generation", tmp_path)
    tokens = {
        (name.split(", ")[1], lap["tokens"])
        for name, taken in result["runs"].items()
        for lap in taken[0]["iterations"]
    }
    assert len(tokens) == 2, "one number of tokens for fixed lengths, one for ragged ones"


@needs_trl
@pytest.mark.slow
def test_sft_and_reward_steps_run_against_trl(tmp_path: Path) -> None:
    result = measured("sft_reward_steps", tmp_path, "--iterations", "1")
    assert {name.split(",")[0] for name in result["summary"]["ratios"]} == {"sft", "reward"}
