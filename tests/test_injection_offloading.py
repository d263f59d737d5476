"""Offloading, caching, context parallelism, attention backends: before and after an injection."""

import itertools
import weakref

import accelerate
import pytest
import torch
from accelerate.hooks import remove_hook_from_module
from diffusers import FirstBlockCacheConfig, PyramidAttentionBroadcastConfig, TaylorSeerCacheConfig
from diffusers.hooks import apply_group_offloading, context_parallel
from diffusers.models import attention_dispatch
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig

from ltx_models import (
    TEXT_LENGTH,
    calls_of,
    computing,
    either_order,
    inputs,
    kernel_calls,
    prepared,
    run,
    snapshot,
    transformer,
)

pytestmark = pytest.mark.usefixtures("_one_thread")


# ------------------------------------------------------------------------------------------------
# Offloading


@either_order
@pytest.mark.parametrize("is_ejected_first", [True, False], ids=["ejected_first", "ejected_after"])
def test_sequential_offloading(kernel, device, is_injected_first, is_ejected_first):
    """Weights are on the meta device but for the moment in which their own module is called."""
    model, arguments, expected = prepared(device)
    before = snapshot(model)
    if is_injected_first:
        kernel.inject_kernels(model)
    accelerate.cpu_offload(model, execution_device=torch.device(device))
    assert model.transformer_blocks[0].attn1.norm_q.weight.is_meta
    kernel.inject_kernels(model)
    # The norms of query and key have weights and are called. Those of the blocks have none.
    assert computing(expected, model, arguments) == calls_of(2, joined=0, rms_norm=0)
    if is_ejected_first:
        kernel.eject_kernels(model)
        assert computing(expected, model, arguments) == {}
    remove_hook_from_module(model, recurse=True)
    model.to(device)
    if not is_ejected_first:
        assert computing(expected, model, arguments) == calls_of(2)
        kernel.eject_kernels(model)
    assert computing(expected, model, arguments) == {}
    assert snapshot(model) == before


@either_order
def test_offloading_of_the_whole_model(kernel, device, is_injected_first):
    """As enable_model_cpu_offload does it: one hook, around the model's own forward."""
    model, arguments, expected = prepared(device)
    before = snapshot(model)
    if is_injected_first:
        kernel.inject_kernels(model)
    _, hook = accelerate.cpu_offload_with_hook(model, execution_device=torch.device(device))
    kernel.inject_kernels(model)
    assert computing(expected, model, arguments) == calls_of(2)
    hook.offload()
    assert computing(expected, model, arguments) == calls_of(2)
    kernel.eject_kernels(model)
    assert computing(expected, model, arguments) == {}
    hook.remove()
    model.to(device)
    assert snapshot(model) == before


@either_order
def test_sequential_offloading_of_blocks_norms(kernel, device, is_injected_first):
    model, arguments, expected = prepared(device, model_config={"norm_elementwise_affine": True})
    if is_injected_first:
        kernel.inject_kernels(model)
    accelerate.cpu_offload(model, execution_device=torch.device(device))
    kernel.inject_kernels(model)
    calls = {"gelu": 2, "qk_norm_coordinate_rope": 2, "gated_residual": 6}
    assert computing(expected, model, arguments) == calls


@pytest.mark.parametrize("offload_type", ["leaf_level", "block_level"])
@either_order
def test_group_offloading(kernel, device, offload_type, is_injected_first):
    model, arguments, expected = prepared(device)
    if is_injected_first:
        kernel.inject_kernels(model)
    apply_group_offloading(
        model,
        onload_device=torch.device(device),
        offload_device=torch.device("cpu"),
        offload_type=offload_type,
        num_blocks_per_group=1 if offload_type == "block_level" else None,
    )
    kernel.inject_kernels(model)
    # Norms with weights are leaves.
    changes = {"rms_norm": 0} if offload_type == "leaf_level" else {}
    # The next block's weights are elsewhere until its turn.
    assert computing(expected, model, arguments) == calls_of(2, joined=0, **changes)
    kernel.eject_kernels(model)
    assert computing(expected, model, arguments) == {}


@either_order
def test_layerwise_casting(kernel, device, is_injected_first):
    """The weights of linear layers are stored in bfloat16 and cast for each call."""
    model, arguments, _ = prepared(device)
    plain, _, _ = prepared(device)
    if is_injected_first:
        kernel.inject_kernels(model)
    for candidate in (model, plain):
        candidate.enable_layerwise_casting(
            storage_dtype=torch.bfloat16, compute_dtype=torch.float32
        )
    kernel.inject_kernels(model)
    assert model.transformer_blocks[0].ff.net[0].proj.weight.dtype == torch.bfloat16
    expected = run(plain, arguments).double()
    assert computing(expected, model, arguments) == calls_of(2)


# ------------------------------------------------------------------------------------------------
# Caching


class Denoising:
    """Some steps from which a cache skips a part of the blocks."""

    CONFIGS = {
        "first_block": lambda self: FirstBlockCacheConfig(threshold=0.2),
        "pyramid_attention_broadcast": lambda self: PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=2, current_timestep_callback=lambda: self.timestep
        ),
        "taylorseer": lambda self: TaylorSeerCacheConfig(
            cache_interval=2,
            disable_cache_before_step=2,
            taylor_factors_dtype=torch.float32,
            cache_identifiers=[r"transformer_blocks\.\d+\.(attn1|ff)"],
        ),
    }

    def __init__(self, model, cache):
        self.model = model
        self.timestep = None
        model.enable_cache(self.CONFIGS[cache](weakref.proxy(self)))

    def outputs(self, arguments, steps=6):
        latents, outputs = arguments["hidden_states"], []
        for step in range(steps):
            self.timestep = 700 - 10 * step
            changes = {
                "hidden_states": latents,
                "timestep": torch.full_like(arguments["timestep"], self.timestep),
            }
            with self.model.cache_context("cond"):
                outputs.append(run(self.model, {**arguments, **changes}))
            latents = latents - 0.01 * outputs[-1]
        return outputs


@pytest.mark.parametrize("cache", Denoising.CONFIGS)
@either_order
def test_caching(kernel, device, cache, is_injected_first):
    steps = 6
    model, plain = transformer(device, blocks=3), transformer(device, blocks=3)
    arguments = inputs(model)
    expected = Denoising(plain, cache).outputs(arguments, steps)
    if is_injected_first:
        kernel.inject_kernels(model)
    denoising = Denoising(model, cache)
    kernel.inject_kernels(model)
    outputs = []
    calls = kernel_calls(lambda: outputs.extend(denoising.outputs(arguments, steps)))
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-4)
    assert 0 < calls["qk_norm_coordinate_rope"] < 3 * steps
    model.disable_cache()
    assert kernel_calls(run, model, arguments) == calls_of(3)
    kernel.eject_kernels(model)
    assert kernel_calls(run, model, arguments) == {}


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
    assert entry.reason in str(report)
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

    attention = model.transformer_blocks[0].attn1
    attention.processor._parallel_config = config
    assert attention.processor._parallel_config is config
    kernel.eject_kernels(model)
    assert attention.processor._parallel_config is config


# ------------------------------------------------------------------------------------------------
# Attention backends


@pytest.fixture
def math_attention(monkeypatch):
    """The name of a backend, and a list that gets the shape of the mask of each of its calls."""
    registry = attention_dispatch._AttentionBackendRegistry
    name = attention_dispatch.AttentionBackendName._NATIVE_MATH
    original, masks = registry._backends[name], []

    def attention(query, key, value, attn_mask=None, **kwargs):
        masks.append(None if attn_mask is None else tuple(attn_mask.shape))
        return original(query, key, value, attn_mask=attn_mask, **kwargs)

    monkeypatch.setitem(registry._backends, name, attention)
    monkeypatch.setattr(registry, "_active_backend", registry._active_backend)
    return name, masks


# Only PyTorch's own choice of attention is known to broadcast a mask over the heads.
MASKS = [None, (2, 4, 1, TEXT_LENGTH)] * 2


@either_order
def test_attention_backend(kernel, device, math_attention, is_injected_first):
    name, masks = math_attention
    model, arguments, expected = prepared(device)
    if is_injected_first:
        kernel.inject_kernels(model)
    model.set_attention_backend(name.value)
    native = attention_dispatch.AttentionBackendName.NATIVE
    attention_dispatch._AttentionBackendRegistry.set_active_backend(native)
    kernel.inject_kernels(model)
    assert computing(expected, model, arguments) == calls_of(2)
    assert masks == MASKS
    kernel.eject_kernels(model)
    for block, attention in itertools.product(model.transformer_blocks, ("attn1", "attn2")):
        assert getattr(block, attention).processor._attention_backend == name
    kernel.inject_kernels(model)
    model.reset_attention_backend()
    assert computing(expected, model, arguments) == calls_of(2)
    assert masks == MASKS


def test_attention_backend_by_context_manager(kernel, device, math_attention):
    name, masks = math_attention
    model, arguments, expected = prepared(device)
    kernel.inject_kernels(model)
    with attention_dispatch.attention_backend(name):
        assert computing(expected, model, arguments) == calls_of(2)
    assert masks == MASKS


def test_native_attention_gets_one_mask_for_all_heads(kernel, device, monkeypatch):
    model, arguments, expected = prepared(device)
    kernel.inject_kernels(model)
    masks = []
    original = torch.nn.functional.scaled_dot_product_attention

    def attention(*args, attn_mask=None, **kwargs):
        masks.append(None if attn_mask is None else tuple(attn_mask.shape))
        return original(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    computing(expected, model, arguments)
    assert masks == [None, (2, 1, 1, TEXT_LENGTH)] * 2
