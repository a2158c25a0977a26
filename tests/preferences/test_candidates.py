"""Candidates of a tiny policy: provenance, resuming, and what is dropped."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_lightning.data.demo.source import DemoSource
from rlhf_lightning.data.records import PromptRecord
from rlhf_lightning.models.factory import frozen, load_policy
from rlhf_lightning.preferences.candidates import (
    DUPLICATE,
    EMPTY,
    UNFINISHED,
    Decoding,
    LoadedPolicy,
    Sampling,
    sample_candidates,
    units,
    usable,
)
from rlhf_lightning.preferences.records import Candidate, Journal
from rlhf_lightning.text.tokenizers import load_tokenizer
from tests.builders.models import tiny_policy
from tests.builders.tokenizers import build_tokenizer

PROMPTS = DemoSource(seed=1).records("prompts", "train")[:10]


@pytest.fixture(scope="module")
def policy(start: Path) -> LoadedPolicy:
    tokenizer = load_tokenizer(start)
    return LoadedPolicy(frozen(load_policy(start)), tokenizer, [tokenizer.eos_token_id])


@pytest.fixture
def sampling(policy: LoadedPolicy) -> Sampling:
    return Sampling(
        policies={"sft": lambda: policy, "base": lambda: policy},
        decodings=[Decoding(temperature=0.7, top_p=0.9), Decoding(temperature=1.2)],
        num_samples=2,
        max_new_tokens=6,
        max_prompt_length=64,
        batch_size=4,
        seed=1,
    )


def test_every_answer_keeps_where_it_comes_from(sampling: Sampling, tmp_path: Path) -> None:
    found = sample_candidates(PROMPTS, sampling, Journal(tmp_path / "c.jsonl", dict))
    assert sampling.per_prompt == 8
    assert len(found) == 80
    assert set(Counter((c.prompt, c.source) for c in found).values()) == {2}
    assert {c.source for c in found} == {
        f"{model} temperature={t} top_p={p} seed=1"
        for model in ("sft", "base")
        for t, p in (("0.7", "0.9"), ("1.2", "1"))
    }
    by_prompt = {prompt.prompt: prompt.domain for prompt in PROMPTS}
    assert all(c.domain == by_prompt[c.prompt] for c in found)
    # Samples are draws of their own.
    assert len({(c.prompt, c.response) for c in found}) > 60
    assert {c.finished for c in found} <= {True, False}


def test_an_answer_keeps_the_variables_of_its_prompts_template(
    sampling: Sampling, policy: LoadedPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{{ tools }}{{ a }}{% for m in messages %}{{ m.content }}{% endfor %}"
    monkeypatch.setattr(policy.tokenizer, "chat_template", template)
    variables = {"tools": [{"name": "f"}], "a": "b"}
    columns = {"function_list": [{"name": "f"}]}
    asked = PromptRecord(({"role": "user", "content": "q"},), columns=columns, variables=variables)
    found = sample_candidates([asked], sampling, Journal(tmp_path / "c.jsonl", dict))
    tools = '[{"name": "f"}]'
    own = {"tools": tools, "chat_template_kwargs": '{"a": "b"}', "function_list": tools}
    assert [candidate.columns for candidate in found] == [own] * sampling.per_prompt
    other = replace(asked, variables={**variables, "tools": [{"name": "g"}]})
    both = sample_candidates([asked, other], sampling, Journal(tmp_path / "d.jsonl", dict))
    assert len({candidate.prompt_id for candidate in both}) == 2
    with pytest.raises(ValueError, match="of other prompts or settings"):
        sample_candidates([other], sampling, Journal(tmp_path / "c.jsonl", dict))


def test_stopped_anywhere_it_goes_on_to_the_same_answers(
    sampling: Sampling, policy: LoadedPolicy, tmp_path: Path
) -> None:
    whole = sample_candidates(PROMPTS, sampling, Journal(tmp_path / "whole.jsonl", dict))
    lines = (tmp_path / "whole.jsonl").read_bytes().splitlines(keepends=True)
    assert len(lines) == len(units(sampling, len(PROMPTS))) == 12
    path = tmp_path / "part.jsonl"
    path.write_bytes(b"".join(lines[:5]) + lines[5][:40])  # cut short by a kill
    loaded: list[str] = []

    def load(name: str) -> LoadedPolicy:
        loaded.append(name)
        return policy

    again = replace(sampling, policies={n: lambda n=n: load(n) for n in sampling.policies})
    assert sample_candidates(PROMPTS, again, Journal(path, dict)) == whole
    assert sorted(path.read_bytes().splitlines()) == sorted(b"".join(lines).splitlines())
    assert loaded == ["sft", "base"]
    # All is done: nothing is loaded.
    assert sample_candidates(PROMPTS, again, Journal(path, dict)) == whole
    assert loaded == ["sft", "base"]


def test_empty_cut_off_and_repeated_answers_are_dropped_and_counted() -> None:
    def made(prompt, response, *, finished=True, model="sft"):
        return Candidate.make(prompt, response, model=model, settings={}, seed=0, finished=finished)

    candidates = [
        made("q", "  \n"),
        made("q", "Yes."),
        made("q", " yes. ", model="base"),
        made("q", "no", finished=False),
        made("r", "yes."),
        made("r", "?", finished=None),
    ]
    kept, dropped = usable(candidates)
    assert [(c.prompt, c.response, c.model) for c in kept] == [
        ("q", "Yes.", "sft"),
        ("r", "yes.", "sft"),
        ("r", "?", "sft"),
    ]
    assert dropped == {EMPTY: 1, DUPLICATE: 1, UNFINISHED: 1}
    assert len(usable(candidates, keep_unfinished=True)[0]) == 4


def test_a_prompt_without_room_for_a_response_in_the_context_is_left_out(
    sampling: Sampling, policy: LoadedPolicy, tmp_path: Path
) -> None:
    prompts = [PromptRecord("why? " * 2), PromptRecord("why? " * 12)]
    room = len(policy.tokenizer("why? " * 2)["input_ids"]) + sampling.max_new_tokens
    short = replace(policy, model=tiny_policy(max_position_embeddings=room, vocab_size=300))
    narrow = replace(sampling, policies={"sft": lambda: short})
    found = sample_candidates(prompts, narrow, Journal(tmp_path / "c.jsonl", dict))
    assert {candidate.prompt for candidate in found} == {prompts[0].prompt}


def test_a_rendered_prompt_is_refused_where_its_pairs_would_lose_that(
    sampling: Sampling, policy: LoadedPolicy, tmp_path: Path
) -> None:
    prompt = PROMPTS[0].prompt
    assert isinstance(prompt, str)
    marked = PromptRecord(f"{prompt} {policy.tokenizer.eos_token}", rendered=True)
    journal = Journal(tmp_path / "c.jsonl", dict)
    with pytest.raises(ValueError, match="prompt 1 is rendered and spells special tokens"):
        sample_candidates([marked], sampling, journal)
    assert sample_candidates([replace(PROMPTS[0], rendered=True)], sampling, journal)


@pytest.mark.parametrize(
    ("token", "written"), [("<think>", "<think>" * 2), ("<|im_start|>", "< |im_start|>" * 2)]
)
def test_a_space_breaks_special_tokens_but_the_marks_of_thoughts(
    sampling: Sampling, tmp_path: Path, token: str, written: str
) -> None:
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>"]})
    model = frozen(tiny_policy("llama", vocab_size=len(tokenizer)))
    for name, weight in model.named_parameters():  # says the token all the time
        weight.fill_(float("norm" in name or "embed" in name))
    model.model.get_output_embeddings().weight[tokenizer.convert_tokens_to_ids(token)] = 1.0
    policy = LoadedPolicy(model, tokenizer, [tokenizer.eos_token_id])
    says = replace(sampling, policies={"sft": lambda: policy}, max_new_tokens=2)
    found = sample_candidates([PromptRecord("why?")], says, Journal(tmp_path / "c.jsonl", dict))
    assert {candidate.response for candidate in found} == {written}
