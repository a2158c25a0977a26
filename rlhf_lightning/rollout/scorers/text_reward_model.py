"""A reward model that reads text: its own tokenizer, chat template, truncation and padding.

Legend: B rows, T padded tokens, b rows of a micro-batch, W their width, L labels.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from rlhf_lightning.arguments import Line, Name, PathOrName, checked
from rlhf_lightning.distributed.collectives import agreed_max
from rlhf_lightning.models.building import place_on_ranks
from rlhf_lightning.models.classifiers import (
    SequenceClassifier,
    check_reading,
    eos_ids,
    load_classifier,
    max_positions,
)
from rlhf_lightning.models.forward import bucket_width, by_micro_batch
from rlhf_lightning.models.loading import loading_options, reward_normalization
from rlhf_lightning.rollout.scorers.base import Responses, Scores, response_texts_of
from rlhf_lightning.rollout.scorers.hparams import TextRewardModelHparams
from rlhf_lightning.text.reward_text import ClassifierInputs, LastTokenInputs, Renderer
from rlhf_lightning.text.tokenizers import as_saved

logger = logging.getLogger(__name__)
NO_LIMIT = 10**9


class TextRewardModelScorer:
    """Any sequence classifier of Hugging Face, with the tokenizer it was trained with.

    Prompt and response reach it as text. A decoder with a linear `score` is read at the last token
    of the response, EOS included if the response finished; every other classifier is called as
    transformers calls it, padded on the right. A second component is `<name>_over_long`: 1 where
    the response alone was longer than `max_length`, so that its end and its prompt are missing.

    Args:
        source: folder or hub name of a checkpoint in safetensors.
        tokenizer: folder or hub name, if it is not stored with the model.
        revision: branch, tag or commit of a hub name.
        name: name of the component.
        hparams: the fields of `TextRewardModelHparams`.
    """

    Hparams = TextRewardModelHparams
    holds = "model"
    words = "a reward model"

    @checked
    def __init__(
        self,
        source: PathOrName,
        *,
        tokenizer: PathOrName | None = None,
        revision: Line | None = None,
        name: Name = "text_reward_model",
        **hparams: Any,
    ) -> None:
        self.source = str(source)
        self.tokenizer_source = self.source if tokenizer is None else str(tokenizer)
        self.revision = revision
        self.name = name
        self.hparams = TextRewardModelHparams(**hparams)
        self.normalized = (self.hparams.mean, self.hparams.std) != (0.0, 1.0)
        self.tells_over_long = True  # once
        self.model: SequenceClassifier | None = None

    def build(self, base: Any = None) -> list[nn.Module]:
        """Load tokenizer and model, frozen.

        Raises:
            ValueError: if settings, tokenizer and model do not fit together, or the score of a row
                depends on padding.
        """
        if self.model is None:
            source, hparams = self.tokenizer_source, self.hparams
            own = self.revision if source == self.source else None
            self.tokenizer = as_saved(source, loading_options(source, revision=own))
            if not self.tokenizer.is_fast:
                told = f"the tokenizer of {source} is no fast one"
                raise ValueError(f"{told}: serve the model and use scorer=http")
            model = load_classifier(self.source, revision=self.revision, dtype=hparams.dtype)
            names = {int(index): str(name) for index, name in model.model.config.id2label.items()}
            label: Any = 0 if hparams.label is None and len(names) == 1 else hparams.label
            self.label: Any = {name: i for i, name in names.items()}.get(label, label)
            if self.label not in names:
                told = f"scorer.label={label!r}: the reward model has {len(names)} labels"
                raise ValueError(f"{told}, say which one is rewarded, by name or index: {names}")
            self.output = self._output(model)
            found = reward_normalization(model.model.config, self.source)
            if found is not None and not self.normalized:
                self.hparams, self.normalized = replace(hparams, mean=found[0], std=found[1]), True
                told = "%s: its scores are normalized by mean=%g and std=%g of its config.json"
                logger.warning(told, self.source, *found)
            if self.output != "probability":  # of an export of ours
                self.normalized |= getattr(model.model.config, "reward_normalized", False)
            self.encode = self._encoder(model)
            self.pad_id = 0  # a decoder's mask hides it, and its pad token may have no embedding
            if not model.reads_last_token:
                given = model.model.config.get_text_config().pad_token_id
                self.pad_id = self.tokenizer.pad_token_id if given is None else given
            if self.pad_id is None:
                raise ValueError(f"{self.source} has no pad_token_id in its config.json: set one")
            check_reading(model, self.pad_id)
            self.model = place_on_ranks(model, frozen=True)
        return [self.model]

    def _output(self, model: SequenceClassifier) -> str:
        """Return what is rewarded: by default the logit of a regression, else log-odds."""
        config, output = model.model.config, self.hparams.output
        kind = config.problem_type if config.num_labels > 1 else None
        unknown = config.num_labels > 2 and kind is None and output is None
        if unknown or (kind == "regression" and output not in (None, "logit")):
            told = f"scorer.output={output}: {self.source} has {config.num_labels} labels and "
            told += f"problem_type={kind} in its config.json"
            raise ValueError(f"{told}: use scorer.output=logit for ratings, log_odds for classes")
        return output or ("logit" if kind == "regression" else "log_odds")

    @torch.no_grad()
    def __call__(self, responses: Responses) -> Scores:
        """Return the reward model's scores and which responses were over-long."""
        model = self.model
        if model is None:
            raise RuntimeError("TextRewardModelScorer.build() was not called")
        texts = response_texts_of(responses, thoughts=self.hparams.thoughts)
        rows = [self.encode(row) for row in texts]
        device = responses.sequences.device
        ids = pad_sequence([torch.tensor(row.ids) for row in rows], True, self.pad_id)  # [B, T]
        types = pad_sequence([torch.tensor(row.type_ids) for row in rows], True)
        lengths = torch.tensor([len(row.ids) for row in rows])
        mask = torch.arange(ids.shape[1]) < lengths.unsqueeze(1)
        ids, types, mask = ids.to(device), types.to(device), mask.to(device)
        has_types = "token_type_ids" in self.tokenizer.model_input_names

        def logits_of(index: Tensor) -> tuple[Tensor]:
            width = min(int(bucket_width(mask[index].sum(-1)).max()), mask.shape[1])
            ids_, mask_ = ids[index, :width], mask[index, :width]  # [b, W]
            types_ = types[index, :width] if has_types and not model.reads_last_token else None
            return (model(ids_, mask_, types_),)

        (logits,) = by_micro_batch(logits_of, mask, self.hparams.micro_batch_size, agree=agreed_max)
        config, reward = model.model.config, logits[:, self.label]
        alone = config.num_labels == 1 or config.problem_type == "multi_label_classification"
        if self.output != "logit" and not alone:  # the label's log-odds, log(p / (1 - p))
            others = [i for i in range(logits.shape[1]) if i != self.label]
            reward = reward - logits[:, others].logsumexp(-1)
        reward = reward.sigmoid() if self.output == "probability" else reward
        over_long = torch.tensor([float(row.over_long) for row in rows], device=device)
        if self.tells_over_long and over_long.any():
            self.tells_over_long = False
            told = int(over_long.sum()), self.encode.max_length, self.source, self.name
            what = (
                "%d responses are longer than the %s tokens that %s reads, by themselves, and are "
            )
            fix = "raise scorer.max_length or lower module.sampling.max_new_tokens"
            logger.warning(f"{what}scored by what fits (see %s_over_long): {fix}", *told)
        total = (reward - self.hparams.mean) / self.hparams.std  # [B]
        return Scores(total, {self.name: total, f"{self.name}_over_long": over_long})

    def _encoder(self, model: SequenceClassifier) -> LastTokenInputs | ClassifierInputs:
        max_length, positions = self.hparams.max_length, max_positions(model.model)
        if max_length is None:  # tokenizers without a limit say 10**30
            limits = (positions, self.tokenizer.model_max_length)
            max_length = min((n for n in limits if n and n < NO_LIMIT), default=None)
        elif positions is not None and max_length > positions:
            told = f"scorer.max_length={max_length} is more than the {positions} positions of"
            raise ValueError(f"{told} {type(model.model).__name__}: use at most {positions}")
        renderer = Renderer(self.tokenizer)
        what, ending = self.hparams.input_format, self.hparams.ending
        if not model.reads_last_token and ending in (None, "template"):
            return ClassifierInputs(renderer, what, max_length)
        if not model.reads_last_token or what != "text":
            told = f"scorer.input_format={what}, scorer.ending={ending}: {self.source} does not fit"
            fix = "use scorer.input_format=text for a decoder, leave scorer.ending out for another"
            raise ValueError(f"{told}: {fix}")
        if ending in (None, "eos") and model.model.config.pad_token_id in eos_ids(model.model):
            told = "the pad token of %s is its EOS: its score is read at EOS, by transformers a "
            logger.warning(f"{told}token earlier: for that set scorer.ending=none", self.source)
        return LastTokenInputs(renderer, ending or "eos", max_length)
