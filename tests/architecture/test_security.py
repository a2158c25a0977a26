"""Nothing in the package loads pickles, runs a shell or evaluates text; weights are safetensors."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "rlhf_lightning"
# It defines an unpickler that builds a short list of classes and nothing else.
UNPICKLER = "rlhf_lightning/runs/resume.py"
PICKLING = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
EVALUATING = {"eval", "exec", "compile", "__import__"}


def dotted(node: ast.AST) -> str:
    """Write `a.b.c` of an expression of names; "" of any other."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def is_true(call: ast.Call, name: str) -> bool:
    values = [k.value for k in call.keywords if k.arg == name]
    return bool(values) and isinstance(values[0], ast.Constant) and values[0].value is True


def passes(call: ast.Call, name: str) -> bool:
    return any(k.arg in (name, None) for k in call.keywords)


def call_problems(call: ast.Call) -> Iterator[str]:
    """Say what a call does that no file of the package may do."""
    name = dotted(call.func)
    last = name.rpartition(".")[2]
    if name == "torch.load" and not is_true(call, "weights_only"):
        yield "torch.load without weights_only=True"
    if last == "fit" and passes(call, "ckpt_path") and not is_true(call, "weights_only"):
        yield "Trainer.fit from a checkpoint without weights_only=True"
    if last == "load_from_checkpoint" or name.startswith("torch.hub."):
        yield f"{name} runs what it loads"
    if name in EVALUATING:
        yield f"{name} evaluates text"
    if name in ("os.system", "os.popen") or is_true(call, "shell"):
        yield f"{name} starts a shell"
    if name in ("yaml.load", "yaml.unsafe_load", "yaml.full_load"):
        yield f"{name} builds objects"
    if is_true(call, "allow_pickle") or is_true(call, "trust_remote_code"):
        yield f"{name} trusts what it reads"
    if last == "from_pretrained" and name.startswith("Auto"):
        if not passes(call, "trust_remote_code"):
            yield f"{name} without trust_remote_code"
        if "ModelFor" in name and not is_true(call, "use_safetensors"):
            yield f"{name} without use_safetensors=True"


def problems(source: str, path: str) -> list[str]:
    """List what a file does that it must not, as `line: reason`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        found += [
            f"{node.lineno}: imports {module}"
            for module in modules
            if module.partition(".")[0] in PICKLING and path != UNPICKLER
        ]
        if isinstance(node, ast.Call):
            found += [f"{node.lineno}: {problem}" for problem in call_problems(node)]
            if dotted(node.func) in ("pickle.load", "pickle.loads"):
                found.append(f"{node.lineno}: unpickles")
    return found


def test_no_file_of_the_package_loads_more_than_data() -> None:
    files = {str(file.relative_to(ROOT)): file.read_text() for file in PACKAGE.rglob("*.py")}
    assert UNPICKLER in files
    found = {path: problems(text, path) for path, text in files.items()}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("torch.load(path, weights_only=flag)", "weights_only"),
        ("from joblib import load", "imports joblib"),
        ("eval(text)", "evaluates"),
        ("AutoModelForCausalLM.from_pretrained(p, trust_remote_code=True)", "trusts"),
        ("AutoModelForCausalLM.from_pretrained(p, **o)", "without use_safetensors"),
    ],
)
def test_the_check_sees_what_it_is_for(source: str, problem: str) -> None:
    assert any(problem in found for found in problems(source, "x.py"))
