"""The picture of three rounds against one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlhf_lightning.runs.folder import RunFolder, read_metrics


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
