"""Autoencoders whose decoder is a transformer: its blocks are replaced as a whole."""

import copy
import functools
import itertools
import re
from collections import Counter

import accelerate
import pytest
import torch
from diffusers.models.autoencoders import autoencoder_kl_minimax_h3, ltx2_diffusion_decoder
from diffusers.models.autoencoders.autoencoder_kl_minimax_h3 import MiniMaxH3VideoAttnProcessor
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import ltx_models
from autoencoders import LTX2_DIFFUSION, MINIMAX_H3, decode
from checks import operators_of, relative_distance
from graphs import graphs, module_of  # noqa: F401
from injected_pairs import (
    SLACK,
    assert_as_close_as_eager,
    assert_gradients_agree,
    fallen_back,
    injected,
    on_kernels,
    reasons_of,
)

pytestmark = pytest.mark.usefixtures("_one_thread", "_default_backend")

FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
BLOCKS = "decoder.transformer_blocks"
# The parts of a block in float32 beside 16-bit linear layers: as diffusers loads them, none, and others.
KEPT = {
    "loaded": ("norm1", "norm2", "norm_out", "scale1", "scale2"),
    "none": (),
    "norms": ("norm1", "norm2"),
    "one scale": ("norm_out", "scale2"),
    "scales": ("norm_out", "scale1", "scale2"),
}
# The calls of a forward with two blocks.
ATTENTION = {"qk_norm_rope": 2, "qk_norm_rope_out": 2, "attention": 2, "swiglu": 2}
FUSED = {
    "rms_norm": 1,
    "gated_residual_rms_norm_modulate": 3,
    "gated_residual": 1,
}
CALLS = {**FUSED, **ATTENTION}


def model_of(device, dtype=BFLOAT16, kept="loaded"):
    vae = MINIMAX_H3.model(device)
    for name, parameter in vae.named_parameters():
        names = name.split(".")
        if names[0] not in ("encoder", "quant_conv") and not {*KEPT[kept]}.intersection(names):
            parameter.data = parameter.data.to(dtype)
    return vae


def arguments_of(device, dtype=FLOAT32, seed=1):
    return MINIMAX_H3.arguments(device, dtype, seed)


def assert_same(model, plain, device):
    expected, out = (decode(vae, arguments_of(device)) for vae in (plain, model))
    assert out.dtype == expected.dtype
    assert relative_distance(out, expected) <= SLACK[expected.dtype]
    return expected


@pytest.mark.whole
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("kept", KEPT)
def test_values(kernel, device, dtype, kept):
    """The error, the calls, and ejection."""
    model, plain, report = injected(kernel, model_of(device, dtype, kept))
    assert report.levels == {"decoder": "in full"}
    if dtype is FLOAT32:
        assert_same(model, plain, device)
    else:
        make = functools.partial(arguments_of, device)
        assert_as_close_as_eager(model, plain, make, 2, decode)
    expected = decode(plain, arguments_of(device))
    calls = ltx_models.kernel_calls(decode, model, arguments_of(device))
    if dtype is not FLOAT32:
        # The first norm of float32 tokens is the model's own if its weight is 16-bit.
        assert {"rms_norm": 1, **calls} == CALLS
    assert on_kernels(report)["MiniMaxH3VideoTransformerBlock"] and fallen_back(report) == {}
    kernel.eject_kernels(model)
    assert torch.equal(decode(model, arguments_of(device)), expected)
    assert not any("forward" in vars(module) for module in model.modules())


def hook(path):
    def change(vae):
        module = vae.get_submodule(f"{BLOCKS}.{path}")
        module.register_forward_hook(lambda module, args, out: out.flip(-1))

    return change


def replace(path, make):
    def change(vae):
        owner, _, name = f"{BLOCKS}.{path}".rpartition(".")
        owner = vae.get_submodule(owner)
        setattr(owner, name, make(getattr(owner, name)))

    return change


class Wider(nn.Linear):
    def forward(self, x):
        return super().forward(x).float()


class Half(nn.Linear):
    def forward(self, x):
        return super().forward(x).half()


class Scaling(nn.Module):
    """In the place of a block."""

    def forward(self, hidden_states, rotary_emb):
        return 1.5 * hidden_states


class Unrotated(MiniMaxH3VideoAttnProcessor):
    def __call__(self, attn, hidden_states, rotary_emb=None):
        return super().__call__(attn, 1.5 * hidden_states)


def of_class(cls, layer):
    made = cls(layer.in_features, layer.out_features, device=layer.weight.device)
    made.weight, made.bias = layer.weight, layer.bias
    return made


def set_processor(vae):
    vae.decoder.transformer_blocks[0].attn.set_processor(Unrotated())


def cast_by_layer(vae):
    vae.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=BFLOAT16)


def offload(vae):
    device = next(vae.parameters()).device
    accelerate.cpu_offload(vae.decoder, device, offload_buffers=True)


CHANGES = {
    "hook on a block": hook("1"),
    "hook on a norm": hook("1.norm1"),
    "hook on the second norm": hook("0.norm2"),
    "hook on a query norm": hook("0.attn.norm_q"),
    "hook on a layer": hook("0.attn.to_q"),
    "hook on the feed-forward": hook("1.ff"),
    "another norm": replace("1.norm1", lambda _: nn.Identity()),
    "another query norm": replace("0.attn.norm_q", lambda _: nn.LeakyReLU(8.0)),
    "another activation": replace("0.ff.net.0.activation", lambda _: nn.Tanh()),
    "another block": replace("0", lambda _: Scaling()),
    "another processor": set_processor,
}
WITHOUT_EFFECT = {
    "a layer with another result": replace("0.ff.net.2", functools.partial(of_class, Wider)),
    "a layer with a float16 result": replace("0.ff.net.2", functools.partial(of_class, Half)),
    "layerwise casting": cast_by_layer,
    "offloading": offload,
}


@pytest.mark.parametrize("is_first", [True, False], ids=["injected first", "changed first"])
@pytest.mark.parametrize(
    ("kept", "name"),
    [
        *itertools.product(["loaded", "none"], CHANGES),
        *(("loaded", name) for name in WITHOUT_EFFECT),
    ],
)
def test_changed_parts(kernel, device, name, kept, is_first):
    """They run their own code."""
    plain = model_of(device, kept=kept)
    before = decode(plain, arguments_of(device))
    change = {**CHANGES, **WITHOUT_EFFECT}[name]
    model, plain, _ = injected(kernel, plain, change, is_injected_first=is_first)
    expected = assert_same(model, plain, device)
    if name in CHANGES:
        assert relative_distance(before, expected) > 0.03
    kernel.eject_kernels(model)
    assert torch.equal(decode(model, arguments_of(device)), expected)


def test_conversions(kernel, device):
    """Of z, of the first tokens, and of the first and the last norm. The other norms are 16-bit."""
    model, _, _ = injected(kernel, model_of(device))
    calls = Counter(operators_of(decode, model, arguments_of(device)))
    assert calls["_to_copy"] == 4 and calls["addcmul"] == 0


def test_blocks_of_two_dtypes(kernel, device):
    """A norm has the dtype of the layers that read it, also if the block before computes it."""

    def change(vae):
        second = vae.decoder.transformer_blocks[1]
        second.attn.float(), second.ff.float()

    model, plain, _ = injected(kernel, model_of(device), change)
    assert_same(model, plain, device)
    calls = ltx_models.kernel_calls(decode, model, arguments_of(device))
    assert (calls["rms_norm"], calls["gated_residual_rms_norm_modulate"]) == (2, 2)
    assert calls["gated_residual"] == 2


def test_a_patched_function(kernel, device, monkeypatch):
    model, plain, report = injected(kernel, model_of(device))
    name = "get_parameter_dtype"
    monkeypatch.setattr(autoencoder_kl_minimax_h3, name, lambda layer: layer.weight.dtype)
    assert_same(model, plain, device)
    assert f"{name} was replaced" in str(fallen_back(report))


def no_tiles(vae):
    vae.use_tiling = False


def other_blend(vae):
    vae._stitch_tiles = lambda tiles, *overlaps: torch.cat(sum(tiles, []), dim=-1)


def watch(vae):
    vae.decoder.register_forward_hook(lambda module, args, out: out + len(args[0]))


def own_clip(vae):
    vae._decode_clip = lambda z: type(vae)._decode_clip(vae, 2 * z)


# The decoder's calls for two clips of three tiles.
@pytest.mark.parametrize(
    ("change", "calls"), [(None, 4), (no_tiles, 2), (other_blend, 4), (watch, 6), (own_clip, 6)]
)
@pytest.mark.parametrize("is_first", [True, False], ids=["injected first", "changed first"])
def test_pairs_of_tiles(kernel, device, change, calls, is_first):
    vae, z = model_of(device), {"z": torch.randn(2, 4, 12, 4, 2, device=device)}
    vae.enable_tiling(32, 32, 16, 16)
    model, plain, _ = injected(kernel, vae, change, is_injected_first=is_first)
    out, expected = decode(model, z), decode(plain, z)
    assert relative_distance(out, expected) <= SLACK[BFLOAT16]
    assert ltx_models.kernel_calls(decode, model, z)["attention"] == 2 * calls
    for each in (copy.deepcopy(model), model) if change is None else (model,):
        kernel.eject_kernels(each)
        assert torch.equal(decode(each, z), expected)
        assert ("_decode_clip" in vars(each)) == (change is own_clip)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_gradients(kernel, device, dtype):
    model, plain, report = injected(kernel, model_of(device, dtype).decoder)
    x = torch.randn(1, 4, 2, 2, 3, device=device).to(dtype)
    slack = 1e-4 if dtype is FLOAT32 else 0.05
    assert_gradients_agree(Tuple(model), Tuple(plain), {"x": x}, slack)
    assert fallen_back(report) == {}


class Tuple(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, return_dict):
        return (self.model(x),)


@pytest.mark.parametrize("kept", ["loaded", "none"])
def test_compiled(kernel, device, kept):
    """Without graph breaks. Norms of float32 tokens are the compiler's."""
    model, plain, _ = injected(kernel, model_of(device, kept=kept))
    expected = decode(plain, arguments_of(device))
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    model.decoder.compile(fullgraph=True, backend=counter)
    assert relative_distance(decode(model, arguments_of(device)), expected) <= SLACK[BFLOAT16]
    (graph,) = counter.graphs
    names = [str(node.target) for node in graph.graph.nodes]
    assert sum(".attention" in name for name in names) == 2
    assert any("norm_modulate" in name for name in names) == (kept == "none")


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("change", [None, "hook", "norm"])
def test_rotation_of_a_part(kernel, device, batch, count, change):
    """One launch of both norms, and one that rotates in place. ``count``: of the tables' samples."""
    plain, dtypes = model_of(device, kept="none").decoder, set()
    attention = plain.transformer_blocks[0].attn

    def hook(module, args, out):
        dtypes.add((args[0].dtype, out.dtype))
        return out * 1.5

    if change == "hook":
        attention.norm_q.register_forward_hook(hook)
    elif change == "norm":
        attention.norm_q = nn.LayerNorm(64, elementwise_affine=False)
    model, plain, _ = injected(kernel, plain)
    count = min(count, batch)

    def make_arguments(dtype, seed):
        generator = torch.Generator(device).manual_seed(seed)
        x = torch.randn(batch, 7, 128, device=device, generator=generator).to(dtype)
        positions = torch.randn(count, 7, 3, device=device, generator=generator)
        return {"x": x, "tables": plain.rope(positions)}

    def forward(decoder, arguments):
        with torch.no_grad():
            attention = decoder.transformer_blocks[0].attn
            return attention(arguments["x"], arguments["tables"])

    calls = ltx_models.kernel_calls(lambda: forward(model, make_arguments(BFLOAT16, 0)))
    assert calls["attention"] == 1
    assert ("qk_norm_rope_out" in calls) == (change is None)
    forward(plain, make_arguments(BFLOAT16, 0))
    assert len(dtypes) == (change == "hook")
    assert_as_close_as_eager(model, plain, make_arguments, 8, forward)


# ------------------------------------------------------------------------------------------------
# Pipelines


class Pipeline:
    def __init__(self, device, vae):
        self.components = {
            "transformer": ltx_models.transformer(device, BFLOAT16, blocks=5),
            "vae": vae,
        }


def test_graphs(graphs, device):  # noqa: F811
    """One graph for all tiles and clips of a size."""
    vae = model_of(device)
    vae.enable_tiling(32, 32, 16, 16)
    plain, z = copy.deepcopy(vae), torch.randn(1, 4, 12, 3, 4, device=device)
    graphs.inject_kernels(Pipeline(device, plain))
    report = graphs.inject_kernels(Pipeline(device, vae), cuda_graphs=True)
    with torch.inference_mode():
        for _ in range(2):
            assert torch.equal(vae.decode(z).sample, plain.decode(z).sample)
    (calls,) = [calls for calls in report.cuda_graphs if calls.name == "vae.decoder"]
    assert (calls.captured, sum(calls.uncaptured.values())) == (1, 1)
    assert calls.replayed == 2 * 2 * 3 - 2  # two clips of six tiles, in pairs
    graphs.eject_kernels(vae)


def test_precision(kernel, device, monkeypatch):
    """Only "fp8-fast" quantizes its layers, but none in float32."""
    monkeypatch.setattr(module_of(kernel, "quantized.precision"), "MIN_FEATURES", 16)
    precision = "fp8-fast"
    vae = model_of(device).requires_grad_(False)
    pipe, before = Pipeline(device, vae), decode(vae, arguments_of(device))
    report = kernel.inject_kernels(pipe, precision="fp8")
    assert not any(name.startswith("vae") for name in report.quantized)
    kernel.eject_kernels(pipe)
    report = kernel.inject_kernels(pipe, precision=precision, keep=["vae.*.to_out"])
    names = {re.sub(r"\d+", "*", n) for n in report.quantized if n.startswith("vae")}
    layers = ("attn.to_q", "attn.to_k", "attn.to_v", "ff.net.*.proj", "ff.net.*")
    assert names == {f"vae.{BLOCKS}.*.{layer}" for layer in layers}
    calls = ltx_models.kernel_calls(decode, vae, arguments_of(device))
    assert calls["linears_fp8"] == 2 and calls["linear_fp8"] == 4
    assert 0 < relative_distance(decode(vae, arguments_of(device)), before) < 0.1
    kernel.eject_kernels(pipe)
    assert torch.equal(decode(vae, arguments_of(device)), before)
    vae = model_of(device, FLOAT32).requires_grad_(False)
    report = kernel.inject_kernels(Pipeline(device, vae), precision=precision)
    assert not any(name.startswith("vae") for name in report.quantized)
    reason = "not quantized: its weight is float32"
    assert reasons_of(report)[f"vae.{BLOCKS}.0.attn.to_q"] == reason
    with pytest.raises(ValueError, match="without one: its weight is float32"):
        kernel.inject_kernels(model_of(device, FLOAT32), precision=precision)


# ------------------------------------------------------------------------------------------------
# LTX-2.5


def ltx2_pair(kernel, device, dtype, change=None, **options):
    return injected(kernel, LTX2_DIFFUSION.model(device, dtype), change, **options)


def ltx2_arguments(device, dtype, seed=1):
    return {"z": LTX2_DIFFUSION.arguments(device, dtype, seed)["z"]}


@torch.no_grad()
def denoise(model, arguments):
    """Its noise has the same values in each dtype."""
    z = arguments["z"]
    generator = torch.Generator().manual_seed(7)
    x_t = torch.randn(len(z), 3, 3, 24, 32, generator=generator).to(z)
    decoder = model.decoder
    context = decoder.forward_stage_4(decoder.forward_stages_1_to_3(z))
    return decoder.denoise(context, x_t, 1).flatten()


@pytest.mark.parametrize(
    ("dtype", "tokens"), [(FLOAT32, 64), (BFLOAT16, 16384)], ids=["in tiles", "bfloat16"]
)
def test_ltx2(kernel, device, monkeypatch, dtype, tokens):
    monkeypatch.setattr(ltx2_diffusion_decoder, "_SWIGLU_TILE_SIZE", tokens)
    model, plain, report = ltx2_pair(kernel, device, dtype)
    assert report.levels == {"decoder": "in full"}
    arguments = ltx2_arguments(device, dtype)
    expected, whole = denoise(plain, arguments), decode(plain, arguments)
    if dtype is FLOAT32:
        assert relative_distance(denoise(model, arguments), expected) <= SLACK[dtype]
    else:
        make = functools.partial(ltx2_arguments, device)
        assert_as_close_as_eager(model, plain, make, 2, denoise)
    assert relative_distance(decode(model, arguments), whole) <= SLACK[dtype]
    counts = on_kernels(report)
    assert counts["LTX2VideoDiffusionDecoder3d"] == 1 and fallen_back(report) == {}
    assert counts["LTX2VideoVaeNeighborhoodAttention"] == counts["LTX2VideoVaeSwiGLU"] > 0
    kernel.eject_kernels(model)
    assert torch.equal(decode(model, arguments), whole)


def hook_of(path):
    def change(model):
        module = model.decoder.get_submodule(path)
        module.register_forward_hook(lambda module, args, out: out.flip(-1))

    return change


def other_rotation(model):
    model.decoder.diff_blocks[0].attn.rope = nn.Identity()
    model.decoder.det_stages[0][0].attn.rope.base = 10.0


class Doubling(ltx2_diffusion_decoder.LTX2VideoVaeNeighborhoodAttnProcessor):
    def __call__(self, attn, hidden_states, block_mask=None):
        assert isinstance(attn, nn.Module)
        return 2 * super().__call__(attn, hidden_states, block_mask)


def other_processor(model):
    model.decoder.diff_blocks[1].attn.set_processor(Doubling())


def other_scale(model):
    model.decoder.diff_blocks[1].attn.scale = 3.0


LTX2_CHANGES = {
    "hook on a block": hook_of("diff_blocks.0"),
    "hook on a norm": hook_of("diff_blocks.1.norm1"),
    "hook on a query norm": hook_of("det_stages.0.0.attn.norm_q"),
    "hook on a layer": hook_of("det_stages.0.1.attn.to_k"),
    "hook on the context": hook_of("diff_blocks.1.context_proj"),
    "hook on the MLP": hook_of("det_stages.0.0.mlp.w_gate"),
    "another rotation": other_rotation,
    "another processor": other_processor,
    "another scale": other_scale,
}


@pytest.mark.parametrize("name", LTX2_CHANGES)
def test_changed_parts_of_ltx2(kernel, device, name):
    model, plain, _ = ltx2_pair(kernel, device, FLOAT32, LTX2_CHANGES[name])
    arguments = ltx2_arguments(device, FLOAT32)
    before, expected = denoise(LTX2_DIFFUSION.model(device), arguments), denoise(plain, arguments)
    assert relative_distance(before, expected) > 1e-3
    assert relative_distance(denoise(model, arguments), expected) <= SLACK[FLOAT32]


@pytest.mark.parametrize("name", ["attn", "mlp"])
def test_gradients_of_ltx2(kernel, device, monkeypatch, name):
    monkeypatch.setattr(ltx2_diffusion_decoder, "_SWIGLU_TILE_SIZE", 20)
    attention = "dispatch_attention_fn"  # which has no gradient on a CPU
    monkeypatch.setattr(ltx2_diffusion_decoder, attention, lambda q, k, v, **_: q.sin() + k * v)
    model, plain, report = injected(kernel, LTX2_DIFFUSION.model(device).decoder)
    both = (each.det_stages[1][0].get_submodule(name) for each in (model, plain))
    assert_gradients_agree(*both, (torch.randn(2, 4, 4, 4, 32, device=device),))
    assert fallen_back(report) == {}


def test_compiled_ltx2(kernel, device):
    """Attention and MLP are the compiler's."""
    model, plain, _ = ltx2_pair(kernel, device, BFLOAT16)
    arguments = ltx2_arguments(device, BFLOAT16)
    expected = denoise(plain, arguments)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    for block in (model.decoder.det_stages[0][0], model.decoder.diff_blocks[1]):
        block.compile(fullgraph=True, backend=counter)
    assert relative_distance(denoise(model, arguments), expected) <= SLACK[BFLOAT16]
    names = [{str(node.target) for node in graph.graph.nodes} for graph in counter.graphs]
    assert len(names) == 2
    assert all(any("norm_modulate" in name for name in each) for each in names)
    assert not any("rope_3d" in name for each in names for name in each)
