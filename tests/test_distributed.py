from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from rlhf_lightning.distributed import collectives as distributed
from rlhf_lightning.distributed.collectives import (
    agreed_max,
    average_gradients,
    global_moments,
    global_sum,
    rank,
    world_size,
)
from rlhf_lightning.distributed.process import prepare_process
from rlhf_lightning.functional.masked import masked_mean, masked_var, masked_whiten
from tests.builders.ranks import SimulatedRanks

CPU = torch.device("cpu")


def test_one_process_is_a_world_of_its_own():
    assert (world_size(), rank()) == (1, 0)
    x = torch.tensor([1.0, 2.0])
    total = global_sum(x)
    assert torch.equal(total, x)
    assert total.data_ptr() != x.data_ptr(), "a reduction in place must not reach the caller"
    assert agreed_max(3, CPU) == 3


def test_sums_and_maxima_are_over_all_ranks_and_leave_their_input_alone(monkeypatch):
    ranks = SimulatedRanks(monkeypatch, 3)

    def function(number: int) -> tuple[float, int, int, int]:
        x = torch.tensor(10.0**number, requires_grad=True)
        total = global_sum(x)
        assert not total.requires_grad
        assert x.item() == 10.0**number
        return total.item(), agreed_max(number * 2, CPU), world_size(), rank()

    assert ranks.run(function) == [(111.0, 4, 3, i) for i in range(3)]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_moments_are_those_of_the_whole_batch_for_any_number_of_ranks(monkeypatch, size):
    x = torch.randn(8, 5) + 100
    mask = torch.rand(8, 5) > 0.3
    mask[0:2] = False  # with four ranks the first has no token at all
    x[~mask] = torch.nan
    ranks = SimulatedRanks(monkeypatch, size)
    shares = list(zip(x.chunk(size), mask.chunk(size), strict=True))
    whitened = []
    for mean, var in ranks.run(lambda i: global_moments(*shares[i])):
        torch.testing.assert_close(mean, masked_mean(x, mask), rtol=1e-6, atol=0)
        torch.testing.assert_close(var, masked_var(x, mask), rtol=1e-5, atol=0)
    for (mean, var), share in zip(
        ranks.run(lambda i: global_moments(*shares[i])), shares, strict=True
    ):
        whitened.append(masked_whiten(*share, mean=mean, var=var))
    torch.testing.assert_close(torch.cat(whitened), masked_whiten(x, mask), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bucket", [1, 7, 10_000])
def test_gradients_are_averaged_over_ranks_under_ddp_alone(monkeypatch, bucket):
    monkeypatch.setattr(distributed, "BUCKET_ELEMENTS", bucket)
    ranks, ddp = SimulatedRanks(monkeypatch, 2), SimpleNamespace(block_backward_sync=nullcontext)

    def gradients(number: int, strategy: object) -> list[Tensor]:
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 4), nn.Linear(4, 1))
        for parameter in (*model[0].parameters(), *model[2].parameters()):
            parameter.grad = torch.full_like(parameter, float(number))
        average_gradients(model.parameters(), strategy)
        assert all(p.grad is None for p in model[1].parameters())
        return [p.grad for p in (*model[0].parameters(), *model[2].parameters())]

    for averaged in ranks.run(lambda number: gradients(number, ddp)):
        assert all((gradient == 0.5).all() for gradient in averaged)
    own = ranks.run(lambda number: gradients(number, object()))
    assert all((gradient == 1).all() for gradient in own[1])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="expandable segments need Linux")
@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_cudas_memory_grows_in_segments_unless_the_user_has_said_otherwise(monkeypatch, name):
    monkeypatch.setattr(os, "environ", {})
    prepare_process()
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.setattr(os, "environ", {name: "max_split_size_mb:64"})
    prepare_process()
    assert os.environ[name] == "max_split_size_mb:64"
    assert len({"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ)) == 1


def test_every_command_that_computes_prepares_its_process_before_torch_is_loaded():
    code = (
        "import sys, os, types\n"
        "import rlhf_lightning.app.start as start\n"
        "entry = types.SimpleNamespace(main=lambda: None)\n"
        "start.importlib = types.SimpleNamespace(import_module=lambda name: entry)\n"
        "for words in ('train +experiment=ppo', 'evaluate', 'collect'):\n"
        "    os.environ.pop('PYTORCH_ALLOC_CONF', None)\n"
        "    sys.argv = words.split()\n"
        "    start.start(sys.argv[0])\n"
        "    assert 'torch' not in sys.modules\n"
        "    assert sys.platform != 'linux' or 'expandable' in os.environ['PYTORCH_ALLOC_CONF']\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
