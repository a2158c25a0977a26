"""PPO: a policy whose responses are scored, and which is kept close to where it started."""

from __future__ import annotations

from typing import ClassVar, cast

import lightning as L

from rlhf_lightning.app.build import function_digests, scorer_fingerprints
from rlhf_lightning.app.config.compose import ConfigError, choices
from rlhf_lightning.app.config.groups import Target
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.config.targets import nodes
from rlhf_lightning.app.config.validate import built
from rlhf_lightning.app.evaluation import compare, comparison_arguments
from rlhf_lightning.app.stages.spec import POLICY, SCALAR, Stage, TrainingComponents
from rlhf_lightning.callbacks.exact_resume import SameSources
from rlhf_lightning.callbacks.periodic_evaluation import PeriodicEvaluation
from rlhf_lightning.evaluation.final_metrics import Findings
from rlhf_lightning.evaluation.generate import Sampling
from rlhf_lightning.evaluation.held_out import held_out_comparison
from rlhf_lightning.modules.base import RLHFModule
from rlhf_lightning.modules.on_policy import OnPolicyModule
from rlhf_lightning.modules.ppo import PPOModule
from rlhf_lightning.rollout.scorers.base import Scorer
from rlhf_lightning.rollout.scorers.hparams import is_address
from rlhf_lightning.runs.folder import RunFolder


class PPOStage(Stage):
    """Policy gradients on responses of the policy, with a value model and a reference."""

    module: type[RLHFModule] = PPOModule
    rates: ClassVar = {"learning_rate": "policy", "value_learning_rate": "value"}
    starts_from = "sft"
    uses = ("sft", "reward", "ppo", "teacher")
    measures_with = ("gold", "micro_batch_size", "every_n_iterations")
    trains: ClassVar[tuple[str, ...]] = (POLICY, SCALAR)
    rolls_out = True
    scores = True
    context = (
        ("data.max_prompt_length", "module.sampling.max_new_tokens"),
        ("data.max_prompt_length", "evaluation.max_new_tokens"),
    )
    shortened_by = "module.sampling.max_new_tokens"
    objective = "val/score_win_rate"

    def check(self, settings: TrainSettings) -> None:
        """Check KL controller, penalty on length, scorer, and adapters' dropout.

        Raises:
            ConfigError: with the key, what it got and what it wants.
        """
        hparams, place = settings.hparams, f"module.{self.settings}"
        rows = settings.data.num_rows
        if hparams.kl_target is not None and hparams.kl_horizon * 5 <= rows:
            raise ConfigError(
                f"{place}.kl_horizon={hparams.kl_horizon} is too small for {rows} responses an "
                f"iteration: the KL coefficient would change its sign; use more than {rows // 5}"
            )
        warmup = getattr(hparams, "critic_warmup_iterations", 0)
        iterations = settings.data.get("num_iterations")
        if isinstance(iterations, int) and 0 < iterations <= warmup:
            raise ConfigError(
                f"{place}.critic_warmup_iterations={warmup} leaves none of "
                f"data.num_iterations={iterations} to train the policy: use fewer"
            )
        buffer, longest = hparams.overlong_buffer, settings.all_hparams["sampling"].max_new_tokens
        if buffer is not None and buffer > longest:
            raise ConfigError(
                f"{place}.overlong_buffer={buffer} must be at most "
                f"module.sampling.max_new_tokens={longest}: use about a fifth of it"
            )
        temperature, teacher = settings.evaluation.temperature, settings.module.get("teacher")
        if is_address(teacher):
            server = f"the server at artifacts.teacher={teacher} gives log-probabilities of given"
            drawn = settings.all_hparams["sampling"].temperature
            if getattr(hparams, "learns_distributions", False):
                raise ConfigError(
                    f"{place}.divergence={hparams.divergence}: {server} tokens alone: use sampled"
                )
            for key, value in (("module.sampling", drawn), ("evaluation", temperature)):
                if value not in (None, 1.0) and (value, key) != (0.0, "evaluation"):
                    raise ConfigError(
                        f"{key}.temperature={value:g}: {server} tokens at temperature 1: use 1"
                    )
        if settings.scorer is None:
            names = ", ".join(choices("scorer"))
            raise ConfigError(f"{self.title} needs a scorer: scorer=NAME, one of {names}")
        if settings.lora is not None and (rate := settings.lora.dropout):
            raise ConfigError(
                f"lora.dropout={rate}: {self.title} needs 0, or the ratio does not start at 1"
            )

    def check_buildable(self, settings: TrainSettings) -> None:
        """Build the scorers once that need no model.

        Raises:
            ConfigError: with the place, what it got and what it wants.
        """
        for node in nodes(_scorer(settings).read("scorer")):
            if all(getattr(one.call, "loads_no_model", False) for one in nodes(node)):
                with built(node.where, node):
                    node.make()

    def callbacks(
        self, settings: TrainSettings, sampling: Sampling, scorer: Scorer | None
    ) -> list[L.Callback]:
        """Return the evaluation every few iterations, and the check that scorers stay the same."""
        scorer_node = _scorer(settings).node()
        own: list[L.Callback] = [
            SameSources(scorer_fingerprints(scorer_node), function_digests(scorer_node))
        ]
        if (every := settings.evaluation.every_n_iterations) is not None:
            comparison = held_out_comparison(
                settings.data.source.build(),
                sampling,
                scorer=scorer,
                **comparison_arguments(settings, num_prompts=settings.evaluation.during_training),
            )
            if comparison is not None:
                own.append(PeriodicEvaluation(comparison, every_n_iterations=every))
        return own

    def finish(
        self, settings: TrainSettings, folder: RunFolder, parts: TrainingComponents
    ) -> Findings:
        """Compare the policy with its reference."""
        if settings.artifacts.sft is None:
            return Findings({})  # nothing to compare with
        return compare(settings, parts, cast(OnPolicyModule, parts.module).reference)

    def start_lines(self, settings: TrainSettings) -> dict[str, object]:
        """Return what scores the responses, and how they are sampled."""
        hparams, sampling = settings.hparams, settings.all_hparams["sampling"]
        target = (
            "" if hparams.kl_target is None else f", aims at {hparams.kl_target:g} nats a response"
        )
        where = "" if hparams.kl_in == "reward" else f" in the loss ({hparams.kl_estimator})"
        scorer = _scorer(settings)
        source = scorer.get("source") or scorer.get("function") or scorer.get("url") or ""
        return {
            "reward": f"{scorer.class_name} {source}".strip(),
            "rollouts": f"up to {sampling.max_new_tokens} tokens at temperature "
            f"{sampling.temperature:g}; kl_coef {hparams.kl_coef:g}{where}{target}",
        }


def _scorer(settings: TrainSettings) -> Target:
    assert settings.scorer is not None  # `check` has refused it
    return settings.scorer


STAGE = PPOStage()
