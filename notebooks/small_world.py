"""RLHF on the built-in world in under a minute: what notebooks 03 to 05 train.

The stages are those of `python -m rlhf_lightning.train`, in this process and made small: an SFT
policy of 0.1 M weights, a reward (a rule in 03 and 05, a model that counts words
in 04), and PPO or GRPO.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from IPython.utils.capture import capture_output

from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.config.validate import load_settings
from rlhf_lightning.data.demo.gold import gold_parts
from rlhf_lightning.data.demo.source import DemoSource
from rlhf_lightning.runs.folder import RunFolder

SMALL = [
    "logger=none",
    "gates=none",
    "trainer.accelerator=cpu",
    "model.from_scratch.hidden_size=64",
    "model.from_scratch.num_hidden_layers=2",
    "model.from_scratch.intermediate_size=128",
    "+dataset.source.num_demonstrations=6000",
    "artifacts.publish=null",
]
RUNS = Path("outputs/notebook").resolve()
WEIGHTS = RUNS / "word_weights.json"


def fit_reward_model(num_pairs: int = 6000) -> float:
    """Fit a Bradley-Terry model on counts of words; return its accuracy on held-out pairs.

    It sees that polite and complete answers are preferred. It cannot see whether an answer is
    right, and every further polite word counts as much as the first: it can be exploited.
    """
    world = DemoSource(
        seed=1, num_preferences=num_pairs, num_validation_preferences=1000, contrast_fraction=0.0
    )
    pairs = {split: world.records("preferences", split) for split in ("train", "validation")}
    answers = [answer for pair in pairs["train"] for answer in (pair.chosen, pair.rejected)]
    words = sorted({word for answer in answers for word in answer.split()})
    column = {word: n for n, word in enumerate(words)}

    def counts(texts: Sequence[str]) -> torch.Tensor:
        matrix = torch.zeros(len(texts), len(words))
        for row, text in enumerate(texts):
            for word, count in Counter(text.split()).items():
                if word in column:
                    matrix[row, column[word]] = count
        return matrix

    differences = {
        split: counts([p.chosen for p in rows]) - counts([p.rejected for p in rows])
        for split, rows in pairs.items()
    }
    weights = torch.zeros(len(words), requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=60)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = -torch.nn.functional.logsigmoid(differences["train"] @ weights).mean()
        value = value + 1e-3 * weights.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    scores = counts(answers) @ weights.detach()
    model = {
        "mean": scores.mean().item(),
        "std": scores.std().item(),
        "weights": dict(zip(words, weights.tolist(), strict=True)),
    }
    RUNS.mkdir(parents=True, exist_ok=True)
    WEIGHTS.write_text(json.dumps(model))
    return (differences["validation"] @ weights > 0).float().mean().item()


def word_weights() -> dict[str, float]:
    """Return what each word adds to the learnt reward."""
    return json.loads(WEIGHTS.read_text())["weights"]


def score(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """Return the learnt reward of completions, in standard deviations over the pairs' answers."""
    model = json.loads(WEIGHTS.read_text())
    weights = model["weights"]
    totals = [sum(weights.get(word, 0.0) for word in text.split()) for text in completions]
    return [(total - model["mean"]) / model["std"] for total in totals]


def rule(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """Return a verifiable reward: right answers, politely given; it looks at nothing else."""
    parts = [gold_parts(p, c, finished=True) for p, c in zip(prompts, completions, strict=True)]
    return [2.0 * part.correct + 0.5 * part.polite - part.rude for part in parts]


def train_sft() -> RunFolder:
    """Train the SFT policy from random weights, unless it is there."""
    folder = RunFolder(RUNS / "sft")
    if not (folder.export / "config.json").exists():
        _run(
            folder,
            "+experiment=sft",
            "artifacts.base=null",
            "module.from_scratch=${model.from_scratch}",
            "module.tokenizer=${model.tokenizer}",
            "module.sft.learning_rate=4.0e-3",
            "data.batch_size=64",
            "data.num_epochs=2",
            "trainer.validations=1",
            "evaluation.gold=null",
            "evaluation.num_prompts=32",
        )
    return folder


def train_ppo(name: str, *overrides: str, reward: str = "score") -> RunFolder:
    """Run PPO of the SFT policy against a function of this file; every answer is kept."""
    models = ("module.value=null", "module.value_head=zero")
    return _train_on_policy("ppo", name, *models, *overrides, reward=reward)


def train_grpo(name: str, *overrides: str, reward: str = "score") -> RunFolder:
    """Run GRPO of the SFT policy, or a relative, against a function of this file."""
    return _train_on_policy("grpo", name, *overrides, reward=reward)


def _train_on_policy(stage: str, name: str, *overrides: str, reward: str) -> RunFolder:
    folder = RunFolder(RUNS / name)
    shutil.rmtree(folder.path, ignore_errors=True)  # of the last time
    _run(
        folder,
        f"+experiment={stage}",
        f"artifacts.sft={train_sft().export}",
        "artifacts.reward=null",
        "scorer=function",
        f"scorer.function={Path(__file__).resolve()}:{reward}",
        f"module.{stage}.learning_rate=1.0e-3",
        f"module.{stage}.score_clip=null",
        "data.batch_size=64",
        "callbacks.samples.every_n_iterations=1",
        "callbacks.samples.num_samples=64",
        "evaluation.num_prompts=128",
        *overrides,
    )
    return folder


def _run(folder: RunFolder, *overrides: str) -> None:
    """What `python -m rlhf_lightning.train` does with these arguments, without its screens."""
    from rlhf_lightning.app.train import run

    settings = load_settings(TrainSettings, "train", [*SMALL, *overrides])
    with warnings.catch_warnings(), capture_output():
        warnings.simplefilter("ignore")
        run(settings, folder, list(overrides))
