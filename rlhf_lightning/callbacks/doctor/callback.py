"""The callback: measures each iteration, raises alerts, intervenes, and may end the fit.

Every decision is taken on values of all ranks, so it is the same everywhere. All changes go through
`module.controls` and act on the next rollout.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim.lr_scheduler import LambdaLR

from rlhf_lightning.arguments import Count, checked
from rlhf_lightning.callbacks import iterations
from rlhf_lightning.callbacks.doctor import rollouts
from rlhf_lightning.callbacks.doctor.alert_log import AlertLog
from rlhf_lightning.callbacks.iterations import current_iteration, fresh_metrics
from rlhf_lightning.doctor.catalog import DETECTORS
from rlhf_lightning.doctor.detectors import Detectors
from rlhf_lightning.doctor.interventions import ActionSettings, Intervention, Knobs
from rlhf_lightning.doctor.metrics import response_metrics
from rlhf_lightning.doctor.policy import InterventionPolicy, serious_alarms
from rlhf_lightning.doctor.preflight_checks import check_first_rollout
from rlhf_lightning.doctor.thresholds import DoctorThresholds
from rlhf_lightning.modules.metrics import LoggedNames
from rlhf_lightning.modules.on_policy import OnPolicyModule
from rlhf_lightning.rollout.scorers.base import Scorer, WeightedScorer
from rlhf_lightning.rollout.teachers import ServerTeacher
from rlhf_lightning.runs.atomic import write_text
from rlhf_lightning.runs.doctor_log import DoctorEvent
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.reading import parse
from rlhf_lightning.runs.stopping import RunStoppedError

_WEIGHT = "domain_weights."
HANDOVER = "rollback.json"


def knobs_of(module: OnPolicyModule) -> Knobs:
    """Return the controls of a module as they stand."""
    return Knobs(
        **asdict(module.controls),
        adapts_kl_coef=module.algorithm.kl_target is not None,
        keeps_temperature=isinstance(module.teacher, ServerTeacher),
    )


def apply(module: OnPolicyModule, intervention: Intervention) -> None:
    """Make one change in the controls of a module that is being trained."""
    controls, name, after = module.controls, intervention.control, intervention.after
    if name.startswith(_WEIGHT):
        controls.domain_weights = controls.domain_weights | {name.removeprefix(_WEIGHT): after}
        return
    setattr(controls, name, after)
    if name == "learning_rate_factor":  # the schedule has stepped already
        scheduler = cast(LambdaLR, module.lr_schedulers())
        groups, factors = scheduler.optimizer.param_groups, scheduler.lr_lambdas
        for group, base, factor in zip(groups, scheduler.base_lrs, factors, strict=True):
            group["lr"] = base * factor(scheduler.last_epoch)


def scored_by_model(scorer: Any) -> bool:
    """Return whether a model gives the reward, or a part of a weighted sum."""
    parts = scorer.scorers.values() if isinstance(scorer, WeightedScorer) else ()
    return hasattr(scorer, "holds") or any(map(scored_by_model, parts))


def _advice(module: Any, detector: str) -> tuple[str, str]:
    return DETECTORS[detector].advice(scored_by_model=scored_by_model(module.scorer))


@dataclass(frozen=True)
class Handover:
    """The state that the next fit takes over.

    Args:
        checkpoint: iteration of the checkpoint that it starts from.
        rollbacks: number of rollbacks so far.
        held: values that the rollback before this one set, by control.
        events: all events so far.
    """

    checkpoint: int
    rollbacks: int
    held: Mapping[str, float]
    events: tuple[DoctorEvent, ...]


def write_handover(folder: RunFolder, handover: Handover) -> None:
    """Write it in one step, in the place of that of an earlier rollback."""
    write_text(folder.checkpoints / HANDOVER, json.dumps(asdict(handover)))


logger = logging.getLogger(__name__)

# An alert makes a checkpoint worse than any without one, whatever the score, and so costs more than
# any two scores seen differ by; an alarm that may end the fit makes it worse than all others.
_ALERT_COSTS, _ALERT_COSTS_SCORES, _SERIOUS_COSTS_ALERTS = 100.0, 3.0, 10.0


class Doctor(Callback):
    """Watches PPO, GRPO and their relatives; see docs/doctor.md. Other stages have no rollouts.

    Args:
        folder: the run folder, for `doctor.jsonl`.
        thresholds: bounds and hysteresis of the detectors.
        actions: settings of the interventions; None watches only.
        second_scorer: scores every response too, and never trains: a judge or another reward model.
        second_every_n_iterations: iterations between two uses of the second scorer.
        refusals: patterns of refusals, and their domains.
        preflight: check one rollout before iteration 1, and refuse to start a broken run.
        watches: watch every iteration; False runs only the preflight.
    """

    @checked
    def __init__(
        self,
        folder: RunFolder,
        thresholds: DoctorThresholds | None = None,
        *,
        actions: ActionSettings | None = None,
        second_scorer: Scorer | None = None,
        second_every_n_iterations: Count = 1,
        refusals: rollouts.Refusals | None = None,
        preflight: bool = False,
        watches: bool = True,
    ) -> None:
        self.thresholds = thresholds or DoctorThresholds()
        self.actions = actions
        self.second_scorer = second_scorer
        self.second_every_n_iterations = second_every_n_iterations
        self.refusals = refusals or rollouts.Refusals()
        self.preflight = preflight
        self.watches = watches
        self.folder = folder
        self.alert_log = AlertLog(folder)
        self.detectors = Detectors(self.thresholds, 0)
        self.policy = InterventionPolicy(actions or ActionSettings())
        self.request: DoctorEvent | None = None  # how it ends the fit
        self.logged_names = LoggedNames()
        self.largest_score = 0.0  # the largest |mean score| of an iteration so far

    # -- hooks ------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Build the second scorer, whole on every rank."""
        if self.second_scorer is not None:
            for model in self.second_scorer.build():
                model.to(pl_module.device)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the log, and after a rollback make the changes that it was made for."""
        if not hasattr(pl_module, "controls"):
            return
        self.detectors.history.num_iterations = iterations.last_iteration(trainer)
        start = current_iteration(trainer)
        handover = self._taken_over(trainer, start)
        if handover is not None:
            self.policy.rollbacks, self.policy.held = handover.rollbacks, dict(handover.held)
            self.policy.alarmed_since, self.request = {}, None
            self.alert_log.events = list(handover.events)
        elif self.request is not None:  # a kill came before the rollback
            trainer.should_stop = True
        watched = list(self.detectors.levels) if self.watches else []
        idle = self.detectors.idle if self.watches else {}
        self.alert_log.open(iterations.writes(trainer), start, watched, idle)
        if handover is not None:
            module = cast(OnPolicyModule, pl_module)
            for change in self.policy.after_rollback(knobs_of(module)):
                self._change(module, change, start)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Before iteration 1, run the preflight if it is asked for.

        Raises:
            PreflightError: on every rank, if a check fails.
        """
        begins = current_iteration(trainer) == 1 and hasattr(pl_module, "controls")
        if not (self.preflight and begins):
            return
        # Lightning opens the precision's context around training steps alone.
        with trainer.strategy.precision_plugin.forward_context():
            first = rollouts.first_rollout(cast(OnPolicyModule, pl_module), batch)
        checks = check_first_rollout(first)
        for check in checks:
            self.alert_log.note_check(check)
        if first.untrained and trainer.is_global_zero:
            share = f"{100 * first.entropy_share:.0f} % of the entropy of an even choice"
            logger.warning(f"preflight: the policy is untrained ({share}): is artifacts.sft right?")
        failed = [f"{one.name}: {one.found}. {one.fix}" for one in checks if not one.passed]
        if failed:
            raise rollouts.PreflightError(f"doctor.preflight=true failed: {'; '.join(failed)}")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure, log, raise alerts, intervene."""
        rollout = outputs.get("rollout") if isinstance(outputs, Mapping) else None
        if rollout is None or not self.watches:
            return
        module = cast(OnPolicyModule, pl_module)
        iteration, skip = current_iteration(trainer), module.sampling.skip_special_tokens
        answers = rollouts.responses_of(rollout, batch, module.tokenizer, skip_special_tokens=skip)
        due = iteration % self.second_every_n_iterations == 0
        with trainer.strategy.precision_plugin.forward_context():
            seconds = None
            if due and self.second_scorer is not None:
                seconds = self.second_scorer(answers).total.float().tolist()
        lags = bool(module.algorithm.rollout_lag)
        records = rollouts.all_records(rollout, answers, self.refusals, seconds, lags=lags)
        two = self.second_scorer is not None
        measured = response_metrics(records, score_clip=module.score_clip, second_scorer=two)
        own = ("rollout/", f"{module.stage}/")  # and not what this callback logged before
        fresh = fresh_metrics(trainer).items()
        logged = {name.partition("/")[2]: value for name, value in fresh if name.startswith(own)}
        for transition in self.detectors.observe(iteration, logged | measured):
            advice = _advice(module, transition.detector)
            self.alert_log.note_alert(iteration, transition, trainer.loggers, advice)
        self.alert_log.note_idle(iteration, self.detectors.idle)
        self._log(pl_module, measured)
        if self.actions is not None:
            self._act(trainer, module, iteration)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the run with the reason, if this fit was ended by a stop.

        Raises:
            RunStoppedError: on every rank.
        """
        if (request := self.request) is not None and request.kind == "stop":
            told = f"the doctor, after iteration {request.iteration}: {request.message}. Fix: "
            told += f"{_advice(pl_module, request.name)[1]}, or actions.on_alarm=none, and "
            raise RunStoppedError(f"{told}ckpt_path={self.folder.last_checkpoint}")

    # -- going back and ending ----------------------------------------------------------------

    def hand_over(self, checkpoint: int) -> Handover:
        """Return what the fit that starts from `checkpoint` has to know of this one."""
        events = tuple(self.alert_log.events)
        return Handover(checkpoint, self.policy.rollbacks, dict(self.policy.held), events)

    def _taken_over(self, trainer: Trainer, start: int) -> Handover | None:
        """Return the rollback to the checkpoint that was loaded; None if that one knows of it."""
        path, found = self.folder.checkpoints / HANDOVER, None
        if trainer.is_global_zero and path.is_file():
            found = parse(Handover, path.read_bytes())
        handover: Handover | None = trainer.strategy.broadcast(found)
        if handover is None or self.actions is None or handover.checkpoint != start:
            return None
        return handover if handover.rollbacks > self.policy.rollbacks else None

    # -- acting -----------------------------------------------------------------------------

    def _act(self, trainer: Trainer, module: OnPolicyModule, iteration: int) -> None:
        found, knobs = self.detectors, knobs_of(module)
        for change in self.policy.due(found.beyond, found.subjects, knobs, found.read):
            self._change(module, change, iteration)
        kind, alarm = self.policy.verdict(iteration, found.active, found.read)
        if kind == "continue" or iteration >= found.history.num_iterations:
            return
        best = [getattr(one, "best_iteration", None) for one in trainer.checkpoint_callbacks]
        healthy = next((one for one in best if one is not None and one < iteration), None)
        if healthy in self.policy.alarmed_iterations:  # going back would help nothing
            healthy = None
        self.request = self.alert_log.note_end(iteration, kind, alarm, healthy)
        if self.request.kind == "rollback":
            self.policy.rollbacks += 1
        trainer.should_stop = True

    def _change(self, module: OnPolicyModule, intervention: Intervention, iteration: int) -> None:
        apply(module, intervention)
        self.alert_log.note_action(iteration, intervention)

    # -- telling ----------------------------------------------------------------------------

    def _log(self, module: LightningModule, measured: Mapping[str, float]) -> None:
        active = self.detectors.active
        levels, quality = list(active.values()), math.nan
        name = "score" if self.second_scorer is None else "second_score"
        last = self.detectors.history.of(name).last
        values = {f"doctor/{name}": value for name, value in measured.items()}
        values["doctor/warnings"] = float(levels.count(1))
        values["doctor/alarms"] = float(levels.count(2))
        if last:
            self.largest_score = max(self.largest_score, *map(abs, last))
            costs = max(_ALERT_COSTS, _ALERT_COSTS_SCORES * self.largest_score)
            quality = sum(last) / len(last) - costs * bool(levels)
            quality -= _SERIOUS_COSTS_ALERTS * costs * bool(serious_alarms(active))
        values["doctor/quality"] = quality
        module.log_dict(self.logged_names.with_nans(values), on_step=True)

    # -- state ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return readings, events and actions as plain values, for an exact resume."""
        return {
            "detectors": self.detectors.state_dict(),
            "policy": self.policy.state_dict(),
            "events": [asdict(event) for event in self.alert_log.events],
            "request": None if self.request is None else asdict(self.request),
            "largest_score": self.largest_score,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of a checkpoint.

        A run that the doctor stopped continues when it is resumed: a remaining alarm gets its
        patience again. A requested rollback is made, unless the settings no longer allow it.
        """
        self.detectors.load_state_dict(state_dict["detectors"])
        self.policy.load_state_dict(state_dict["policy"])
        self.alert_log.events = [DoctorEvent(**content) for content in state_dict["events"]]
        self.largest_score = float(state_dict["largest_score"])
        request = state_dict["request"]
        rolls_back = self.policy.settings.on_alarm == "rollback"
        again = request is not None and request["kind"] == "rollback" and rolls_back
        self.request = DoctorEvent(**request) if again else None
        if request is not None and not again:
            self.policy.alarmed_since = {}
