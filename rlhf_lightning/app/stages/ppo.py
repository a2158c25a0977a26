"""PPO: a policy that answers prompts, is scored, and is kept close to where it started."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from omegaconf import DictConfig, OmegaConf

from rlhf_lightning.app.stages.spec import (
    POLICY,
    SCALAR,
    Minibatches,
    Parts,
    StageCallbacks,
    StageSpec,
)
from rlhf_lightning.hparams import PPOHparams, SamplingHparams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf_lightning.evaluation.final_metrics import Findings
    from rlhf_lightning.evaluation.generate import Sampling
    from rlhf_lightning.rollout.scorers.base import Scorer
    from rlhf_lightning.runs.folder import RunFolder

# Scorers whose constructors load no model.
LIGHT_SCORERS = frozenset(
    {
        "rlhf_lightning.rollout.scorers.base.FunctionScorer",
        "rlhf_lightning.rollout.scorers.base.WeightedScorer",
        "rlhf_lightning.rollout.scorers.http.HttpScorer",
    }
)


def check(cfg: DictConfig) -> None:
    """Check the KL controller, the scorer, and that adapters have no dropout.

    Raises:
        ConfigError: with the key, what it got and what it wants.
    """
    from rlhf_lightning.app.config.compose import ConfigError

    _check_kl_horizon(cfg)
    _check_scorer(cfg)
    if cfg.lora is not None and (rate := cfg.lora.dropout):
        raise ConfigError(f"lora.dropout={rate}: PPO needs 0, or the ratio does not start at 1")


def _check_kl_horizon(cfg: DictConfig) -> None:
    from rlhf_lightning.app.config.compose import ConfigError

    rows, ppo = cfg.data.batch_size, cfg.module.ppo
    if ppo.kl_target is not None and ppo.kl_horizon * 5 <= rows:
        raise ConfigError(
            f"module.ppo.kl_horizon={ppo.kl_horizon} is too small for data.batch_size={rows}: the "
            f"KL coefficient would change its sign; use more than {rows // 5}"
        )


def _check_scorer(cfg: DictConfig) -> None:
    from rlhf_lightning.app.config.compose import ConfigError, choices, plain
    from rlhf_lightning.rollout.scorers.hparams import check_scorer

    if cfg.get("scorer") is None:
        raise ConfigError(f"PPO needs a scorer: scorer=NAME, one of {', '.join(choices('scorer'))}")
    missing = sorted(OmegaConf.missing_keys(cfg.scorer))
    if missing:
        raise ConfigError(f"{missing[0]} is not set: add {missing[0]}=...")
    try:
        check_scorer(plain(cfg.scorer))
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from error


def check_buildable(cfg: DictConfig) -> None:
    """Build a scorer that needs no model once, and check the settings of the sample log.

    Raises:
        ConfigError: with the place, what it got and what it wants.
    """
    from rlhf_lightning.app.config.compose import ConfigError, plain
    from rlhf_lightning.app.config.targets import targets
    from rlhf_lightning.app.config.validate import attempt

    node = plain(cfg.scorer)
    if {str(found["_target_"]) for _, _, found in targets(node)} <= LIGHT_SCORERS:
        attempt("scorer", cfg.scorer, lambda make: make())
    for name, value in plain(cfg.callbacks.samples).items():
        if value < 1:
            raise ConfigError(f"callbacks.samples.{name}={value} must be at least 1")


def arguments(
    cfg: DictConfig, tokenizer: PreTrainedTokenizerBase, generator: Any, fingerprint: str
) -> dict[str, Any]:
    """Return what the module samples and scores with.

    Raises:
        ConfigError: if an adapter or a value model does not fit the policy.
    """
    from hydra.utils import instantiate

    made = {
        "scorer": instantiate(cfg.scorer),
        "generator": generator,
        "tokenizer": tokenizer,
        "seed": cfg.seed,
    }
    check_adapter(cfg, fingerprint)
    _check_value_tokenizer(cfg, tokenizer)
    return made


def check_adapter(cfg: DictConfig, fingerprint: str) -> None:
    """Check that the reward model's adapter was trained on the policy that PPO starts from.

    Raises:
        ConfigError: if it was not, or if there is none.
    """
    from rlhf_lightning.app.config.compose import ConfigError
    from rlhf_lightning.models.adapter_files import read_adapter
    from rlhf_lightning.models.ppo_models import ADAPTER

    shares = cfg.scorer.get("_target_", "").endswith("RewardAdapterScorer")
    starts = cfg.lora is not None and cfg.module.models.value_head == "stored"
    if not (shares or starts):
        return
    folder = Path(cfg.artifacts.reward) / ADAPTER
    try:
        files = read_adapter(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{error}. PPO with lora=lora starts its value model from the reward model's adapter; "
            "module.models.value_head=zero starts it from the policy instead"
        ) from error
    if files.base_fingerprint not in ("", fingerprint):
        raise ConfigError(
            f"the adapter in {folder} was trained on {files.base} "
            f"({files.base_fingerprint[:12]}), artifacts.sft={cfg.artifacts.sft} is "
            f"{fingerprint[:12]}: train the reward model on that policy with lora=lora, or use "
            "scorer=reward_model module.models.value_head=zero"
        )


def _check_value_tokenizer(cfg: DictConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    from rlhf_lightning.app.config.compose import ConfigError
    from rlhf_lightning.models.tokenizers import check_same_tokenizer

    models = cfg.module.models
    unused = models.value is None or (cfg.lora is not None and models.value_head == "zero")
    if unused or models.value == cfg.artifacts.sft:
        return
    fix = "start the value model from the policy: artifacts.reward=null"
    try:
        check_same_tokenizer(tokenizer, models.value, fix=f"{fix} module.models.value_head=zero")
    except ValueError as error:
        raise ConfigError(str(error)) from error


def callbacks(
    cfg: DictConfig,
    folder: RunFolder,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    scorer: Scorer | None,
) -> StageCallbacks:
    """Return the evaluation every few iterations, the doctor, and the log of samples."""
    from rlhf_lightning.app.build import make_doctor, scorer_fingerprints
    from rlhf_lightning.app.config.compose import plain
    from rlhf_lightning.app.evaluation import held_out_comparison
    from rlhf_lightning.callbacks.periodic_evaluation import PeriodicEvaluation
    from rlhf_lightning.callbacks.same_configuration import SameSources
    from rlhf_lightning.callbacks.samples import SampleLog

    every, during = cfg.evaluation.every_n_iterations, []
    if every is not None:
        comparison = held_out_comparison(
            cfg, tokenizer, sampling, scorer, num_prompts=cfg.evaluation.during_training
        )
        if comparison is not None:
            during = [PeriodicEvaluation(comparison, every_n_iterations=every)]
    return StageCallbacks(
        first=[*during, *make_doctor(cfg, folder)],
        last=[
            SameSources(scorer_fingerprints(plain(cfg.scorer))),
            SampleLog(folder, cast(Any, tokenizer), **cfg.callbacks.samples),
        ],
    )


def finish(cfg: DictConfig, folder: RunFolder, parts: Parts) -> Findings:
    """Compare the policy with its reference, and say how far the scores of the run spread."""
    from rlhf_lightning.app.final_evaluation import compare
    from rlhf_lightning.evaluation.final_metrics import Findings, score_spread
    from rlhf_lightning.runs.folder import read_metrics

    findings = Findings({})
    if cfg.artifacts.sft is not None:  # else there is nothing to compare with
        findings = compare(cfg, parts, parts.module.reference, {})
    if parts.trainer.is_global_zero:
        findings.metrics |= score_spread(read_metrics(folder.metrics))
    return findings


def num_answered(cfg: DictConfig) -> int:
    """Return how many held-out prompts are answered."""
    return int(cfg.evaluation.num_prompts)


def start_lines(cfg: DictConfig) -> dict[str, object]:
    """Return what scores the responses, and how they are sampled."""
    from rlhf_lightning.app.config.compose import plain

    ppo, sampling = cfg.module.ppo, cfg.module.sampling
    target = "" if ppo.kl_target is None else f", aims at {ppo.kl_target:g} nats a response"
    scorer = plain(cfg.scorer)
    kind = str(scorer.get("_target_", "")).rpartition(".")[2]
    source = scorer.get("source") or scorer.get("function") or scorer.get("url") or ""
    return {
        "reward": f"{kind} {source}".strip(),
        "rollouts": f"up to {sampling.max_new_tokens} tokens at temperature "
        f"{sampling.temperature:g}; kl_coef {ppo.kl_coef:g}{target}",
    }


def start_notes(cfg: DictConfig, num_rows: int, held_out: int) -> list[str]:
    """Return what asks for more prompts than there are."""
    del num_rows
    asked = num_answered(cfg)
    if held_out >= asked:
        return []
    more = ""
    if cfg.data.source.get("validation_fraction") is not None:
        more = "; a larger dataset.source.validation_fraction holds out more"
    return [
        f"evaluation.num_prompts={asked} is more than the {held_out:,} held-out prompts, which "
        f"are asked once each{more}"
    ]


STAGE = StageSpec(
    name="ppo",
    title="PPO",
    settings="ppo",
    hparams={"ppo": PPOHparams, "sampling": SamplingHparams},
    rates={"learning_rate": "policy", "value_learning_rate": "value"},
    starts_from="sft",
    uses=("sft", "reward", "ppo"),
    trains=(POLICY, SCALAR),
    models="models",
    factory="rlhf_lightning.models.ppo_models.ppo_models",
    validates=False,
    rolls_out=True,
    holds_reference=True,
    minibatches=Minibatches(count="num_minibatches", epochs="num_ppo_epochs"),
    context=(
        ("data.max_prompt_length", "module.sampling.max_new_tokens"),
        ("data.max_prompt_length", "evaluation.max_new_tokens"),
    ),
    shortened_by="module.sampling.max_new_tokens",
    objective="val/score_win_rate",
    finish=finish,
    num_answered=num_answered,
    check=check,
    check_buildable=check_buildable,
    arguments=arguments,
    callbacks=callbacks,
    start_lines=start_lines,
    start_notes=start_notes,
)
