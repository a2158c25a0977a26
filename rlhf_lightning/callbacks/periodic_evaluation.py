"""The metrics of the final comparison, every few iterations of PPO."""

from __future__ import annotations

import time
from typing import Any, Unpack, cast

from lightning.pytorch import Callback, LightningModule, Trainer

from rlhf_lightning.arguments import Count, checked
from rlhf_lightning.callbacks.iterations import current_iteration
from rlhf_lightning.callbacks.wandb_logger import log_samples, wandb_loggers
from rlhf_lightning.data.record_datamodule import RecordDataModule
from rlhf_lightning.evaluation.compare import ComparisonOptions, comparison_of
from rlhf_lightning.evaluation.generate import PolicyAnswers
from rlhf_lightning.evaluation.held_out import HeldOutComparison
from rlhf_lightning.modules.metrics import LoggedNames
from rlhf_lightning.modules.on_policy import OnPolicyModule

NUM_SAMPLES = 8  # of the table in W&B


class PeriodicEvaluation(Callback):
    """Compare the policy with its reference on held-out prompts, and log that as `val/*`.

    In W&B a table shows the responses to the first prompts, which are the same each time.

    The reference is sampled once. Noise is keyed by row, so an evaluation changes no rollout.

    Args:
        every_n_iterations: iterations between two evaluations.
        num_prompts: largest number of prompts, of those that the Trainer's DataModule holds out.
        gold, safety, answers_per_prompt, max_new_tokens, temperature: see `compare`.
        batch_size, micro_batch_size, skip_special_tokens: see `compare`.
    """

    @checked
    def __init__(
        self,
        *,
        every_n_iterations: Count,
        num_prompts: Count = 128,
        **options: Unpack[ComparisonOptions],
    ) -> None:
        self.every_n_iterations = every_n_iterations
        self.comparison: HeldOutComparison | None = None
        self._asked: dict[str, Any] = {"num_prompts": num_prompts, **options}
        self._baseline: PolicyAnswers | None = None
        self._logged = LoggedNames()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Choose the prompts.

        Raises:
            TypeError: for a module that samples nothing, or data without held-out prompts.
            ValueError: if none is held out.
        """
        self._baseline, self._logged = None, LoggedNames()
        if not isinstance(pl_module, OnPolicyModule):
            raise TypeError(f"PeriodicEvaluation goes with PPO and GRPO, not {type(pl_module)}")
        data: Any = getattr(trainer, "datamodule", None)
        if not isinstance(data, RecordDataModule):
            raise TypeError("PeriodicEvaluation needs fit(module, datamodule=PromptDataModule)")
        asked = self._asked | {"seed": pl_module.hparams.get("seed", 1)}
        self.comparison = comparison_of(pl_module, data, scorer=pl_module.scorer, **asked)
        if self.comparison is None:
            raise ValueError("PeriodicEvaluation: no prompt of the data is held out")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Measure if it is time; between two measurements say that nothing was measured."""
        if current_iteration(trainer) % self.every_n_iterations:
            pl_module.log_dict(self._logged.with_nans({}), on_step=True)
            return
        started = time.perf_counter()
        module = cast(OnPolicyModule, pl_module)
        assert self.comparison is not None  # since the start
        with trainer.strategy.precision_plugin.forward_context():
            if self._baseline is None:
                self._baseline = self.comparison.ask_baseline(module.reference, module.teacher)
            mine = self.comparison.ask_policy(module.policy, module.reference, module.teacher)
        found = self.comparison.findings(mine, self._baseline, NUM_SAMPLES)
        measures = found.metrics | {"time/evaluate": time.perf_counter() - started}
        pl_module.log_dict(self._logged.with_nans(measures), on_step=True)
        for logger in wandb_loggers(trainer):
            log_samples(logger, current_iteration(trainer), "held_out", found.samples)
