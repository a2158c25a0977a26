"""What differs between stages stands in one file a stage, and a package can bring its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_lightning.app.config.compose import ConfigError, conf_dir
from rlhf_lightning.app.stages.spec import StageError, StageSpec, find_stage, run_kind, stage_names
from tests.builders.command_lines import settings_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "rlhf_lightning"
COMPARISON = re.compile(r"\bstage\s*(==|!=)|\bstage (not )?in [(\[{]")
WITH_A_NAME = re.compile(r"\bstage\s*(==|!=)\s*[\"'](?!fit\b)|\bstage (not )?in [(\[{]")


def comparisons(pattern: re.Pattern[str], folder: Path) -> list[str]:
    """List the lines below `folder`, but for those of the stages, that compare a stage."""
    return [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in sorted(folder.rglob("*.py"))
        if PACKAGE / "app" / "stages" not in file.parents
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if pattern.search(line)
    ]


def test_nothing_in_app_but_a_stage_asks_which_stage_it_is() -> None:
    assert not comparisons(COMPARISON, PACKAGE / "app")


def test_nothing_else_asks_for_a_stage_by_its_name() -> None:
    # Lightning calls its own phases stages: "fit" is one of these.
    assert not comparisons(WITH_A_NAME, PACKAGE)


@pytest.mark.parametrize(
    "line", ['if cfg.stage == "ppo":', "x = stage != other", 'if stage in ("sft", "reward"):']
)
def test_a_comparison_is_found(line: str) -> None:
    assert COMPARISON.search(line)


def test_every_stage_is_found_by_its_name_and_differs_from_the_others() -> None:
    stages = [find_stage(name) for name in stage_names()]
    assert {"sft", "reward", "dpo", "ppo"} <= set(stage_names())
    assert [stage.name for stage in stages] == stage_names()
    assert {stage.trained for stage in stages} == {"policy", "model"}
    assert all((conf_dir() / "experiment" / f"{stage.name}.yaml").is_file() for stage in stages)
    assert all((conf_dir() / "module" / f"{stage.settings}.yaml").is_file() for stage in stages)


@pytest.mark.parametrize("name", ["base", "spec", "nosuch", "PPO", "", None, "os.path.STAGE"])
def test_what_is_no_stage_is_refused(name: object) -> None:
    with pytest.raises(StageError):
        find_stage(name)


def test_a_command_that_is_no_stage_is_called_by_its_own_name() -> None:
    assert [run_kind(name) for name in ("pipeline", "ppo", None)] == ["pipeline", "ppo", "None"]


def test_a_stage_of_another_package_needs_the_users_trust(tmp_path, monkeypatch) -> None:
    (tmp_path / "brought.py").write_text(
        "from dataclasses import replace\n"
        "from rlhf_lightning.app.stages.sft import STAGE as SFT\n"
        "STAGE = replace(SFT, name='brought', title='brought along')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = ["+experiment=sft", "stage=brought.STAGE", "name=own"]
    with pytest.raises(ConfigError, match="not below what RLHF_ALLOWED_TARGETS lists"):
        settings_of(*words)
    monkeypatch.setenv("RLHF_ALLOWED_TARGETS", "brought.")
    settings = settings_of(*words)
    stage = settings.spec
    assert isinstance(stage, StageSpec)
    assert run_kind(settings.stage) == "brought"
    assert (stage.name, stage.settings, stage.starts_from) == ("brought", "sft", "base")


def test_a_stage_is_found_without_torch() -> None:
    code = (
        "import sys\nfrom rlhf_lightning.app.stages.spec import find_stage, stage_names\n"
        "print(*[find_stage(name).title for name in stage_names()], sep=', ')\n"
        "assert 'torch' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    titles = "DPO, GRPO, PPO, reward model, supervised fine-tuning"
    assert result.stdout.strip() == titles
