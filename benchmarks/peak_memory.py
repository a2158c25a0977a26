"""Peaks of memory against the plan: SFT, reward model and PPO, full and LoRA, fp32 and bf16.

python -m benchmarks.peak_memory --model FOLDER

Every run is the real command line: on a CPU watched from outside, with --device cuda measured by
torch's own count of what its tensors take. FOLDER is a model such as SmolLM2-135M-Instruct; without
--model one of --shape with random weights takes its place.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.command import Setting, finish, gib, parser, table
from benchmarks.configured import PRECISIONS
from benchmarks.machine import ROOT
from benchmarks.processes import Side, environment, held, run
from benchmarks.resident import watch

STAGES, KINDS = ("sft", "reward", "ppo"), ("full", "lora")
# What a run has imported by the time it loads its model.
IMPORTS = (
    "lightning, transformers.models.llama.modeling_llama, rlhf_lightning.train, "
    "rlhf_lightning.app.build, rlhf_lightning.app.finalize, rlhf_lightning.modules.ppo, "
    "rlhf_lightning.data.datamodules, rlhf_lightning.rollout.generators.base, "
    "rlhf_lightning.rollout.scorers.adapter, rlhf_lightning.callbacks.console, "
    "rlhf_lightning.callbacks.wandb_logger, rlhf_lightning.reports.page"
)
# Words of an answer, each one token: with its prompt cut to fit, every row is as long as it may be.
ANSWERS = {"sft": 26, "reward": 42, "ppo": 0}
# Two iterations, a validation or an evaluation, a checkpoint and an export: every phase once. The
# batches are smaller than those of the experiments, so that all of it takes a quarter of an hour.
STEPS = {
    "sft": (
        "data.num_epochs=null",
        "dataset.source.validation_fraction=0.25",  # a batch of 64, as the plan counts it
        "data.max_validation_rows=64",
        "trainer.validations=1",
    ),
    "reward": (
        "data.num_epochs=null",
        "dataset.source.validation_fraction=0.25",
        "data.batch_size=16",
        "trainer.validations=1",
        "module.reward.normalization_samples=64",
    ),
    "ppo": (
        "data.batch_size=32",
        "module.ppo.micro_batch_size=8",
        "module.ppo.num_ppo_epochs=1",
        "evaluation.num_prompts=64",
    ),
}


@dataclass(frozen=True)
class Combination:
    """One run: a stage, what it trains and in which precision."""

    stage: str
    kind: str
    precision: str

    @property
    def name(self) -> str:
        """In the results."""
        return f"{self.stage} {self.kind} {self.precision}"

    def overrides(
        self, folder: Path, model: Path, *extra: str, accelerator: str = "cpu"
    ) -> list[str]:
        """Return the arguments of `rlhf_lightning.train`, and of `rlhf_lightning.plan`.

        Args:
            folder: of the records and the reward model, see `workers.memory_start`.
            model: that the stage starts from.
            extra: further ones.
            accelerator: the Trainer's.
        """
        lora = "_lora" if self.kind == "lora" else ""
        return [
            f"--config-dir={ROOT}/examples/conf",
            f"+experiment={self.stage}_smollm2_sentiment{lora}",
            "dataset=files",
            "dataset.name=memory",
            f"dataset.path={folder}/{self.stage}.jsonl",
            "data.over_long=truncate_left",
            "data.num_iterations=2",
            *STEPS[self.stage],
            f"artifacts.{'base' if self.stage == 'sft' else 'sft'}={model}",
            *([f"artifacts.reward={folder}/reward"] if self.stage == "ppo" else []),
            "artifacts.publish=null",
            "evaluation.gold=null",
            "callbacks.checkpoint.every_n_iterations=2",
            "callbacks.checkpoint.keep_last=1",
            f"trainer.precision={PRECISIONS[self.precision]}",
            f"trainer.accelerator={accelerator}",
            "logger=none",
            "gates=none",
            f"paths.outputs={folder}/outputs",
            *extra,
        ]


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure, write the JSON, print the table."""
    made = parser(__doc__.splitlines()[0], repeats=1)
    made.add_argument("--model", type=Path, help="folder of a model; default one of --shape")
    made.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    made.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    made.add_argument("--precisions", nargs="+", choices=list(PRECISIONS), default=["fp32", "bf16"])
    setting = Setting("peak_memory", made.parse_args(arguments))
    options = setting.options
    accelerator = "gpu" if setting.device == "cuda" else "cpu"
    combinations = [
        Combination(stage, kind, precision)
        for precision in options.precisions
        for stage in options.stages
        for kind in options.kinds
    ]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = prepare(setting, folder)
        runs = {
            combination.name: [
                measure(setting, combination.overrides(folder, model, accelerator=accelerator))
                for _ in range(options.repeats)
            ]
            for combination in combinations
        }
        imports = measured_imports(setting) if setting.device == "cpu" else 0
    return finish(setting, runs, summarise(runs, imports), render)


def prepare(setting: Setting, folder: Path) -> Path:
    """Write what the stages start from into `folder`; return the folder of the policy."""
    given: Path | None = setting.options.model
    model = None if given is None else str(given.expanduser().resolve())
    task = setting.task(folder=str(folder), model=model, shape=setting.shape, answers=ANSWERS)
    run(Side("start", "memory_start", task), lock=setting.lock)
    return folder / "policy" if model is None else Path(model)


def measure(setting: Setting, overrides: Sequence[str]) -> dict[str, Any]:
    """Train as `overrides` say and return what was held, beside what the plan says."""
    variables = environment(setting.options.threads)
    if setting.device == "cuda":
        return {
            "measured": allocated(overrides, variables),
            "planned": planned(overrides, variables),
        }
    train = [sys.executable, "-m", "rlhf_lightning.train", *overrides]
    with tempfile.TemporaryDirectory() as place, held(setting.lock):
        found = asdict(watch(train, environment=variables, folder=Path(place)))
    return {"measured": found, "planned": planned(overrides, variables)}


def allocated(overrides: Sequence[str], variables: dict[str, str]) -> dict[str, Any]:
    """Return the peak of what the tensors of a run take on the GPU.

    Raises:
        subprocess.CalledProcessError: if the run fails.
    """
    with tempfile.TemporaryDirectory() as place:
        result = Path(place, "result.json")
        command = [sys.executable, "-m", "benchmarks.workers.allocated", str(result), *overrides]
        found_in = os.pathsep.join(filter(None, (str(ROOT), variables.get("PYTHONPATH"))))
        subprocess.run(command, cwd=place, env=variables | {"PYTHONPATH": found_in}, check=True)
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return found


def planned(overrides: Sequence[str], variables: dict[str, str]) -> dict[str, Any]:
    """Return the plan of a run, as `rlhf_lightning.plan` prints it for programs."""
    command = [sys.executable, "-m", "rlhf_lightning.plan", *overrides, "plan.format=json"]
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, check=True
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def measured_imports(setting: Setting) -> int:
    """Return what a process holds that imports what a run imports, and ends."""
    command = [sys.executable, "-c", f"import {IMPORTS}"]
    variables = environment(setting.options.threads)
    with tempfile.TemporaryDirectory() as place:
        return watch(command, environment=variables, folder=Path(place)).peak


def summarise(runs: dict[str, list[dict[str, Any]]], imports: int) -> dict[str, Any]:
    """Return peaks above the imports, measured and planned, by combination."""
    rows = {}
    for name, taken in runs.items():
        peak = max(one["measured"]["peak"] for one in taken)
        plan = taken[0]["planned"]
        above = {"measured": peak - imports, "planned": plan["total"] - plan["runtime"]}
        rows[name] = above | {"peak": peak, "phase": plan["peak_phase"]}
        rows[name]["error"] = above["planned"] / above["measured"] - 1
    return {"imports": imports, "rows": rows}


def render(result: dict[str, Any]) -> str:
    """Return the table of peaks against plans."""
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
