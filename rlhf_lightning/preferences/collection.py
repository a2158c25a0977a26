"""Preference records of prompts, or demonstrations by rejection sampling.

Every phase reads the files of the one before, and slow work is journaled, so that a killed run
continues where it was:

    candidates.journal.jsonl -> candidates.jsonl -> pairs.jsonl
    judgements.jsonl, labels.jsonl      journals of the judge and of every annotator
    data/train.jsonl, data/validation.jsonl, data/reliability.json      the result
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from rlhf_lightning.arguments import AtLeast0, Count, Seed, ShareAbove0
from rlhf_lightning.data.records import PromptRecord, asked_columns
from rlhf_lightning.hparams import Checked, Usual
from rlhf_lightning.preferences import budget, pairing, records
from rlhf_lightning.preferences.agreement import Verdict, aggregate, by_pair
from rlhf_lightning.preferences.annotators import Annotator, Gold, People, label_pairs
from rlhf_lightning.preferences.budget import BudgetHparams, Cost, Routing
from rlhf_lightning.preferences.candidates import ADVICE, METRICS, Sampling, collect_candidates
from rlhf_lightning.preferences.judge import JudgeAnnotator, judge_figures
from rlhf_lightning.preferences.pairing import Pairing, ScoreFunction, WorstSamples
from rlhf_lightning.preferences.records import Candidate, Journal, Label, Pair, readable


@dataclass(frozen=True)
class LabHparams(Checked):
    """Settings of pairing and verdicts.

    Args:
        pairing: random, most_different or best_against_worst.
        pairs_per_prompt: largest number of pairs per prompt.
        num_pairs: number of pairs to label, if there are so many; None for all.
        keep_unfinished: keep responses that were cut off at the token limit.
        margin_scale: margin of a pair on which all agree, in units of the reward.
        near_duplicate: training prompts whose word n-grams overlap with those of a held-out prompt
            by at least this Jaccard index are removed.
        near_duplicate_n: words in an n-gram.
        seed: seeds all random choices.
    """

    pairing: Pairing = "random"
    pairs_per_prompt: Count = 2
    num_pairs: Count | None = None
    keep_unfinished: bool = False
    margin_scale: AtLeast0 = 1.0
    near_duplicate: Annotated[ShareAbove0, Usual(0.5, 0.95)] = 0.7
    near_duplicate_n: Count = 3
    seed: Seed = 1


@dataclass(frozen=True)
class Collection:
    """The result of a lab.

    Args:
        train: verdicts on the pairs to train on.
        validation: verdicts on the held-out pairs, by people alone where there are some.
        routing: assignment of pairs to annotators.
        labels: all labels of all annotators.
        people: names of the people.
        dropped: candidates that were dropped, by reason.
        num_candidates: number of requested candidates, those of over-long prompts among them.
        near_duplicates: training prompts that were removed.
        before: cost of labels of people for every pair.
        after: cost of the actual labels.
        judge: figures of the judge, if there is one.
    """

    train: tuple[Verdict, ...]
    validation: tuple[Verdict, ...]
    routing: Routing
    labels: tuple[Label, ...]
    people: frozenset[str]
    dropped: dict[str, int]
    num_candidates: int
    near_duplicates: int
    before: Cost
    after: Cost
    judge: dict[str, Any] | None


@dataclass(frozen=True)
class Lab:
    """Policies, annotators and settings of a collection, and its run.

    Args:
        folder: folder of the run.
        sampling: policies and decoding.
        annotators: rules, judges and reward models; they label every pair.
        people: they label what the budget sends them; None for annotators alone, which then label
            the validation pairs too.
        budget: shares, votes and wages.
        hparams: settings of pairing.
        score: scores responses, for best_against_worst.
        worst: worst samples of an earlier collection; their pairs replace new candidates.
        say: prints a line on the candidates, before any labelling.
    """

    folder: Path
    sampling: Sampling
    annotators: Sequence[Annotator]
    people: People | None
    budget: BudgetHparams
    hparams: LabHparams
    score: ScoreFunction | None = None
    worst: WorstSamples | None = None
    say: Callable[[str], None] | None = None

    def run(self, prompts: Sequence[PromptRecord]) -> Collection:
        """Return the preferences, made from these prompts.

        Raises:
            PeopleNeededError: if people have to label first; a later run continues from there.
            AnnotationError: if an annotator fails; a later run continues from there.
            ValueError: if no pair can be made.
        """
        made, num_candidates, dropped = self._pairs(prompts)
        held_out = budget.choose_validation(made[: self.hparams.num_pairs], self.budget)
        pairs, num_near = self._without_duplicates(made, held_out)
        wanted = self.hparams.num_pairs
        if wanted is not None and len(pairs) < wanted and self.worst is None and self.say:
            near = f"{num_near} prompts are nearly a held-out one"
            self.say(f"{len(pairs)} pairs instead of lab.num_pairs={wanted} ({near}): {ADVICE}")
        records.write_records(self.folder / "pairs.jsonl", pairs)
        journal = Journal(self.folder / "labels.jsonl", Label)
        automatic: list[Label] = []
        for annotator in self.annotators:
            if isinstance(annotator, JudgeAnnotator):
                annotator.keep_in(self.folder / "judgements.jsonl")
            automatic += label_pairs(annotator, pairs, journal)
        routing = budget.route(pairs, by_pair(automatic), self.budget, validation=held_out)
        theirs: list[Label] = []
        if self.people is None:
            routing = Routing((*routing.automatic, *routing.people), (), routing.validation)
        else:
            asked = [(pair, self.budget.validation_votes) for pair in routing.validation]
            asked += [(pair, self.budget.people_votes) for pair in routing.people]
            theirs = self.people.labels(asked, self.folder, journal)
        names = frozenset(label.annotator for label in theirs)
        judges = (one for one in self.annotators if isinstance(one, JudgeAnnotator))
        replies = [reply for judge in judges for reply in judge.judgements]
        judged = judge_figures(replies) if replies else None
        charges = judged["cost"] if judged else 0.0
        trained_on, on_validation = (*routing.automatic, *routing.people), theirs or automatic
        return Collection(
            train=tuple(aggregate(trained_on, [*automatic, *theirs], people=names)),
            validation=tuple(aggregate(routing.validation, on_validation, people=names)),
            routing=routing,
            labels=(*automatic, *theirs),
            people=names,
            dropped=dropped,
            num_candidates=num_candidates,
            near_duplicates=num_near,
            before=budget.planned_cost(len(pairs), self.budget),
            after=budget.actual_cost(theirs, self.budget, charges=charges),
            judge=judged,
        )

    def _pairs(self, prompts: Sequence[PromptRecord]) -> tuple[list[Pair], int, dict[str, int]]:
        if self.worst is not None:
            pairs, overrated = self.worst.pairs(seed=self.hparams.seed)
            if not pairs:
                raise ValueError(f"{overrated} responses have no opponent: adversarial=false")
            return pairs, 0, {}
        kept, num_asked, dropped, usable = collect_candidates(
            prompts, self.sampling, self.folder, keep_unfinished=self.hparams.keep_unfinished
        )
        rule = self.hparams
        how: dict[str, Any] = {"method": rule.pairing, "per_prompt": rule.pairs_per_prompt}
        pairs = pairing.make_pairs(kept, seed=rule.seed, score=self.score, **how)
        if not pairs:
            raise ValueError(f"no prompt has two different responses ({usable}): {ADVICE}")
        if self.say is not None:
            self.say(usable)
        return pairs, num_asked, dropped

    def _without_duplicates(self, made: list[Pair], held_out: set[str]) -> tuple[list[Pair], int]:
        """Return the pairs to label, and how many training prompts were nearly a held-out one.

        What is left out is replaced by the next pairs in line, as long as there are any.
        """
        withheld = {pair.prompt_id for pair in made if pair.pair_id in held_out}
        texts: dict[bool, dict[str, str]] = {True: {}, False: {}}
        for pair in made:
            texts[pair.prompt_id in withheld][pair.prompt_id] = records.shown_prompt(pair)
        least, n = self.hparams.near_duplicate, self.hparams.near_duplicate_n
        train, held = (list(texts[is_held].values()) for is_held in (False, True))
        found = pairing.near_duplicates(train, held, threshold=least, n=n)
        names = list(texts[False])
        removed = {names[number] for number, _, _ in found}
        no_training = withheld | removed
        kept = [p for p in made if p.pair_id in held_out or p.prompt_id not in no_training]
        return kept[: self.hparams.num_pairs], len(removed)


@dataclass(frozen=True)
class RejectionSampler:
    """Samples responses, scores them, and keeps the best one of each prompt.

    Args:
        folder: folder of the run.
        sampling: policies and decoding; n is its `per_prompt`.
        score: scores responses; those without a score are dropped.
        keep_unfinished: keep responses that were cut off at the token limit.
        gold: the true reward, where it is known; only reported.
        say: prints one line.

    Source: Dong et al. 2023, "RAFT"; Touvron et al. 2023, "Llama 2", section 3.2.3.
    """

    folder: Path
    sampling: Sampling
    score: pairing.ResponseScores
    keep_unfinished: bool
    gold: Gold | None
    say: Callable[[str], None]

    def run(self, prompts: Sequence[PromptRecord]) -> tuple[list[dict[str, Any]], dict[str, float]]:
        """Return one row of prompt and completion per prompt, and the metrics, as `collect/*`.

        A prompt without a usable response has none.

        Raises:
            ValueError: if no response is left.
        """
        kept, num_asked, dropped, usable = collect_candidates(
            prompts, self.sampling, self.folder, keep_unfinished=self.keep_unfinished
        )
        self.say(usable)
        scores = self.score([records.answered(c, c.response) for c in kept])
        scored = [(c, s) for c, s in zip(kept, scores, strict=True) if s is not None]
        if not scored:
            raise ValueError(f"no response is left: {ADVICE}")
        chosen: dict[str, tuple[Candidate, float]] = {}  # of equal scores the first
        for one in scored:
            name = one[0].prompt_id
            chosen[name] = max(chosen.get(name, one), one, key=lambda each: each[1])
        best = list(chosen.values())
        figures = {
            "collect/num_candidates": num_asked,
            "collect/usable_candidates": len(scored),
            "collect/train_records": len(best),
            "collect/score": fmean(score for _, score in scored),
            "collect/score_best": fmean(score for _, score in best),
        } | {name: dropped.get(reason, 0) for reason, name in METRICS.items()}
        if self.gold is not None:
            figures["collect/gold"] = fmean(self._gold([c for c, _ in scored], self.gold))
            figures["collect/gold_best"] = fmean(self._gold([c for c, _ in best], self.gold))
        return [_row(*one) for one in best], {key: float(value) for key, value in figures.items()}

    def _gold(self, answers: Sequence[Candidate], gold: Gold) -> list[float]:
        prompts, texts = [readable(c.prompt) for c in answers], [c.response for c in answers]
        columns = asked_columns(gold, [c.columns for c in answers])
        return gold(prompts, texts, [c.finished is not False for c in answers], **columns)


def _row(candidate: Candidate, score: float) -> dict[str, Any]:
    prompt = candidate.prompt
    return {
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "completion": records.completion_of(prompt, candidate.response),
        **records.variables_of(candidate),
        "domain": candidate.domain,
        "score": round(score, 6),
        "label": True,  # it is the best one: without this a score would be a rating
        "source": candidate.source,
    }
