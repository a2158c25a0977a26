"""Compare three rounds of RLHF with one round of as many PPO iterations.

    python -m benchmarks.studies.rounds --seeds 1-3 --out FOLDER [--iterations 48] [--picture FILE]
    python -m benchmarks.studies.rounds --report --out FOLDER

Of each seed's built-in world, a pipeline of three rounds with a third of the iterations each is
held against one PPO stage with all of them, which starts from the same SFT policy and the reward
model of the same first round. Both then answer every held-out prompt with the same sampling noise;
gold rewards are compared prompt by prompt. The first reward model learns from 4,000 pairs and not
24,000, and PPO pays little for KL: a single round then goes on for longer than its reward model is
good for. Existing results in FOLDER are kept, and a call that was killed continues.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from rlhf_lightning.runs.folder import RunFolder, read_metrics
from rlhf_lightning.runs.summary import read_summary

ROUNDS = 3
ANSWERS = 4  # of each policy to each held-out prompt
RESAMPLES = 10_000
REWARD = ("+dataset.source.num_preferences=4000",)
PPO = (
    "module.ppo.kl_coef=0.02",
    "evaluation.every_n_iterations=12",
    "evaluation.during_training=128",
)
# Three answers to each of 2,000 prompts, of the policy as PPO samples it.
COLLECT = (
    "candidates.decoding={temperature:[1.0],top_p:[1.0]}",
    "candidates.num_samples=3",
    "candidates.num_prompts=2000",
)


class Seed:
    """The two arms of a seed and their folders.

    Args:
        out: folder of the comparison.
        seed: of world, weights and noise.
        iterations: of PPO in each arm.
        artifacts: where base and SFT models are, or are put.
    """

    def __init__(self, out: Path, seed: int, iterations: int, artifacts: Path) -> None:
        if iterations % ROUNDS:
            raise ValueError(f"--iterations {iterations} must be a multiple of {ROUNDS}")
        self.seed, self.iterations = seed, iterations
        self.folder = out / f"seed_{seed}"
        self.paired = self.folder / "paired.json"
        self.artifacts = artifacts
        self.sft = artifacts / f"demo_seed{seed}" / "sft"

    @property
    def rounds(self) -> Path:
        """The run folder of the pipeline."""
        (found,) = (self.folder / "three").iterdir()
        return found

    @property
    def single(self) -> Path:
        """The run folder of the one long stage."""
        return self.folder / "one"

    def run(self) -> None:
        """Make what is missing, in processes of their own."""
        _call(
            "train",
            "+experiment=sft",  # trains the base model first
            f"seed={self.seed}",
            f"paths.artifacts={self.artifacts}",
            f"paths.outputs={self.folder / 'start'}",
            "logger=none",
            done=(self.sft / "config.json").is_file(),
        )
        _call(
            "pipeline",
            f"seed={self.seed}",
            f"rounds={ROUNDS}",
            f"paths.outputs={self.folder}",
            "name=three",
            "experiments.base=null",
            "experiments.sft=null",
            "evaluate=false",  # below, for both arms alike
            "accept=[reward,ppo]",  # gates are no part of the comparison
            *(f"{stage}:artifacts.sft={self.sft}" for stage in ("train", "collect")),
            "train:logger=none",
            f"ppo:data.num_iterations={self.iterations // ROUNDS}",
            *(f"ppo:{word}" for word in PPO),
            *(f"reward:{word}" for word in REWARD),
            *(f"collect:{word}" for word in COLLECT),
            done=self._finished(self.folder / "three" / "*"),
        )
        last = self.single / "checkpoints" / "last.ckpt"
        _call(
            "train",
            "+experiment=ppo",
            f"seed={self.seed}",
            f"artifacts.sft={self.sft}",
            f"artifacts.reward={self.rounds / 'round_1' / 'reward' / 'export'}",
            f"artifacts.publish={self.folder / 'one_policy'}",
            f"hydra.run.dir={self.single}",
            "logger=none",
            f"data.num_iterations={self.iterations}",
            *PPO,
            *([f"ckpt_path={last}"] if last.exists() else []),
            done=self._finished(self.single),
        )
        if not self.paired.exists():
            self.paired.write_text(json.dumps(self._answers(), indent=1) + "\n")

    def _finished(self, pattern: Path) -> bool:
        found = list(pattern.parent.glob(pattern.name))
        return any(
            (path / "summary.json").is_file()
            and read_summary(RunFolder(path)).status == "completed"
            for path in found
        )

    def _answers(self) -> dict[str, Any]:
        """Return the gold reward of every answer of both arms to the held-out prompts."""
        from rlhf_lightning.app.config.commands import EvaluateSettings
        from rlhf_lightning.app.config.compose import register
        from rlhf_lightning.app.config.validate import load_settings
        from rlhf_lightning.app.evaluate import build_comparison
        from rlhf_lightning.evaluation.generate import gold_scores
        from rlhf_lightning.preferences.candidates import load_candidate_policy

        register()
        overrides = [
            f"seed={self.seed}",
            f"policy={self.rounds / f'round_{ROUNDS}' / 'ppo' / 'export'}",
            f"baseline={self.single / 'export'}",
            "scorer=none",
            "safety=none",
            f"evaluation.answers_per_prompt={ANSWERS}",
            "evaluation.num_prompts=100000",
        ]
        settings = load_settings(EvaluateSettings, "evaluate", overrides)
        three, one, comparison, _ = build_comparison(settings)
        start = load_candidate_policy(
            str(self.sft),
            chat_template_arguments=None,
            revision=None,
            trust_remote_code=False,
            precision="32-true",
        ).model
        found: dict[str, Any] = {"iterations": self.iterations, "kl_per_token": {}, "gold": {}}
        # Both are asked as the policy is: with the same noise, which pairs their answers.
        for arm, side in (("three", three), ("one", one)):
            answers = comparison.ask_policy(side.model, start)
            gold = gold_scores(comparison.gold, answers)
            found["prompts"] = answers.prompts[::ANSWERS]
            found["gold"][arm] = [gold[i : i + ANSWERS] for i in range(0, len(gold), ANSWERS)]
            found["kl_per_token"][arm] = sum(answers.kl) / sum(answers.lengths)
        return found


def differences(paired: dict[str, Any]) -> np.ndarray:
    """Return the gold reward of three rounds less that of one, `[prompts]`, means over answers."""
    three, one = (np.asarray(paired["gold"][arm]).mean(-1) for arm in ("three", "one"))
    return np.asarray(three - one)


def pooled_interval(by_seed: Sequence[np.ndarray], *, seed: int = 0) -> tuple[float, float, float]:
    """Return the mean over seeds and its 95 % interval, from a bootstrap over each seed's prompts.

    It holds for new prompts to the policies of these seeds, not for new seeds.
    """
    rng = np.random.default_rng(seed)
    means = np.mean(
        [d[rng.integers(len(d), size=(RESAMPLES, len(d)))].mean(-1) for d in by_seed], axis=0
    )
    low, high = np.quantile(means, [0.025, 0.975])
    return float(np.mean([d.mean() for d in by_seed])), float(low), float(high)


def interval_over_seeds(by_seed: Sequence[np.ndarray]) -> tuple[float, float] | None:
    """Return Student's 95 % interval of the mean difference over seeds; None for one seed.

    It holds for new worlds and trainings, and is wide with three seeds.
    """
    means = [float(d.mean()) for d in by_seed]
    if len(means) < 2:
        return None
    reach = stats.t.ppf(0.975, len(means) - 1) * np.std(means, ddof=1) / np.sqrt(len(means))
    return float(np.mean(means) - reach), float(np.mean(means) + reach)


def report(out: Path) -> dict[str, Any]:
    """Return differences and intervals, by seed and pooled."""
    seeds, by_seed = [], []
    for path in sorted(out.glob("seed_*/paired.json")):
        paired = json.loads(path.read_text())
        found = differences(paired)
        by_seed.append(found)
        gold = {arm: float(np.mean(paired["gold"][arm])) for arm in ("three", "one")}
        summary = read_summary(RunFolder(next((path.parent / "three").iterdir())))
        metrics = {
            key: value
            for key, value in summary.metrics.items()
            if key.startswith("round_")
            and key.endswith(("ppo/gold", "ppo/score", "ppo/kl_per_token", "reward/accuracy"))
        }
        one = read_summary(RunFolder(path.parent / "one")).metrics
        seeds.append(
            {
                "seed": int(path.parent.name.removeprefix("seed_")),
                "prompts": len(found),
                "gold": gold,
                "difference": float(found.mean()),
                "interval": pooled_interval([found])[1:],
                "kl_per_token": paired["kl_per_token"],
                "rounds": metrics,
                "one": {k: one.get(f"val/{k}") for k in ("gold", "score", "kl_per_token")},
            }
        )
    if not by_seed:
        raise SystemExit(f"{out} holds no comparison yet")
    mean, low, high = pooled_interval(by_seed)
    over_seeds = interval_over_seeds(by_seed)
    return {
        "difference": mean,
        "low": low,
        "high": high,
        "interval_over_seeds": over_seeds,
        "seeds": seeds,
    }


def draw(out: Path, file: Path) -> None:
    """Draw gold reward and KL over PPO iterations, a line a seed and arm."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    colours = {"three": "#1769aa", "one": "#b3541e"}
    labels = {"three": "three rounds", "one": "one round"}
    for folder in sorted(out.glob("seed_*")):
        rounds = next((folder / "three").iterdir())
        arms = {
            "one": [folder / "one"],
            "three": [stage / "ppo" for stage in sorted(rounds.glob("round_*"))],
        }
        for arm, stages in arms.items():
            rows = _rows(stages)
            for axis, key in zip(axes, ("val/gold", "val/kl_per_token"), strict=True):
                points = [(i, row[key]) for i, row in rows if key in row]
                label = labels.pop(arm, None) if axis is axes[0] else None
                axis.plot(*zip(*points, strict=True), color=colours[arm], lw=1.4, label=label)
    axes[0].set(xlabel="PPO iterations in all", title="gold reward, 128 held-out prompts")
    axes[1].set(xlabel="PPO iterations in all", title="KL from the SFT policy, nats a token")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(file, dpi=150)


def _rows(stages: Sequence[Path]) -> list[tuple[int, dict[str, float]]]:
    """Return (iteration over all stages, row of metrics)."""
    found, before = [], 0
    for stage in stages:
        rows = read_metrics(RunFolder(stage).metrics)
        found += [(before + int(row["iteration"]), dict(row)) for row in rows]
        before += len(rows)
    return found


def _call(module: str, *overrides: str, done: bool) -> None:
    if not done:
        subprocess.run([sys.executable, "-m", f"rlhf_lightning.{module}", *overrides], check=True)


def _numbers(text: str) -> list[int]:
    first, _, last = text.partition("-")
    return list(range(int(first), int(last or first) + 1))


def main() -> None:
    """Run what is missing and print the outcome."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=_numbers, default=[1, 2, 3])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--iterations", type=int, default=48, help="of PPO in each arm")
    parser.add_argument("--artifacts", type=Path, help="base and SFT models; else OUT/artifacts")
    parser.add_argument("--report", action="store_true", help="of what is there; run nothing")
    parser.add_argument("--picture", type=Path, help="draw gold and KL over the iterations")
    args = parser.parse_args()
    out = args.out.resolve()
    if not args.report:
        for seed in args.seeds:
            artifacts = (args.artifacts or out / "artifacts").resolve()
            Seed(out, seed, args.iterations, artifacts).run()
    found = report(out)
    (out / "result.json").write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    if args.picture is not None:
        draw(out, args.picture)


if __name__ == "__main__":
    main()
