"""What differs between stages stands in one file a stage, and a package can bring its own."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from rlhf_lightning.app.config.compose import ConfigError, conf_dir
from rlhf_lightning.app.stages.spec import Stage, StageError, find_stage, stage_names
from tests.builders.command_lines import settings_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "rlhf_lightning"
# Where such words are the names of something else than stages.
OTHER_NAMES = {
    "app/config/commands.py": "the experiments of a pipeline",
    "app/next_command.py": "the experiment that takes a model, and its key of artifacts",
    "app/pipeline_steps.py": "the steps of a pipeline, which are experiments",
    "functional/surrogates.py": "names of surrogates",
    "hparams.py": "names of surrogates",
    "models/learning_rates.py": "kinds of learning rates",
}
HOMONYMS = {"reward"}  # also an argument, a model and a kind of KL: alone it says nothing


def names_of_stages(source: str) -> list[int]:
    """Return the lines in which a name of a stage is a key, one of several, or compared."""
    names = set(stage_names())
    found: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        parts: list[ast.expr | None] = []
        if isinstance(node, ast.Dict):
            parts = [*node.keys]
        elif isinstance(node, ast.Tuple | ast.List | ast.Set):
            parts = [*node.elts]
        elif isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            parts = [node.value]
        named = {
            p.value: p.lineno for p in parts if isinstance(p, ast.Constant) and p.value in names
        }
        if set(named) - HOMONYMS:
            found |= set(named.values())
    return sorted(found)


def own_names(file: Path) -> set[str]:
    """Return the name by which a module calls itself: `stage = "ppo"`."""
    return set(re.findall(r'^    stage = "(\w+)"$', file.read_text(), re.M))


def test_nothing_but_a_stage_knows_the_names_of_stages() -> None:
    found = {
        str(file.relative_to(PACKAGE)): lines
        for file in sorted(PACKAGE.rglob("*.py"))
        if PACKAGE / "app" / "stages" not in file.parents and not own_names(file)
        if (lines := names_of_stages(file.read_text()))
    }
    assert set(found) == set(OTHER_NAMES), found


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


def test_a_stage_of_another_package_needs_the_users_trust(tmp_path, monkeypatch) -> None:
    (tmp_path / "brought.py").write_text(
        "from rlhf_lightning.app.stages.sft import SFTStage\n"
        "class Brought(SFTStage):\n"
        "    name = 'brought'\n"
        "    title = 'brought along'\n"
        "STAGE = Brought()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = ["+experiment=sft", "stage=brought.STAGE", "name=own"]
    with pytest.raises(ConfigError, match="not below what RLHF_ALLOWED_TARGETS lists"):
        settings_of(*words)
    monkeypatch.setenv("RLHF_ALLOWED_TARGETS", "brought.")
    settings = settings_of(*words)
    stage = settings.spec
    assert isinstance(stage, Stage)
    assert settings.kind == "brought"
    assert (stage.name, stage.settings, stage.starts_from) == ("brought", "sft", "base")
