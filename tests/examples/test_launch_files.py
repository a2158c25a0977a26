"""The files of `examples/launch`: short, and their command lines are torchrun's and ours."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from torch.distributed.run import get_args_parser

from rlhf_lightning.app.config.compose import register
from rlhf_lightning.app.config.ways import spelled_out
from tests.builders.command_lines import settings_of
from tests.builders.launch_files import LAUNCH, shell_text, torchrun_words

FILES = sorted(LAUNCH.iterdir())


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_file_is_short_and_its_command_composes(file, tmp_path):
    assert len(file.read_text().splitlines()) < 40
    assert shell_text(file).count("torchrun ") == 1
    words = torchrun_words(file, tmp_path, *(["seed=3"] if file.suffix == ".sbatch" else []))
    found = get_args_parser().parse_args(words)
    assert (found.module, found.training_script) == (True, "rlhf_lightning.train")
    register()
    settings = settings_of(*spelled_out(found.training_script_args))
    nodes, scorer = int(found.nnodes.partition(":")[0]), settings.scorer.get("function")
    ranks = nodes * int(found.nproc_per_node)
    stage = (settings.stage, scorer, settings.resume, settings.trainer.num_nodes)
    assert stage == ("grpo", "reward.py:score", "auto", nodes)
    assert settings.seed == (3 if file.suffix == ".sbatch" else 1)
    assert settings.select("data.batch_size") % (ranks * settings.hparams.num_minibatches) == 0


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
def test_shellcheck_finds_nothing_in_the_script_of_slurm():
    subprocess.run(["shellcheck", LAUNCH / "slurm.sbatch"], check=True)
