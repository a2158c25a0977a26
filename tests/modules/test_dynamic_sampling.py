"""Dynamic sampling: prompts whose responses all have one score give their place to later ones.

A prompt's number is its position in the stream; the scorers here go by it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch

from rlhf_lightning.batches import PromptBatch
from rlhf_lightning.callbacks.checkpointing import AtomicCheckpointIO, IterationCheckpoint
from rlhf_lightning.callbacks.doctor.rollouts import responses_of
from rlhf_lightning.data.collate import PromptCollator
from rlhf_lightning.data.datamodules import PromptDataModule
from rlhf_lightning.data.encode import EncodedPrompt
from rlhf_lightning.data.sampler import StreamBatchSampler
from rlhf_lightning.data.sources.given import GivenRows
from rlhf_lightning.hparams import SamplingHparams
from rlhf_lightning.modules.metrics import rollout_metrics
from rlhf_lightning.rollout.generators.base import CachedGenerator
from rlhf_lightning.rollout.resampling import resampled
from rlhf_lightning.rollout.scorers.base import Responses, Scores
from tests.builders.library_runs import assert_same_rollouts, assert_same_weights
from tests.builders.models import EOS, PAD, flat_parameters, tiny_tokenizer
from tests.builders.ranks import SimulatedRanks
from tests.builders.record_files import TEN_PROMPTS, TEN_ROWS
from tests.builders.stages import STOPS, RecordedGRPO, built, grpo_hparams, tiny_grpo, trainer
from tests.modules.test_ppo_resume import KilledError
from tests.rollout.answers import responses_of as texts_of

SIZE, BATCH, SEED = 2, 4, 5
# Of the first iteration 0 to 3, and then of those that may take their place.
DULL = {1, 3, 4, 6} | {13}


class ScorerByNumber:
    """Scores 0 and 1 in turn, so that groups are informative, but 0 where prompts are dull."""

    def __init__(self, is_dull: Callable[[int], bool]) -> None:
        self.is_dull = is_dull

    def build(self, base: Any = None) -> list[torch.nn.Module]:
        return []

    def __call__(self, answers: Responses) -> Scores:
        dull = torch.tensor([self.is_dull(n) for n in answers.prompts.group_ids.tolist()])
        total = torch.where(dull, 0.0, answers.prompts.row_ids % SIZE)
        return Scores(total, {"one": total, "half": total / 2})


class Asked(CachedGenerator):
    """Notes the numbers of the prompts that it is asked for."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.numbers: list[list[int]] = []

    def __call__(self, model: Any, prompts: PromptBatch, **options: Any) -> Any:
        self.numbers.append(prompts.group_ids[::SIZE].tolist())
        return super().__call__(model, prompts, **options)


class Seen(RecordedGRPO):
    """Keeps batches, rollouts, and what is logged."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.batches: list[PromptBatch] = []
        self.logged: list[dict[str, float]] = []

    def collect_rollout(self, prompts: PromptBatch, iteration: int) -> Any:
        self.batches.append(prompts)
        return super().collect_rollout(prompts, iteration)

    def log_dict(self, dictionary: Any, **options: Any) -> None:
        self.logged.append(dict(dictionary))

    @property
    def asked(self) -> list[list[int]]:
        return self.generator.numbers

    @property
    def groups(self) -> list[list[int]]:
        """The numbers of the prompts of each rollout."""
        return [rollout.group_ids[::SIZE].tolist() for rollout in self.rollouts]


def module_with(rounds: int, scorer: Any = None, **hparams: Any) -> Seen:
    own = {"num_minibatches": 2, "missing_eos_penalty": 0.0, "max_resampling_rounds": rounds}
    return tiny_grpo(
        grpo=grpo_hparams(**own | hparams),
        sampling=SamplingHparams(max_new_tokens=7, temperature=0.9),
        scorer=scorer or ScorerByNumber(DULL.__contains__),
        generator=Asked(STOPS, PAD),
        cls=Seen,
    )


def data() -> PromptDataModule:
    return PromptDataModule(
        GivenRows(TEN_PROMPTS, validation_fraction=0),
        tiny_tokenizer(),
        batch_size=BATCH,
        num_iterations=3,
        max_prompt_length=16,
        seed=SEED,
        num_generations=SIZE,
    )


def fitted(module: Seen, *, resume: Path | None = None, **options: Any) -> Seen:
    trainer(**options).fit(module, datamodule=data(), ckpt_path=resume)
    return module


@pytest.fixture(scope="module")
def run() -> Seen:
    return fitted(module_with(2))


def test_dull_groups_give_their_place_to_the_next_prompts_of_the_stream_in_order(run):
    assert run.asked == [
        [0, 1, 2, 3], [4, 5], [6],  # 5 takes the place of 1; 4 and 6 are dull too
        [4, 5, 6, 7], [8, 9],
        [8, 9, 10, 11],
    ]  # fmt: skip
    assert run.groups == [[0, 5, 2, 3], [8, 5, 9, 7], [8, 9, 10, 11]]


class ScorerBeyondTheClip(ScorerByNumber):
    """Scores the responses to a dull prompt 7 and 97, which `score_clip=5` makes one."""

    def __call__(self, answers: Responses) -> Scores:
        of_dull = 7.0 + 90 * (answers.prompts.row_ids % SIZE)
        dull = torch.tensor([self.is_dull(n) for n in answers.prompts.group_ids.tolist()])
        total = torch.where(dull, of_dull, super().__call__(answers).total)
        return Scores(total, {"one": total})


@pytest.mark.parametrize(
    ("score_clip", "groups", "at_clip"), [(5.0, [0, 5, 2, 3], 0.25), (None, [0, 1, 2, 3], None)]
)
def test_a_group_whose_scores_are_clipped_to_one_is_dull(score_clip, groups, at_clip):
    scorer = ScorerBeyondTheClip(DULL.__contains__)
    module = built(module_with(2, scorer, score_clip=score_clip))
    rollout, _ = module.collect_rollout(share(rounds=2), 0)
    assert module.groups == [groups]
    measures = rollout_metrics(rollout, "grpo", score_clip=score_clip)
    taught = (rollout.advantages != 0).any(-1).float().mean()
    assert measures["rollout/informative_groups"] == taught == (1.0 if at_clip is None else 0.75)
    assert measures.get("rollout/clipped") == at_clip


def test_what_was_resampled_is_logged(run):
    names = ("resampled_groups", "resampling_rounds", "informative_groups")
    got = [tuple(values[f"rollout/{name}"] for name in names) for values in run.logged]
    assert got == [(0.25, 2, 0.75), (0.5, 1, 1.0), (0.0, 0, 1.0)]


def test_the_rows_are_whole_groups_with_the_prompts_of_their_numbers(run):
    stream = StreamBatchSampler(len(TEN_ROWS), batch_size=10, num_iterations=2, seed=SEED)
    texts = [TEN_ROWS[row] for number in range(2) for row in stream.batch(number)]
    for batch, rollout in zip(run.batches, run.rollouts, strict=True):
        assert rollout.group_ids.tolist() == rollout.group_ids[::SIZE].repeat_interleave(2).tolist()
        ids = rollout.group_ids * SIZE + torch.arange(len(rollout)) % SIZE
        assert rollout.row_ids.tolist() == ids.tolist()
        answers = responses_of(rollout, batch, tiny_tokenizer())
        for row, number in enumerate(rollout.group_ids.tolist()):
            text = rollout.query_tensors[row][rollout.attention_mask[row, : rollout.prompt_length]]
            assert text.tolist() == texts[number]
            assert answers.prompts.columns["prompt"][row] == " ".join(
                f"w{i}" for i in texts[number]
            )


@pytest.mark.parametrize("scale", ["group_std", "global_std"])
def test_the_rollout_is_that_of_the_chosen_prompts_alone(scale):
    """Log-probabilities, advantages and scores know nothing of the groups that were dropped."""
    batch = share(rounds=2)
    module = built(module_with(2, scale=scale))
    got, _ = module.collect_rollout(batch, 0)
    assert got.group_ids[::SIZE].tolist() == [0, 5, 2, 3]
    chosen = batch.with_row_ids(got.row_ids)
    chosen = replace(chosen, spare=torch.zeros(len(chosen), dtype=torch.bool))
    wanted, _ = built(module_with(0, scale=scale)).collect_rollout(chosen, 0)
    assert torch.equal(got.response_mask, wanted.response_mask)
    kept = torch.cat([got.attention_mask[:, : got.prompt_length], got.response_mask], 1)
    assert torch.equal(got.sequences[kept], wanted.sequences[kept])
    for name in ("logprobs", "ref_logprobs", "entropy", "rewards", "advantages", "scores"):
        assert torch.equal(getattr(got, name), getattr(wanted, name)), name
    assert torch.equal(got.finish_reason, wanted.finish_reason)
    assert torch.equal(got.score_components["half"], wanted.scores / 2)
    if scale == "group_std":
        assert (got.advantages[got.scores == 1] > 0).any()
        assert (got.advantages[-SIZE:] == 0).all()


def test_where_every_group_teaches_resampling_costs_and_changes_nothing():
    scorer = ScorerByNumber(lambda number: False)
    off, on = (fitted(module_with(rounds, scorer)) for rounds in (0, 3))
    assert on.asked == off.asked == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert torch.equal(flat_parameters(on), flat_parameters(off))
    assert not torch.equal(flat_parameters(on), flat_parameters(built(module_with(0))))
    for ours, theirs in zip(on.logged, off.logged, strict=True):
        new = {name for name in ours if name not in theirs}
        assert new == {"rollout/resampled_groups", "rollout/resampling_rounds"}
        timed = {name for name in ours if name.startswith(("time/", "throughput/"))}
        assert all(ours[name] == theirs[name] for name in ours if name not in new | timed)


class Kill(L.Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            raise KilledError


def test_a_killed_and_resumed_run_resamples_the_same(run, tmp_path):
    def callbacks(*more: L.Callback) -> dict[str, Any]:
        own = [IterationCheckpoint(tmp_path, every_n_iterations=1), *more]
        return {"callbacks": own, "enable_checkpointing": True, "plugins": [AtomicCheckpointIO()]}

    with pytest.raises(KilledError):
        fitted(module_with(2), **callbacks(Kill()))
    resumed = fitted(module_with(2), resume=tmp_path / "last.ckpt", **callbacks())
    assert resumed.groups == run.groups[1:]
    assert_same_rollouts(resumed.rollouts, run.rollouts)
    assert_same_weights(resumed, run)


def test_a_run_in_which_nothing_teaches_goes_on_without_an_advantage():
    module = fitted(module_with(2, ScorerByNumber(lambda number: True)))
    assert module.groups == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert module.asked[:3] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert len(module.asked) == 9
    assert torch.equal(flat_parameters(module), flat_parameters(built(module_with(0))))
    for values, rollout in zip(module.logged, module.rollouts, strict=True):
        assert (rollout.advantages == 0).all()
        assert values["rollout/informative_groups"] == 0
        assert values["rollout/resampled_groups"] == 0
        assert values["rollout/resampling_rounds"] == 2


def share(*, rounds: int, rank: int = 0, world_size: int = 1, batch: int = BATCH) -> PromptBatch:
    """Return a rank's part of the first iteration."""
    sampler = StreamBatchSampler(
        len(TEN_ROWS),
        batch_size=batch,
        num_iterations=1,
        seed=SEED,
        rank=rank,
        world_size=world_size,
        with_row_ids=True,
        num_spare_batches=rounds,
        whole_spares=True,
    )
    (rows,) = sampler
    encoded = [
        (EncodedPrompt(TEN_ROWS[row], columns={"prompt": str(row)}), number) for row, number in rows
    ]
    return PromptCollator(PAD, SIZE, batch // world_size)(encoded)


@pytest.mark.parametrize("size", [2, 4])
def test_the_prompts_that_are_trained_on_do_not_depend_on_the_number_of_ranks(monkeypatch, size):
    """Of the first iteration 0 to 7, then 8 to 23; groups 1, 3, 5, 8 and 12 teach nothing."""
    dull = {1, 3, 5, 8, 12}
    one = built(module_with(2, ScorerByNumber(dull.__contains__), scale="global_std"))
    whole, _ = one.collect_rollout(share(rounds=2, batch=8), 0)
    assert one.asked == [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10], [11]]
    assert one.groups == [[0, 9, 2, 10, 4, 11, 6, 7]]
    ranks = SimulatedRanks(monkeypatch, size)
    scorer = ScorerByNumber(dull.__contains__)
    modules = [built(module_with(2, scorer, scale="global_std")) for _ in range(size)]
    for module in modules:
        module._trainer = SimpleNamespace()

    def rolled_out(rank: int) -> dict[str, float]:
        prompts = share(rounds=2, rank=rank, world_size=size, batch=8)
        rollout, _ = modules[rank].collect_rollout(prompts, 0)
        assert torch.equal(prompts.with_row_ids(rollout.row_ids).row_ids, rollout.row_ids)
        return rollout_metrics(rollout, "grpo")

    measures = ranks.run(rolled_out)
    assert all(len(module.asked) == 3 for module in modules)
    assert len({len(asked) for module in modules for asked in module.asked[1:2]}) == 1
    assert [group for module in modules for group in module.groups[0]] == one.groups[0]
    parts = [module.rollouts[0] for module in modules]
    start = 0
    for part in parts:
        rows = slice(start, start := start + len(part))
        for name in ("row_ids", "scores", "finish_reason", "resampled"):
            assert torch.equal(getattr(part, name), getattr(whole, name)[rows]), name
        mask = part.response_mask
        ids = [row[kept].tolist() for row, kept in zip(part.response_tensors, mask, strict=True)]
        wanted = zip(whole.response_tensors[rows], whole.response_mask[rows], strict=True)
        assert ids == [row[kept].tolist() for row, kept in wanted]
        torch.testing.assert_close(
            part.advantages[mask], whole[rows].advantages[whole[rows].response_mask]
        )
    assert all(found == measures[0] for found in measures)
    assert measures[0]["rollout/resampled_groups"] == 3 / 8
    assert measures[0]["rollout/resampling_rounds"] == 2
    assert measures[0]["rollout/informative_groups"] == 1


def test_a_batch_without_spare_prompts_is_refused():
    loader = data().train_dataloader()  # made without a Trainer, so without the module
    with pytest.raises(ValueError, match=r"max_resampling_rounds=2 needs 16 spare rows, .* has 0"):
        trainer().fit(module_with(2), loader)


def test_a_scorer_that_tells_of_unscored_rows_in_some_batches_alone_may_be_resampled():
    """`applies` is None where every row has a score, as `Scores` says."""

    def answered(prompts: PromptBatch) -> tuple[Responses, Scores]:
        answers = texts_of(prompts, [[8, EOS]] * len(prompts))
        total, components, _ = ScorerByNumber(DULL.__contains__)(answers)
        lacks = answers.prompts.row_ids == 2  # of a dull group, which gives its place
        total = total.where(~lacks, torch.nan)
        return answers, Scores(total, components, ~lacks if lacks.any() else None)

    _, scores, _ = resampled(answered, share(rounds=2), max_rounds=2, score_clip=None)
    assert scores.applies is not None
    assert scores.applies.tolist() == [True] * 8
    assert scores.total.tolist() == [0, 1, 0, 1, 0, 1, 0, 0]
