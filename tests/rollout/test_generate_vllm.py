"""Servers in processes of their own, of a stand-in for vLLM and, where it is installed, of vLLM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from rlhf_lightning.hparams import LoraHparams
from rlhf_lightning.models.lora import AdaptedBase, AdaptedPolicy, add_policy
from rlhf_lightning.rollout.generators.vllm import VllmGenerator
from rlhf_lightning.rollout.generators.vllm_server import ServerLostError, VllmServerGenerator
from rlhf_lightning.rollout.noise import RowNoise
from tests.builders.models import EOS, PAD, prompt_batch, prompt_rows, tiny_policy

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = {"PYTHONPATH": str(ROOT / "tests/builders/vllm_stand_in"), "OMP_NUM_THREADS": 1}
REAL_PYTHON = Path(os.environ.get("VLLM_PYTHON", ROOT / ".vllm/bin/python"))
REAL = {
    "VLLM_CPU_KVCACHE_SPACE": 1,
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": 1,
}
ROWS = prompt_rows([3, 8, 5, 6, 1])
ENGINES = [
    pytest.param((sys.executable, STAND_IN), id="stand-in"),
    pytest.param(
        (str(REAL_PYTHON), REAL),
        id="vllm",
        marks=[
            pytest.mark.slow,
            pytest.mark.timeout(1200),
            pytest.mark.skipif(not REAL_PYTHON.exists(), reason="no .vllm: run `make vllm-cpu`"),
        ],
    ),
]


@pytest.fixture(autouse=True)
def _logs_of_servers(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def policy(**changes):
    # Heads of 64 and 32: vLLM's kernels know no smaller ones.
    shape = {"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 128}
    return tiny_policy("llama", **{**shape, **changes}).model.eval()


def server(engine, *replicas, **settings):
    python, environment = engine
    own = [{**environment, **replica} for replica in replicas or [{}]]
    settings = {"timeout": 300.0, "logprob_tolerance": 1e-3, **settings}
    return VllmServerGenerator([EOS], PAD, python=python, replicas=own, **settings)


def generated(generator, model, *, temperature=1.0, rows=ROWS, seed=1):
    return generator(
        model,
        prompt_batch(rows),
        noise=RowNoise(seed),
        temperature=temperature,
        max_new_tokens=8,
    )


def change(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)


def own_logprobs(model, generation, row, temperature):
    mask = generation.response_mask[row]
    prompt = ROWS[row]
    tokens = generation.sequences[row, -len(mask) :][mask]
    ids = torch.tensor([[*prompt, *tokens.tolist()]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("tied", [False, True])
def test_servers_sample_from_the_weights_of_now_with_their_logprobs(engine, tied):
    model = policy(tie_word_embeddings=tied)
    generator = server(engine, {}, {})
    first = generated(generator, model)
    assert torch.equal(first.sequences, generated(generator, model).sequences), "seeds are rows'"
    assert not torch.equal(first.sequences, generated(generator, model, seed=2).sequences)
    change(model)
    second = generated(generator, model, temperature=0.7)
    assert not torch.equal(first.sequences, second.sequences)
    assert bool((second.logprobs[~second.response_mask] == 0).all())
    for row in range(len(ROWS)):
        theirs = second.logprobs[row][second.response_mask[row]]
        torch.testing.assert_close(
            theirs, own_logprobs(model, second, row, 0.7), atol=2e-4, rtol=1e-4
        )
    greedy = generated(generator, model, temperature=0.0)
    assert bool((greedy.logprobs == 0).all())
    assert torch.equal(greedy.sequences, generated(generator, model, temperature=0.0).sequences)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_adapter_is_sent_merged_and_a_reference_without_it(engine):
    base = AdaptedBase(policy(), LoraHparams(r=4, alpha=8))
    adapted = add_policy(base, "policy", seed=3)
    with torch.no_grad():
        for parameter in adapted.adapter.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    generator = server(engine)
    texts = []
    for view in (AdaptedPolicy(base, None), adapted):
        with view.generating() as model:
            texts.append(generated(generator, model).sequences)
    assert texts[0].shape != texts[1].shape or not torch.equal(*texts)


@pytest.mark.parametrize("engine", ENGINES)
def test_weights_that_did_not_arrive_end_the_run(engine):
    model = policy()
    generator = server(engine)
    answers = generator.answers(
        model, ROWS, list(range(5)), {"temperature": 1.0, "max_new_tokens": 8, "stop_ids": [EOS]}
    )
    generator.check_logprobs(model, ROWS, answers, temperature=1.0)
    change(model)
    with pytest.raises(RuntimeError, match=r"nats a token on average .* has not arrived"):
        generator.check_logprobs(model, ROWS, answers, temperature=1.0)


def test_a_server_that_keeps_its_weights_is_noticed_whichever_of_several_it_is():
    model = policy()
    generator = server(ENGINES[0].values[0], {}, {"STAND_IN_STALE": 1})
    generated(generator, model)
    change(model)
    with pytest.raises(RuntimeError, match="some weight has not arrived"):
        generated(generator, model)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_killed_server_is_started_again_once_with_the_same_tokens(engine):
    model = policy()
    generator = server(engine)
    first = generated(generator, model)
    os.kill(generator.servers[0].process.pid, signal.SIGKILL)
    with pytest.warns(UserWarning, match="server 0 ended with status -9.*started again, once"):
        again = generated(generator, model)
    assert torch.equal(first.sequences, again.sequences)
    os.kill(generator.servers[0].process.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"status -9.*it had been started again before"):
        generated(generator, model)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_server_that_hangs_is_ended_and_started_again_once(engine):
    model = policy()
    generator = server(engine)
    first = generated(generator, model)
    generator.timeout = 20.0 if engine[1] is REAL else 3.0
    stopped = generator.servers[0].process
    os.kill(stopped.pid, signal.SIGSTOP)
    with pytest.warns(UserWarning, match="server 0 said nothing for .* s: it is started again"):
        again = generated(generator, model)
    assert torch.equal(first.sequences, again.sequences)
    assert stopped.returncode == -signal.SIGKILL


def test_a_stopped_server_does_not_hold_up_a_request_larger_than_a_socket_holds():
    generator = server(ENGINES[0].values[0], timeout=1.0)
    generated(generator, policy())
    os.kill(generator.servers[0].process.pid, signal.SIGSTOP)
    request = {"rows": [[7] * 1000] * 1000, "seeds": [1] * 1000}
    started = time.monotonic()
    with pytest.raises(ServerLostError, match="server 0 takes no requests"):
        generator.servers[0].send("generate", request)
    assert time.monotonic() - started < 10
    generator.servers[0].end()


def test_a_server_that_starts_too_slowly_ends_the_run():
    generator = server(ENGINES[0].values[0], {"STAND_IN_START_SECONDS": 60}, start_timeout=1.0)
    with pytest.raises(RuntimeError, match="said nothing for 1 s, while it was started"):
        generated(generator, policy())


def test_another_release_of_vllm_ends_the_run():
    generator = server(ENGINES[0].values[0], {"STAND_IN_VERSION": "0.29.1"})
    with pytest.raises(RuntimeError, match=r"vLLM 0\.29\.1 is installed, .* made for 0\.32"):
        generated(generator, policy())


def test_an_environment_without_vllm_ends_the_run():
    generator = server((sys.executable, {}))
    with pytest.raises(RuntimeError, match="server 0: ModuleNotFoundError: No module named 'vllm'"):
        generated(generator, policy())
    with pytest.raises(FileNotFoundError, match="`make vllm` or `make vllm-cpu` makes"):
        generated(server(("no/such/python", {})), policy())


def test_in_this_process_vllm_has_to_be_installed():
    with pytest.raises(ImportError, match=r"rollout=vllm needs vLLM .* use rollout=vllm_server"):
        generated(VllmGenerator([EOS], PAD), policy())


def test_in_this_process_the_weights_of_now_are_sampled_from(monkeypatch):
    monkeypatch.syspath_prepend(STAND_IN["PYTHONPATH"])
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    model = policy()
    here = VllmGenerator([EOS], PAD, logprob_tolerance=1e-3)
    elsewhere = server(ENGINES[0].values[0])
    for _ in range(2):
        expected = generated(elsewhere, model).sequences
        assert torch.equal(generated(here, model).sequences, expected)
        change(model)
    sys.modules.pop("vllm")


def test_a_sleeping_engine_is_woken_for_weights_then_for_its_cache(tmp_path):
    calls = tmp_path / "calls"
    options = {"enable_sleep_mode": True, "dtype": "float32"}
    generator = server(ENGINES[0].values[0], {"STAND_IN_CALLS": calls})
    generator.options = options
    for _ in range(2):
        generated(generator, policy())
    assert calls.read_text().splitlines() == [
        *("start True", "generate 5", "sleep 2"),
        *("wake weights", "load", "wake kv_cache", "generate 5", "sleep 2"),
    ]


def test_a_response_that_the_engine_cut_short_ends_the_run(monkeypatch):
    generator = server(ENGINES[0].values[0])
    short = [([5, 6], [-1.0, -1.0])] * len(ROWS)
    monkeypatch.setattr(generator, "answers", lambda *_: short)
    with pytest.raises(RuntimeError, match=r"after 2 of max_new_tokens=8 .*max_model_len"):
        generated(generator, policy())


def test_a_server_ends_when_the_other_side_is_gone():
    generator = server(ENGINES[0].values[0], {}, {})
    generated(generator, policy())
    for one in generator.servers:
        one.connection.close()
        assert one.process.wait(10) == 0


@pytest.mark.slow
def test_no_server_outlives_a_run_that_was_killed(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(
        "from tests.rollout.test_generate_vllm import *\n"
        "generator = server(ENGINES[0].values[0])\n"
        "generated(generator, policy())\n"
        "print(generator.servers[0].process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, script]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=variables, cwd=ROOT) as run:
        number = int(run.stdout.readline())
        run.kill()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{number}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{number}").exists()
    assert not list(Path("/dev/shm").glob("rlhf_vllm_*"))
