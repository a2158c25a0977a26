"""Direct preference optimization: from a policy to a better one, on preference pairs alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_lightning.app.stages.spec import StageSpec, TrainingComponents
from rlhf_lightning.hparams import DPOHparams

if TYPE_CHECKING:
    from rlhf_lightning.app.config.settings import TrainSettings
    from rlhf_lightning.evaluation.final_metrics import Findings
    from rlhf_lightning.runs.folder import RunFolder


def check(settings: TrainSettings) -> None:
    """Refuse what DPO would leave unused, and a scorer that cannot be built at the end.

    Raises:
        ConfigError: with the key, what it got and what it wants.
    """
    from rlhf_lightning.app.config.compose import ConfigError
    from rlhf_lightning.rollout.scorers.hparams import check_scorer

    if settings.artifacts.ppo is not None:
        raise ConfigError(
            f"artifacts.ppo={settings.artifacts.ppo}: DPO starts from artifacts.sft, which is its "
            "reference too; name the policy there"
        )
    kind, given = settings.hparams.kind, settings.data.get("kind") or "preferences"
    wanted = "unpaired" if kind == "kto" else "preferences"
    if given != wanted:
        raise ConfigError(f"data.kind={given}: module.dpo.kind={kind} wants data.kind={wanted}")
    if settings.scorer is None:
        return
    if settings.scorer.class_name == "RewardAdapterScorer":
        raise ConfigError(
            "scorer=reward_adapter stands on the base of PPO's policy: use scorer=reward_model"
        )
    try:
        check_scorer(settings.scorer.node())
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from error


def finish(settings: TrainSettings, folder: RunFolder, parts: TrainingComponents) -> Findings:
    """Validate, and compare the policy with its start, by gold and by a scorer if there are any."""
    from rlhf_lightning.app.evaluation import compare, placed, start_policy, validate

    del folder
    metrics = validate(parts)
    baseline = start_policy(settings, parts)
    if settings.scorer is not None:
        parts.scorer = settings.scorer.build()
        for model in parts.scorer.build():
            placed(parts, model)
    return compare(settings, parts, baseline, metrics)


def num_answered(settings: TrainSettings) -> int:
    """Return how many held-out prompts are answered."""
    return int(settings.evaluation.num_prompts)


def start_lines(settings: TrainSettings) -> dict[str, object]:
    """Return the objective."""
    dpo = settings.hparams
    smoothing = f", {100 * dpo.label_smoothing:g} % of labels wrong" if dpo.label_smoothing else ""
    return {"objective": f"{dpo.kind}, beta {dpo.beta:g}{smoothing}"}


STAGE = StageSpec(
    name="dpo",
    title="DPO",
    settings="dpo",
    hparams={"dpo": DPOHparams},
    rates={"learning_rate": "policy"},
    starts_from="sft",
    uses=("sft",),
    paired=True,
    objective="val/accuracy",
    finish=finish,
    num_answered=num_answered,
    check=check,
    start_lines=start_lines,
)
