"""The parts of a collection: prompts, policies, annotators and the lab."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rlhf_lightning.app.config.commands import AdversarialSettings, CollectSettings
from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.app.config.groups import ModelSettings, Target
from rlhf_lightning.data.first_screen import warn_of_cut_responses, warn_of_plain_prompts
from rlhf_lightning.data.records import PromptRecord, prompt_key
from rlhf_lightning.preferences.annotators import Annotator
from rlhf_lightning.preferences.best_of_n import RejectionSampler
from rlhf_lightning.preferences.candidates import LoadedPolicy, Sampling, load_candidate_policy
from rlhf_lightning.preferences.collection import Lab
from rlhf_lightning.preferences.decoding import grid
from rlhf_lightning.preferences.pairing import WorstSamples
from rlhf_lightning.preferences.reward_annotator import RewardModelAnnotator
from rlhf_lightning.text.tokenizers import load_tokenizer


def build_lab(settings: CollectSettings, folder: Path) -> Lab:
    """Return the lab of a collection; models are loaded when their turn comes.

    Raises:
        ConfigError: with the key, what it got and what it wants.
    """
    annotator = settings.annotator
    try:
        return Lab(
            folder=folder,
            sampling=_sampling(settings),
            annotators=_annotators([*(annotator.automatic or {}).values(), settings.judge]),
            people=None if annotator.people is None else annotator.people.build(),
            budget=settings.budget.build(),
            hparams=settings.lab.build(),
            score=None if settings.score is None else settings.score.build(),
            worst=_worst(settings.adversarial, settings.trainer.precision),
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from error


def build_rejection_sampler(
    settings: CollectSettings, folder: Path, say: Callable[[str], None]
) -> RejectionSampler:
    """Return what makes demonstrations; models are loaded when their turn comes.

    Raises:
        ConfigError: with the key, what it got and what it wants.
    """
    candidates, gold = settings.candidates, settings.dataset.gold
    longest = candidates.max_prompt_length + candidates.max_new_tokens
    try:
        return RejectionSampler(
            folder=folder,
            sampling=_sampling(settings),
            score=RewardModelAnnotator(
                str(settings.artifacts.reward),
                max_length=longest,
                precision=settings.trainer.precision,
            ).scores,
            keep_unfinished=settings.lab.get("keep_unfinished", False),
            gold=None if gold is None else gold.build(),
            say=say,
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from error


def _sampling(settings: CollectSettings) -> Sampling:
    candidates = settings.candidates
    return Sampling(
        policies={
            name: _policy(source, settings.model, settings.trainer.precision)
            for name, source in candidates.policies.items()
            if source is not None
        },
        decodings=grid(candidates.decoding),
        num_samples=candidates.num_samples,
        max_new_tokens=candidates.max_new_tokens,
        max_prompt_length=candidates.max_prompt_length,
        batch_size=candidates.batch_size,
        skip_special_tokens=candidates.skip_special_tokens,
        seed=settings.seed,
    )


def read_prompts(settings: CollectSettings) -> list[PromptRecord]:
    """Return the dataset's prompts, each once; a random part of them in the order of the source.

    Raises:
        ConfigError: if there is none.
    """
    source = settings.dataset.source.build()
    records = source.records("prompts", settings.candidates.split)
    found = {prompt_key(record): record for record in records}
    prompts = list(found.values())
    count = settings.candidates.num_prompts
    if count is not None and count < len(prompts):
        drawn = random.Random(f"{settings.seed}/prompts").sample(range(len(prompts)), count)
        prompts = [prompts[index] for index in sorted(drawn)]
    if not prompts:
        raise ConfigError(f"dataset={settings.dataset.name} has no prompts in candidates.split")
    first = next(filter(None, settings.candidates.policies.values()), None)
    if first is not None:
        tokenizer = load_tokenizer(first, **settings.model.template, **settings.model.origin)
        longest, key = settings.candidates.max_new_tokens, "candidates.max_new_tokens"
        warn_of_plain_prompts(prompts, tokenizer)
        warn_of_cut_responses(source, settings.candidates.split, tokenizer, longest, key=key)
    return prompts


def _annotators(nodes: Sequence[Target | None]) -> list[Annotator]:
    annotators: list[Annotator] = [node.build() for node in nodes if node is not None]
    names = [annotator.name for annotator in annotators]
    if len(set(names)) != len(names):
        raise ConfigError(f"annotators need different names, got {', '.join(names)}")
    return annotators


def _worst(settings: AdversarialSettings, precision: str) -> WorstSamples | None:
    if settings.run is None:
        return None
    if settings.source is None:
        raise ConfigError(
            "adversarial.run needs the reward model that was misled: artifacts.reward=..."
        )
    model = RewardModelAnnotator(
        settings.source, max_length=settings.max_length, precision=precision
    )
    return WorstSamples(Path(settings.run), model.scores, settings.num_pairs)


def _policy(source: str, model: ModelSettings, precision: str) -> Callable[[], LoadedPolicy]:
    return partial(
        load_candidate_policy,
        source,
        **model.template,
        revision=model.revision,
        trust_remote_code=model.trust_remote_code,
        precision=precision,
    )
