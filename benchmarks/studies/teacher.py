"""Three ways to learn from a policy of twice the size, at equal numbers of responses.

    python -m benchmarks.studies.teacher --teacher FOLDER --artifacts FOLDER --out FOLDER

The SFT policies of the built-in world learn from the teacher on responses of their own
(`+experiment=distillation`), from responses that the teacher wrote (`+experiment=sft`), and from
the reward model without it (`+experiment=grpo`). Each then answers the held-out prompts of its
seed: gold reward, and KL to the teacher. Existing results in --out are kept.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.command import table
from rlhf_lightning import (
    DemoSource,
    DistillationHparams,
    DistillationModule,
    SamplingHparams,
    SFTModule,
    compare,
    gold_scores,
)

ROWS = 128  # responses of an iteration
ITERATIONS = (6, 12, 24)
SFT = ("module.sft.learning_rate=5.0e-4", "data.num_epochs=3")  # half the rate of SFT; not tuned
WAYS = ("distillation", "sft", "grpo")
MEASURES = ("gold_win_rate", "teacher_kl_per_token", "kl_per_token")


def main(arguments: list[str] | None = None) -> None:
    """Train what is missing, measure it, and print the table."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--teacher", type=Path, required=True, help="folder of a policy")
    made.add_argument(
        "--artifacts", type=Path, required=True, help="with demo_seedN/sft and reward"
    )
    made.add_argument("--out", type=Path, required=True, help="folder of runs and results")
    made.add_argument("--seeds", default="1-3")
    made.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    options = made.parse_args(arguments)
    first, _, last = options.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    rows: dict[tuple[str, int], list[dict[str, float]]] = {}
    for seed in seeds:
        for way in options.ways:
            for iterations in ITERATIONS:
                found = result(options, way, seed, iterations)
                rows.setdefault((way, iterations * ROWS), []).append(found)
    lines = [
        [way, f"{count:,}", *(_mean([one[f"val/{name}"] for one in found]) for name in MEASURES)]
        for (way, count), found in sorted(
            rows.items(), key=lambda row: (WAYS.index(row[0][0]), row[0][1])
        )
    ]
    head = ["trained by", "responses", "gold win rate", "KL to the teacher", "KL from the start"]
    sys.stdout.write(table(head, lines) + "\n")


def _mean(values: list[float]) -> str:
    """Return the mean over seeds with Student's 95 % interval."""
    mean = float(np.mean(values))
    if len(values) == 1:
        return f"{mean:.3f}"
    half = float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))
    return f"{mean:.3f} ({mean - half:.3f} to {mean + half:.3f})"


def result(options: argparse.Namespace, way: str, seed: int, iterations: int) -> dict[str, float]:
    """Return the metrics of one run, which is made if it is not there."""
    folder = options.out / f"{way}_{iterations * ROWS}_seed{seed}"
    file = folder / "comparison.json"
    if not file.exists():
        start = options.artifacts / f"demo_seed{seed}" / "sft"
        if not (folder / "export" / "config.json").exists():
            train(options, way, seed, iterations, folder, start)
        metrics = measured(folder / "export", start, options.teacher, seed)
        file.write_text(json.dumps(metrics, indent=1), encoding="utf-8")
    found: dict[str, float] = json.loads(file.read_text(encoding="utf-8"))
    return found


def train(
    options: argparse.Namespace, way: str, seed: int, iterations: int, folder: Path, start: Path
) -> None:
    """Train one policy by its command."""
    own = [f"data.num_iterations={iterations}"]
    if way == "distillation":
        own += [f"artifacts.teacher={options.teacher}"]
    if way == "sft":
        texts = options.out / f"teacher_seed{seed}.jsonl"
        if not texts.exists():
            write_texts(options.teacher, seed, texts)
        lines = texts.read_text(encoding="utf-8").splitlines()[: iterations * ROWS]
        data = options.out / f"teacher_{iterations * ROWS}_seed{seed}.jsonl"
        data.write_text("\n".join(lines) + "\n", encoding="utf-8")
        own = [f"artifacts.base={start}", "dataset=files", f"dataset.path={data}"]
        own += ["dataset.name=teacher", "evaluation.gold=null", "gates=none", *SFT]
    command = [
        *(sys.executable, "-m", "rlhf_lightning.train", f"+experiment={way}", f"seed={seed}"),
        *(f"paths.artifacts={options.artifacts}", f"paths.outputs={options.out}"),
        *(f"hydra.run.dir={folder}", "paths.publish=false", "logger=none", *own),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".log").open("w") as log:
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False)
    if not (folder / "export" / "config.json").exists():
        raise SystemExit(f"{' '.join(command)} exported nothing: see {folder.with_suffix('.log')}")


def write_texts(teacher: Path, seed: int, file: Path) -> None:
    """Write the teacher's responses to the prompts that the others train on."""
    records: Any = DemoSource(seed=seed).records("prompts", "train")
    prompts = [str(record.prompt) for record in records][: max(ITERATIONS) * ROWS]
    module: Any = SFTModule.from_pretrained(teacher)
    responses = module.generate(prompts, max_new_tokens=40, temperature=1.0, seed=seed)
    pairs = zip(prompts, responses, strict=True)
    lines = [json.dumps({"prompt": prompt, "completion": text}) for prompt, text in pairs]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def measured(policy: Path, start: Path, teacher: Path, seed: int) -> dict[str, float]:
    """Return the comparison with the student's start on the held-out prompts."""
    module: Any = DistillationModule.from_pretrained(
        policy,
        teacher=teacher,
        distillation=DistillationHparams(learning_rate=1e-4),
        sampling=SamplingHparams(max_new_tokens=40),
    )
    module.configure_model()
    source = DemoSource(seed=seed)
    found = compare(module, start, source, gold=gold_scores, num_prompts=512, seed=seed)
    return dict(found.metrics)


if __name__ == "__main__":
    main()
