"""A reward model of another maker: placed, sharded, under every precision, on ranks."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from transformers import AutoTokenizer

from rlhf_lightning.distributed.collectives import SHARD, mesh_in_groups, shard
from rlhf_lightning.models.export import export_scalar_model
from rlhf_lightning.models.factory import load_policy
from rlhf_lightning.models.heads import ScalarHeadModel, scalar_head
from rlhf_lightning.rollout.generators.base import as_generation
from rlhf_lightning.rollout.scorers.base import Responses, RewardModelScorer
from tests.builders.models import config_fields, prompt_batch
from tests.builders.ranks import SimulatedRanks
from tests.rollout.reward_models import (
    built,
    byte_tokenizer,
    close,
    plain_model,
    save_reward_model,
    text_answers,
)

PROMPTS = ["why? " * 5, "tell me more", "w"]
COMPLETIONS = ["because", "no", "it is what it is and it will be"]


def answers() -> Responses:
    return text_answers(PROMPTS, COMPLETIONS)


def test_the_model_is_loaded_once_frozen_and_given_to_be_placed(tmp_path):
    scorer = built(save_reward_model(tmp_path, "bert"))
    (model,) = scorer.build()
    assert scorer.build(base=object()) == [model]
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    first, second = scorer(answers()).total, scorer(answers()).total
    assert torch.equal(first, second), "dropout must be off"


@pytest.mark.parametrize("model_type", ["llama", "bert"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores_are_fp32_numbers_under_bf16(model_type, dtype, tmp_path):
    folder = save_reward_model(tmp_path, model_type)
    exact = built(folder)(answers()).total
    scorer = built(folder, dtype=dtype)
    wanted = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    assert {p.dtype for p in scorer.model.model.base_model.parameters()} == {wanted}
    outside = scorer(answers()).total
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = scorer(answers()).total
    for scores in (inside, outside):
        assert scores.dtype == torch.float32
        torch.testing.assert_close(scores, exact, rtol=0.1, atol=0.1)
    assert not torch.equal(inside, inside.bfloat16().float()), "the head is not rounded to bf16"
    assert not torch.equal(inside, exact), "the model must compute in bf16"


@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "20KB"}])
@pytest.mark.parametrize("model_type", ["llama", "roberta"])
def test_auto_does_not_round_a_head_in_fp32_of_a_checkpoint_in_bf16(model_type, shards, tmp_path):
    folder = save_reward_model(tmp_path / "fp32", model_type)
    model = plain_model(folder)
    head = model.score if model_type == "llama" else model.classifier.out_proj
    stored = head.weight.detach().clone()
    assert not torch.equal(stored, stored.bfloat16().float())
    model.bfloat16()
    head.float().weight.data.copy_(stored)
    saved = tmp_path / "mixed"
    model.save_pretrained(saved, **shards)
    AutoTokenizer.from_pretrained(folder).save_pretrained(saved)
    kept = built(saved, dtype="auto").model.model
    read = dict(kept.named_parameters())
    assert {value.dtype for value in read.values()} == {torch.float32, torch.bfloat16}
    own = [name for name, value in read.items() if value.dtype == torch.float32]
    assert {name.rpartition(".")[0] for name in own} == {
        "score" if model_type == "llama" else "classifier.out_proj"
    }
    assert torch.equal(read[own[0]], stored)


def test_a_reward_model_of_ours_says_of_text_what_it_says_of_tokens(tmp_path):
    tokenizer = byte_tokenizer(bos=False, pad="<pad>")
    vocabulary = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    policy = load_policy(from_scratch=config_fields("llama", **vocabulary))
    with torch.random.fork_rng():
        torch.manual_seed(5)
        head = scalar_head(32, init_std=0.3)
    head.bias.data.fill_(0.75)
    model = ScalarHeadModel(policy.model.base_model, head)
    pad = int(tokenizer.pad_token_id)
    export_scalar_model(model, tmp_path, model.state_dict(), pad_token_id=pad)
    tokenizer.save_pretrained(tmp_path)

    prompts = [tokenizer(p)["input_ids"] for p in ("why? ", "and so on and so on: ")]
    batch = prompt_batch(prompts, pad=pad)
    columns = {"prompt": tuple(tokenizer.batch_decode(prompts))}
    batch = type(batch)(**(vars(batch) | {"columns": columns}))
    eos = tokenizer.eos_token_id
    bodies = [[*tokenizer("no")["input_ids"], eos, pad], tokenizer("yeah")["input_ids"]]
    generation = as_generation(batch.input_ids, torch.tensor(bodies), [eos], pad)
    given = Responses.of(batch, generation, tokenizer)
    assert given.finished.tolist() == [True, False]

    packed = RewardModelScorer(lambda: model, policy=tmp_path, source=str(tmp_path) + "/.")
    packed.build()
    close(built(tmp_path)(given).total, packed(given).total)


def test_ranks_that_share_the_model_run_it_equally_often(tmp_path, monkeypatch):
    ranks = SimulatedRanks(monkeypatch, 2)
    folder = save_reward_model(tmp_path, "gpt2")
    scorers = [built(folder, micro_batch_size=1) for _ in range(2)]
    calls = [0, 0]

    def one(rank: int) -> torch.Tensor:
        scorer = scorers[rank]

        def count(*_: object) -> None:
            calls[rank] += 1

        scorer.model.register_forward_hook(count)
        rows = slice(0, 1) if rank == 0 else slice(1, 3)
        return scorer(text_answers(PROMPTS[rows], COMPLETIONS[rows])).total

    got = torch.cat(ranks.run(one))
    assert calls == [2, 2]
    close(got, built(folder)(answers()).total)


@pytest.fixture
def one_rank():
    """A process group of this process alone, so that FSDP2 is the real one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield SimpleNamespace(mesh_of_shards=mesh_in_groups("cpu", 1, 1)[SHARD])
    dist.destroy_process_group()


@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "deberta-v2"])
def test_a_sharded_model_scores_like_a_whole_one(model_type, compute_dtype, tmp_path, one_rank):
    whole = built(save_reward_model(tmp_path, model_type))
    expected = whole(answers()).total
    sharded = copy.copy(whole)
    sharded.model = copy.deepcopy(whole.model)
    shard(sharded.model, one_rank, frozen=True, compute_dtype=compute_dtype)
    assert type(sharded.model).__name__.startswith("FSDP")
    got = sharded(answers()).total
    assert got.dtype == torch.float32
    tolerance = 1e-5 if compute_dtype is None else 0.1
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
