"""Context parallelism between two processes, switched on after an injection."""

import os

import pytest
import torch
import torch.distributed as dist
from diffusers.hooks.context_parallel import apply_context_parallel
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
from kernels import get_kernel

from ltx_models import calls_of, computing, prepared

RANKS = 2
# The text is sharded too. Context parallelism takes no mask.
EVEN_LENGTH = 6


def enable_parallelism(model, rank):
    """What the model's method of this name does, which finds a device for each rank by itself."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("ring", "ulysses"))
    config = ParallelConfig(
        context_parallel_config=ContextParallelConfig(ulysses_degree=RANKS, mesh=mesh)
    )
    config.setup(rank, RANKS, torch.device("cpu"), mesh=mesh)
    model._parallel_config = config
    for block in model.transformer_blocks:
        for attention in (block.attn1, block.attn2):
            attention.processor._parallel_config = config
    apply_context_parallel(model, config.context_parallel_config, model._cp_plan)


def run_rank(rank, repo_id, rendezvous):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    kernel = get_kernel(repo_id, version=1, trust_remote_code=True)
    torch.manual_seed(3)
    model, arguments, expected = prepared("cpu", mask=None, text_length=EVEN_LENGTH)
    kernel.inject_kernels(model)
    assert computing(expected, model, arguments) == calls_of(2)
    enable_parallelism(model, rank)
    with_tables = calls_of(2, qk_norm_coordinate_rope=0, qk_norm_rope=1)
    assert computing(expected, model, arguments) == with_tables
    kernel.eject_kernels(model)
    assert computing(expected, model, arguments) == {}
    assert "parallelism is on" in str(kernel.inject_kernels(model))
    assert computing(expected, model, arguments) == {}
    dist.destroy_process_group()


@pytest.mark.slow
def test_sharded_sequence(kernel, device, tmp_path):
    """Each process computes the whole output from its part of the sequence."""
    if device != "cpu":
        pytest.skip("the ranks would need a GPU each")
    from conftest import REPO_ID

    torch.multiprocessing.spawn(
        run_rank, args=(REPO_ID, tmp_path / "rendezvous"), nprocs=RANKS, join=True
    )
