"""Sharded weights and activations: FSDP between two processes, DTensors on a mesh of one."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from diffusers.models.transformers.transformer_ltx import LTXVideoTransformerBlock
from kernels import get_kernel
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate, distribute_module, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from injected_pairs import assert_alike, distance, pair
from ltx_models import calls_of, either_order, inputs, kernel_calls, run, transformer

AFFINE = {"blocks": 3, "norm_elementwise_affine": True}


# ------------------------------------------------------------------------------------------------
# DTensors, in this process alone


def full(out):
    return out.full_tensor() if isinstance(out, DTensor) else out


def run_on_dtensors(model, arguments):
    """Activations are DTensors from the first layer on; what the model makes itself is replicated."""
    with implicit_replication():
        return full(run(model, arguments))


@either_order
def test_weights_and_activations_are_dtensors(kernel, mesh, device, is_injected_first):
    def change(model):
        distribute_module(model, mesh)
        arguments["hidden_states"] = distribute_tensor(hidden_states, mesh, [Replicate()])

    arguments = inputs(transformer(device, **AFFINE))
    hidden_states = arguments["hidden_states"]
    expected = run(transformer(device, **AFFINE), arguments)
    model, plain, _ = pair(kernel, device, change, is_injected_first=is_injected_first, **AFFINE)
    assert isinstance(model.transformer_blocks[0].norm1.weight, DTensor)
    assert distance(run_on_dtensors(plain, arguments), expected) < 1e-5
    assert distance(run_on_dtensors(model, arguments), expected) < 1e-5
    assert "rms_norm_modulate" not in kernel_calls(run_on_dtensors, model, arguments)


@pytest.mark.parametrize("config", [{}, {"norm_elementwise_affine": True}], ids=["plain", "affine"])
def test_activations_alone_are_dtensors(kernel, mesh, device, config):
    """As the model's own norm takes them, with or without a weight."""
    model, plain, _ = pair(kernel, device, **config)
    arguments = inputs(plain)
    x = arguments["hidden_states"]
    expected = run(plain, arguments)
    arguments["hidden_states"] = distribute_tensor(x, mesh, [Replicate()])
    assert distance(run_on_dtensors(plain, arguments), expected) < 1e-5
    assert distance(run_on_dtensors(model, arguments), expected) < 1e-5
    # Plain tensors are on the kernels again.
    arguments["hidden_states"] = x
    assert kernel_calls(run, model, arguments) == calls_of(2)


@either_order
def test_tensor_parallel_feed_forward(kernel, mesh, device, is_injected_first):
    plan = {"ff.net.0.proj": ColwiseParallel(), "ff.net.2": RowwiseParallel()}

    def change(model):
        for block in model.transformer_blocks:
            parallelize_module(block, mesh, plan)

    model, plain, _ = pair(kernel, device, change, is_injected_first=is_injected_first, **AFFINE)
    assert isinstance(model.transformer_blocks[0].ff.net[2].weight, DTensor)
    assert_alike(model, plain)


@either_order
def test_tensor_parallel_feed_forward_with_dtensors_between(
    kernel, mesh, device, is_injected_first
):
    """The activation itself is given a DTensor."""
    plan = {
        "ff.net.0.proj": ColwiseParallel(use_local_output=False),
        "ff.net.2": RowwiseParallel(),
    }

    def change(model):
        for block in model.transformer_blocks:
            parallelize_module(block, mesh, plan)

    model, plain, _ = pair(kernel, device, change, is_injected_first=is_injected_first, **AFFINE)
    assert_alike(model, plain)


@either_order
def test_fully_sharded_on_one_rank(kernel, mesh, device, is_injected_first):
    """Between a block's turns its parameters are DTensors, and its class is another."""

    def change(model):
        for block in model.transformer_blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)

    model, _, _ = pair(kernel, device, change, is_injected_first=is_injected_first, **AFFINE)
    assert type(model.transformer_blocks[0]) is not LTXVideoTransformerBlock
    assert_alike(model, transformer(device, **AFFINE), times=3)


# ------------------------------------------------------------------------------------------------
# Two processes

RANKS = 2


def shard_in_wrappers(model, uses_original_parameters):
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({LTXVideoTransformerBlock}),
        use_orig_params=uses_original_parameters,
        device_id=torch.device("cpu"),
    )


def shard_in_place(model, _):
    mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
    for block in model.transformer_blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def run_rank(rank, repo_id, rendezvous):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    kernel = get_kernel(repo_id, version=1, trust_remote_code=True)
    for config in ({}, {"norm_elementwise_affine": True}):
        torch.manual_seed(3)
        plain = transformer("cpu", blocks=3, **config)
        arguments = inputs(plain)
        expected = run(plain, arguments)
        for shard, uses_original_parameters in (
            (shard_in_wrappers, True),
            (shard_in_wrappers, False),
            (shard_in_place, None),
        ):
            for order in ("plain", "injected_first", "injected_after"):
                model = transformer("cpu", blocks=3, **config)
                if order == "injected_first":
                    kernel.inject_kernels(model)
                sharded = shard(model, uses_original_parameters)
                if order == "injected_after":
                    kernel.inject_kernels(model)
                case = (config, shard.__name__, uses_original_parameters, order)
                for _ in range(2):
                    assert distance(run(sharded, arguments), expected) < 1e-5, case
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_sharded_weights(kernel, device, tmp_path):
    """Each process has half of the weights, and all of a block's in its turn alone."""
    if device != "cpu":
        pytest.skip("the ranks would need a GPU each")
    from conftest import REPO_ID

    context = torch.multiprocessing.spawn(
        run_rank, args=(REPO_ID, tmp_path / "rendezvous"), nprocs=RANKS, join=False
    )
    deadline = time.monotonic() + 240
    while not context.join(timeout=5):
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            pytest.fail("the ranks wait for each other")
