"""What differs between stages stands in the class of its module, and nothing else names them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import rlhf_lightning

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
MODULES = [
    cls
    for name in rlhf_lightning.__all__
    if name.endswith("Module") and hasattr(cls := getattr(rlhf_lightning, name), "stage")
]
HOMONYMS = {"reward"}  # also an argument, a model and a kind of KL: alone it says nothing


def names_of_stages(source: str) -> list[int]:
    """Return the lines in which a name of a stage is a key, one of several, or compared."""
    names = {module.stage for module in MODULES}
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
        if not own_names(file)
        if (lines := names_of_stages(file.read_text()))
    }
    assert set(found) == set(OTHER_NAMES), found
