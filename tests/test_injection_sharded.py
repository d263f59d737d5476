"""Sharded weights, activations and sequences, and replicated models.

DTensors on a mesh of one; FSDP, DDP and context parallelism between two processes.
"""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from diffusers.models.transformers.transformer_ltx import LTXVideoTransformerBlock
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate, distribute_module, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from adapters import add_lora
from changes import weighted_sum
from checks import relative_distance
from families import FAMILIES
from injected_pairs import assert_alike, pair
from ltx_models import calls_of, either_order, inputs, kernel_calls, run, transformer
from ranks import in_ranks

AFFINE = {"blocks": 3, "norm_elementwise_affine": True}


def run_on_dtensors(model, arguments):
    """Activations are DTensors from the first layer on; tensors made by the model are replicated."""
    with implicit_replication():
        out = run(model, arguments)
        return out.full_tensor() if isinstance(out, DTensor) else out


@either_order
def test_weights_and_activations_are_dtensors(kernel, mesh, device, is_injected_first):
    plain = transformer(device, **AFFINE)
    arguments = inputs(plain)
    expected = run(plain, arguments)
    order = {"is_injected_first": is_injected_first}
    model, _, _ = pair(kernel, device, lambda m: distribute_module(m, mesh), **order, **AFFINE)
    assert isinstance(model.transformer_blocks[0].norm1.weight, DTensor)
    hidden_states = distribute_tensor(arguments["hidden_states"], mesh, [Replicate()])
    arguments["hidden_states"] = hidden_states
    assert relative_distance(run_on_dtensors(model, arguments), expected) < 1e-5
    assert "rms_norm_modulate" not in kernel_calls(run_on_dtensors, model, arguments)


@pytest.mark.parametrize("config", [{}, {"norm_elementwise_affine": True}], ids=["plain", "affine"])
def test_activations_alone_are_dtensors(kernel, mesh, device, config):
    """DTensors that the model's own norm accepts, with or without a weight."""
    model, plain, _ = pair(kernel, device, **config)
    arguments = inputs(plain)
    x, expected = arguments["hidden_states"], run(plain, arguments)
    arguments["hidden_states"] = distribute_tensor(x, mesh, [Replicate()])
    assert relative_distance(run_on_dtensors(model, arguments), expected) < 1e-5
    # Plain tensors are on the kernels again.
    arguments["hidden_states"] = x
    assert kernel_calls(run, model, arguments) == calls_of(2)


@pytest.mark.parametrize("use_local_output", [True, False], ids=["tensors", "dtensors"])
@either_order
def test_tensor_parallel_feed_forward(kernel, mesh, device, use_local_output, is_injected_first):
    """The activation itself gets a tensor or a DTensor."""

    def change(model):
        for block in model.transformer_blocks:
            up = ColwiseParallel(use_local_output=use_local_output)
            plan = {"ff.net.0.proj": up, "ff.net.2": RowwiseParallel()}
            parallelize_module(block, mesh, plan)

    order = {"is_injected_first": is_injected_first}
    model, _, _ = pair(kernel, device, change, **order, **AFFINE)
    assert isinstance(model.transformer_blocks[0].ff.net[2].weight, DTensor)
    assert_alike(model, transformer(device, **AFFINE))


@either_order
def test_fully_sharded_on_one_rank(kernel, mesh, device, is_injected_first):
    """Between a block's turns its parameters are DTensors, and its class is different."""

    def change(model):
        for block in model.transformer_blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)

    order = {"is_injected_first": is_injected_first}
    model, _, _ = pair(kernel, device, change, **order, **AFFINE)
    assert type(model.transformer_blocks[0]) is not LTXVideoTransformerBlock
    assert_alike(model, transformer(device, **AFFINE), times=3)


RANKS = 2


def shard_in_wrappers(**options):
    policy = ModuleWrapPolicy({LTXVideoTransformerBlock})
    options |= {"auto_wrap_policy": policy, "device_id": torch.device("cpu")}
    return functools.partial(FullyShardedDataParallel, **options)


def shard_in_place(model, blocks=None):
    mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
    for block in model.transformer_blocks if blocks is None else blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def check_sharded_weights(kernel, rank):
    """Each process has half of the weights, and a block's complete weights only in its turn."""
    for config in ({}, {"norm_elementwise_affine": True}):
        plain = transformer("cpu", blocks=3, **config)
        arguments = inputs(plain, seed=3)
        expected = run(plain, arguments)
        wrappers = [shard_in_wrappers(use_orig_params=value) for value in (True, False)]
        for shard in (*wrappers, shard_in_place):
            for is_injected_first in (True, False):
                model = copy.deepcopy(plain)
                if is_injected_first:
                    kernel.inject_kernels(model)
                sharded = shard(model)
                if not is_injected_first:
                    kernel.inject_kernels(model)
                for _ in range(2):
                    assert relative_distance(run(sharded, arguments), expected) < 1e-5, config


# Families and forwards entirely on the kernels, except that no block computes for the next one.
SEPARATE_BLOCKS = {
    "flux": {
        "layer_norm_modulate": 7,
        "gated_residual_layer_norm_modulate": 4,
        "gated_residual": 6,
        "qk_norm_rope": 2,
        "qk_norm_rope_out": 4,
        "gelu": 6,
    },
    "wan": {
        "layer_norm_modulate": 2,
        "gated_residual_layer_norm_modulate": 4,
        "gated_residual": 2,
        "qk_norm_rope": 2,
        "rms_norm": 4,
        "gelu": 2,
    },
}


def gradients_of(model, arguments):
    """This rank's parts of all gradients, by name."""
    weighted_sum(model(**arguments, return_dict=False)[0]).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {
        name.removeprefix("module."): g.to_local() if isinstance(g, DTensor) else g
        for name, g in found.items()
    }


def assert_same_gradients(mine, expected):
    assert mine.keys() == expected.keys() and expected
    # Some, such as those of key biases, are zero except for rounding errors.
    rounding = 0.01 * torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    for name, gradient in expected.items():
        assert (mine[name] - gradient).norm() <= 1e-4 * (gradient.norm() + rounding), name


def check_sharded_families(kernel, rank):
    """FSDP2 of other families. A block has hooks, so that its neighbour computes nothing for it."""
    for name, expected_calls in SEPARATE_BLOCKS.items():
        family = FAMILIES[name]
        plain = family.model("cpu")
        arguments = family.inputs("cpu", seed=3)
        expected, gradients = run(plain, arguments), []
        for order in ("plain", "injected_first", "injected_after"):
            model = copy.deepcopy(plain)
            if order == "injected_first":
                kernel.inject_kernels(model)
            shard_in_place(model, family.blocks(model))
            if order == "injected_after":
                kernel.inject_kernels(model)
            calls = {} if order == "plain" else expected_calls
            for _ in range(2):
                assert relative_distance(run(model, arguments), expected) < 1e-5, (name, order)
            assert kernel_calls(run, model, arguments) == calls, (name, order)
            gradients.append(gradients_of(model, arguments))
            assert_same_gradients(gradients[-1], gradients[0])


def check_replicated_models(kernel, rank):
    """Training of a LoRA by DDP: each process has inputs of its own, and the mean of the gradients."""
    for name in ("ltx", "flux", "wan"):
        family = FAMILIES[name]
        plain = family.model("cpu").requires_grad_(False)
        arguments, gradients = family.inputs("cpu", seed=rank), []
        for order in ("plain", "injected_first", "injected_with_lora", "injected_after"):
            model = copy.deepcopy(plain)
            if order == "injected_first":
                kernel.inject_kernels(model)
            add_lora(family, model)
            model.train()
            if order == "injected_with_lora":
                kernel.inject_kernels(model)
            replica = DistributedDataParallel(model)
            if order == "injected_after":
                kernel.inject_kernels(model)
            calls = kernel_calls(lambda: gradients.append(gradients_of(replica, arguments)))  # noqa: B023
            assert bool(calls.get("qk_norm_rope")) == (order != "plain"), (name, order)
            assert_same_gradients(gradients[-1], gradients[0])
        # All processes have the same.
        values = torch.cat([gradient.flatten() for gradient in gradients[-1].values()])
        others = values.clone()
        dist.broadcast(others, src=0)
        assert torch.equal(values, others)


@pytest.mark.drawn(times=0, period=3)
@pytest.mark.parametrize(
    "check", [check_sharded_weights, check_sharded_families, check_replicated_models]
)
@in_ranks
def test_two_processes(kernel, rank, check):
    check(kernel, rank)
