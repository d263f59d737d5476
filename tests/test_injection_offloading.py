"""Offloading and context parallelism, before and after an injection: what stays on the kernels."""

import accelerate
import pytest
import torch
from accelerate.hooks import remove_hook_from_module
from diffusers.hooks import apply_group_offloading, context_parallel
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig

from injected_pairs import reasons_of
from ltx_models import (
    calls_of,
    computing,
    either_order,
    prepared,
    snapshot,
)

pytestmark = pytest.mark.usefixtures("_one_thread")


# ------------------------------------------------------------------------------------------------
# Offloading, by how it is begun: a model, its device; the result takes it back


def offload_sequentially(model, device):
    """Weights are on the meta device but for the moment in which their own module is called."""
    accelerate.cpu_offload(model, execution_device=torch.device(device))
    assert model.transformer_blocks[0].attn1.norm_q.weight.is_meta
    return lambda: remove_hook_from_module(model, recurse=True)


def offload_the_whole_model(model, device):
    """As enable_model_cpu_offload does it: one hook, around the model's own forward."""
    _, hook = accelerate.cpu_offload_with_hook(model, execution_device=torch.device(device))
    return hook.remove


def offload_groups(offload_type):
    def offload(model, device):
        apply_group_offloading(
            model,
            onload_device=torch.device(device),
            offload_device=torch.device("cpu"),
            offload_type=offload_type,
            num_blocks_per_group=1 if offload_type == "block_level" else None,
        )

    offload.__name__ = offload_type
    return offload


NORMS_WITH_WEIGHTS = {"norm_elementwise_affine": True}
# With the options of a model, and the operator calls. Norms with weights are leaves: their own code runs. The
# next block's weights are elsewhere until its turn.
OFFLOADING = [
    (offload_sequentially, {}, calls_of(2, joined=0, rms_norm=0)),
    (
        offload_sequentially,
        NORMS_WITH_WEIGHTS,
        {"gelu": 2, "qk_norm_coordinate_rope": 2, "gated_residual": 6},
    ),
    (offload_the_whole_model, {}, calls_of(2)),
    (offload_groups("block_level"), {}, calls_of(2, joined=0)),
    (offload_groups("leaf_level"), {}, calls_of(2, joined=0, rms_norm=0)),
]


@pytest.mark.parametrize(
    ("offload", "config", "calls"),
    OFFLOADING,
    ids=["sequential", "sequential_with_norms", "whole_model", "block_level", "leaf_level"],
)
@either_order
def test_offloading(kernel, device, offload, config, calls, is_injected_first):
    model, arguments, expected = prepared(device, model_config=config)
    before = snapshot(model)
    if is_injected_first:
        kernel.inject_kernels(model)
    take_back = offload(model, device)
    kernel.inject_kernels(model)
    assert computing(expected, model, arguments) == calls
    if is_injected_first:
        kernel.eject_kernels(model)
        assert computing(expected, model, arguments) == {}
    if take_back is not None:
        take_back()
        model.to(device)
        if not is_injected_first:
            assert computing(expected, model, arguments) == calls_of(2)
            kernel.eject_kernels(model)
        assert computing(expected, model, arguments) == {}
        assert snapshot(model) == before


# ------------------------------------------------------------------------------------------------
# Context parallelism


def test_context_parallelism_is_declined(kernel, device):
    model, arguments, expected = prepared(device)
    model._parallel_config = ParallelConfig(
        context_parallel_config=ContextParallelConfig(ulysses_degree=2)
    )
    before = snapshot(model)
    report = kernel.inject_kernels(model)
    assert report.num_replaced == 0
    (entry,) = report.left_alone
    assert (entry.name, entry.module) == ("", "LTXVideoTransformer3DModel")
    assert "parallelism is on" in entry.reason
    assert reasons_of(report)[""] in str(report)
    assert snapshot(model) == before
    assert computing(expected, model, arguments) == {}


def test_context_parallelism_after_the_injection(kernel, device, monkeypatch):
    """Its hooks find the tables that they shard, and processors that take its settings."""
    model, arguments, expected = prepared(device)
    names = ("num_frames", "height", "width", "rope_interpolation_scale")
    with torch.no_grad():
        tables = model.rope(arguments["hidden_states"], *(arguments[name] for name in names))
    kernel.inject_kernels(model)
    sharded = []

    def shard(tensor, dim, mesh):
        sharded.append(tensor)
        assert dim == 1
        return tensor

    sharder = context_parallel.EquipartitionSharder
    monkeypatch.setattr(sharder, "shard", shard)
    monkeypatch.setattr(sharder, "unshard", lambda tensor, dim, mesh: tensor)
    config = ContextParallelConfig(ulysses_degree=2)
    context_parallel.apply_context_parallel(model, config, model._cp_plan)
    with_tables = calls_of(2, qk_norm_coordinate_rope=0, qk_norm_rope=1)
    assert computing(expected, model, arguments) == with_tables
    rotary = [tensor for tensor in sharded if tensor.shape == tables[0].shape]
    assert len(rotary) == 2
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(rotary, tables, strict=True))
    context_parallel.remove_context_parallel(model, model._cp_plan)
    assert computing(expected, model, arguments) == calls_of(2)
