"""The CPU kernels can be switched off, and their folder deleted."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from rlhf_lightning.models.cpu_kernels import cpu_kernels
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.summary import read_summary
from tests.builders.command_lines import environment
from tests.builders.processes import run_python
from tests.builders.stages import fit, ppo_hparams, tiny_module

# The folder as if it were deleted, and a run of PPO by its command's own function.
WITHOUT_THE_FOLDER = """
import sys
from pathlib import Path

class Deleted:
    def find_spec(self, name, path=None, target=None):
        if (name + ".").startswith("rlhf_lightning.models.cpu."):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Deleted())
from tests.builders.runs import completed

words = ["artifacts.reward=null", "model.cpu_kernels=false"]
completed(Path("run"), "ppo", Path(sys.argv[1]), *words)
assert "rlhf_lightning.models.cpu" not in sys.modules
"""


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_ppo_trains_with_the_kernels_off_and_starts_at_a_ratio_of_1(precision):
    with cpu_kernels(False):
        module = tiny_module("llama", ppo=ppo_hparams(num_minibatches=2, micro_batch_size=3))
        fit(module, 2, precision=precision)
    layers = [m for m in module.policy.modules() if isinstance(m, LlamaDecoderLayer)]
    assert {type(layer) for layer in layers} == {LlamaDecoderLayer}
    assert torch.equal(module.rollouts[0].logprobs, module.rollouts[0].ref_logprobs)
    assert module.steps[0]["ppo/approx_kl"] == 0
    assert module.steps[1]["ppo/approx_kl"] > 0


@pytest.mark.thorough
def test_a_run_with_the_switch_off_does_not_need_the_folder(start, tmp_path):
    (tmp_path / "program.py").write_text(WITHOUT_THE_FOLDER)
    done = run_python("program.py", start, folder=tmp_path, environment=environment())
    assert done.returncode == 0, done.stderr[-3000:]
    assert read_summary(RunFolder(tmp_path / "run")).status == "completed"
