"""Peaks of memory beside `rlhf-plan`: SFT, reward model and PPO, full and LoRA.

python -m benchmarks.memory

Every run is the real command line: on a CPU watched from outside, with --device cuda measured by
torch's own count of what its tensors take. Its model has one of --shape with random weights, or is
the folder --model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.command import Setting, finish, gib, parser, table
from benchmarks.configured import PRECISIONS
from benchmarks.machine import ROOT
from benchmarks.processes import Side, environment, held, run
from benchmarks.resident import watch

STAGES, KINDS = ("sft", "reward", "ppo"), ("full", "lora")
# What a run has imported by the time it loads its model.
IMPORTS = "lightning, transformers.models.llama.modeling_llama, rlhf_lightning.app.train"
# Words of an answer, each one token: with its prompt cut to fit, every row is as long as it may be.
ANSWERS = {"sft": 26, "reward": 42, "ppo": 0}
# Two iterations, a validation or an evaluation, a checkpoint and an export: every phase once.
COMMON = (
    "model=pretrained",
    "dataset=files",
    "dataset.name=memory",
    "data.over_long=truncate_left",
    "data.num_iterations=2",
    "artifacts.publish=null",
    "evaluation.gold=null",
    "evaluation.num_prompts=64",
    "evaluation.batch_size=64",
    "evaluation.max_new_tokens=24",
    "callbacks.checkpoint.every_n_iterations=2",
    "callbacks.checkpoint.keep_last=1",
    "logger=none",
    "gates=none",
)
PAIRED = ("data.num_epochs=null", "data.max_validation_rows=64", "trainer.validations=1")
PAIRED += ("dataset.source.validation_fraction=0.25",)
STEPS = {
    "sft": (*PAIRED, "data.max_length=32", "data.batch_size=32", "module.sft.micro_batch_size=16"),
    "reward": (
        *PAIRED,
        "data.max_length=48",
        "data.batch_size=16",
        "module.reward.micro_batch_size=16",
        "module.reward.normalization_samples=64",
    ),
    "ppo": (
        "data.max_prompt_length=10",
        "data.batch_size=32",
        "module.ppo.micro_batch_size=8",
        "module.ppo.num_ppo_epochs=1",
        "module.ppo.num_minibatches=2",
        "module.sampling.max_new_tokens=24",
    ),
}


def overrides(name: str, precision: str, folder: Path, model: Path) -> list[str]:
    """Return the arguments of `rlhf_lightning.train`, and of `rlhf_lightning.plan`.

    Args:
        name: stage and kind, `sft full`.
        precision: fp32 or bf16.
        folder: of the records and the reward model, see `workers.memory_start`.
        model: that the stage starts from.
    """
    stage, kind = name.split()
    return [
        f"+experiment={stage}",
        *COMMON,
        *STEPS[stage],
        *(["lora=lora"] if kind == "lora" else []),
        f"dataset.path={folder}/{stage}.jsonl",
        f"artifacts.{'base' if stage == 'sft' else 'sft'}={model}",
        *([f"artifacts.reward={folder}/reward"] if stage == "ppo" else []),
        f"trainer.precision={PRECISIONS[precision]}",
        f"paths.outputs={folder}/outputs",
    ]


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure, write the JSON, print the table."""
    made = parser(__doc__.splitlines()[0], repeats=1)
    made.add_argument("--model", type=Path, help="folder of a model; default one of --shape")
    made.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    made.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    made.add_argument("--precision", choices=list(PRECISIONS), default="fp32")
    setting = Setting("memory", made.parse_args(arguments))
    options = setting.options
    accelerator = f"trainer.accelerator={'gpu' if setting.device == 'cuda' else 'cpu'}"
    names = [f"{stage} {kind}" for stage in options.stages for kind in options.kinds]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = _prepare(setting, folder)
        runs = {}
        for name in names:
            words = [*overrides(name, options.precision, folder, model), accelerator]
            runs[name] = [_measure(setting, words) for _ in range(options.repeats)]
        imports = _imports(setting) if setting.device == "cpu" else 0
    rows = {name: _compared(taken, imports) for name, taken in runs.items()}
    return finish(setting, runs, {"imports": imports, "rows": rows}, _render)


def _prepare(setting: Setting, folder: Path) -> Path:
    """Write what the stages start from into `folder`; return the folder of the policy."""
    given: Path | None = setting.options.model
    model = None if given is None else str(given.expanduser().resolve())
    task = setting.task(folder=str(folder), model=model, shape=setting.shape, answers=ANSWERS)
    run(Side("start", "memory_start", task), lock=setting.lock)
    return folder / "policy" if model is None else Path(model)


def _measure(setting: Setting, words: Sequence[str]) -> dict[str, Any]:
    """Train as `words` say and return what was held, beside what the plan says."""
    variables = environment(setting.options.threads)
    with tempfile.TemporaryDirectory() as place:
        if setting.device == "cuda":
            found = _allocated(words, variables, Path(place, "result.json"))
        else:
            train = [sys.executable, "-m", "rlhf_lightning.train", *words]
            with held(setting.lock):
                found = asdict(watch(train, environment=variables, folder=Path(place)))
    command = [sys.executable, "-m", "rlhf_lightning.plan", *words, "plan.format=json"]
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, check=True
    )
    return {"measured": found, "planned": json.loads(done.stdout)}


def _allocated(words: Sequence[str], variables: dict[str, str], result: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.workers.allocated", str(result), *words]
    found_in = os.pathsep.join(filter(None, (str(ROOT), variables.get("PYTHONPATH"))))
    own = variables | {"PYTHONPATH": found_in}
    subprocess.run(command, cwd=result.parent, env=own, check=True)
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return found


def _imports(setting: Setting) -> int:
    """Return what a process holds that imports what a run imports, and ends."""
    command = [sys.executable, "-c", f"import {IMPORTS}"]
    variables = environment(setting.options.threads)
    with tempfile.TemporaryDirectory() as place:
        return watch(command, environment=variables, folder=Path(place)).peak


def _compared(taken: list[dict[str, Any]], imports: int) -> dict[str, Any]:
    """Return a run's peak above the imports, and its plan without the runtime."""
    plan, peak = taken[0]["planned"], max(one["measured"]["peak"] for one in taken)
    above = {"measured": peak - imports, "planned": plan["total"] - plan["runtime"]}
    error = above["planned"] / above["measured"] - 1
    return above | {"peak": peak, "phase": plan["peak_phase"], "error": error}


def _render(result: dict[str, Any]) -> str:
    summary = result["summary"]
    head = ("run", "peak", "above the imports", "planned", "plan off by", "in")
    lines = [
        (
            name,
            gib(row["peak"]),
            gib(row["measured"]),
            gib(row["planned"]),
            f"{row['error']:+.0%}",
            row["phase"],
        )
        for name, row in summary["rows"].items()
    ]
    return f"Imports: {gib(summary['imports'])}\n\n{table(head, lines)}"


if __name__ == "__main__":
    os.chdir(ROOT)
    main()
