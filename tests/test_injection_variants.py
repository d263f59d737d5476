"""Configurations and arguments of single families, their relatives, and inputs of different batch sizes."""

import copy
import functools
import random
import types

import pytest
import torch
import torch.nn.functional as F

import adapters
import family_hunyuan
import fp8_models
import small_models
from checks import relative_distance
from families import FAMILIES, KERNEL_HEADS, TINY_HEADS, assert_close, every_family, prepared, run
from family import seeded
from family_ltx2 import LTX23
from family_relatives import controlnet_of_cosmos
from family_z_image import (
    SIGLIP_CHANNELS,
    control_inputs,
    controlnet_of_z_image,
    reference_inputs,
    z_image_inputs,
    z_image_model,
)
from injected_pairs import assert_as_close_as_eager, fallen_back, injected, on_kernels, reasons_of
from ltx_models import kernel_calls

pytestmark = pytest.mark.usefixtures("_one_thread")

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
dtypes = pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)


def heads_of(dtype):
    return TINY_HEADS if dtype == FLOAT32 else KERNEL_HEADS


def check_values(kernel, plain, make, dtype, forward=run, samples=4):
    """In float32 the plain model's values, in 16 bits as close to float32.

    Args:
        make: ``make(dtype, seed)`` makes the arguments.

    Returns:
        The calls on kernels of one forward, and the report.
    """
    model, plain, report = injected(kernel, plain)
    calls = kernel_calls(forward, model, make(dtype, 0))
    assert "attention" in calls or dtype == FLOAT32
    if dtype == FLOAT32:
        assert_close(forward(model, make(dtype, 0)), forward(plain, make(dtype, 0)))
    else:
        assert_as_close_as_eager(model, plain, make, samples=samples, forward=forward, dtype=dtype)
    return calls, report


FLUX3, COSMOS, LTX2 = FAMILIES["flux3"], FAMILIES["cosmos"], FAMILIES.get("ltx2")
EASYANIMATE, GLM_IMAGE = FAMILIES["easyanimate"], FAMILIES.get("glm_image")
IMAGE_CHANNELS = 20
IN_FULL = {"layer_norm_modulate", "gated_residual_layer_norm_modulate", "gated_residual"}


def two_images(arguments, hidden):
    """A reference image of another size: dense modulations."""
    normal = seeded(3, arguments["hidden_states"].device)
    ids = torch.cat([arguments["img_ids"] + 10, arguments["img_ids"][:4] + 20])
    x = normal(2, len(ids), arguments["hidden_states"].shape[-1])
    return {
        "image_cond_hidden_states": x.to(arguments["hidden_states"].dtype),
        "image_cond_ids": ids,
    }


def target_timestep(arguments, hidden):
    return {"target_timestep": arguments["timestep"] / 2}


def controlled(arguments, hidden):
    normal = seeded(3, arguments["hidden_states"].device)
    residuals = [normal(2, 12, hidden).to(arguments["hidden_states"].dtype) for _ in range(2)]
    return {"block_controlnet_hidden_states": residuals}


def masked(arguments, hidden):
    mask = torch.ones(2, 5, dtype=torch.bool, device=arguments["hidden_states"].device)
    mask[1, 3:] = False
    return {"attention_mask": mask}


def with_image(arguments, hidden):
    normal = seeded(3, arguments["hidden_states"].device)
    text = arguments["encoder_hidden_states"]
    return {"encoder_hidden_states": (text, normal(2, 7, IMAGE_CHANNELS).to(text.dtype))}


def steps_of_frames(arguments, hidden):
    return {"timestep": seeded(3, arguments["hidden_states"].device)(2, 1, 2, 1, 1).sigmoid()}


VARIANTS = {
    "reference images": (FLUX3, {}, two_images),
    "a flow map": (FLUX3, {"flow_map": True}, target_timestep),
    "learned positions": (COSMOS, {"extra_pos_embed_type": "learnable"}, None),
    "a ControlNet's results": (COSMOS, {"controlnet_block_every_n": 1}, controlled),
    "a mask": (COSMOS, {}, masked),
    "an image as context": (COSMOS, {"img_context_dim_in": IMAGE_CHANNELS}, with_image),
    "a time step for each frame": (COSMOS, {}, steps_of_frames),
    "norms after feed-forwards": (EASYANIMATE, {"after_norm": True}, None),
}


@dtypes
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(kernel, device, variant, dtype):
    family, config, more = VARIANTS[variant]
    heads = heads_of(dtype)
    hidden = heads["heads"] * heads["head_dim"]
    if "img_context_dim_in" in config:
        config = {**config, "img_context_dim_out": hidden}

    def make(dtype, seed):
        arguments = family.inputs(device, dtype, seed=seed)
        return {**arguments, **({} if more is None else more(arguments, hidden))}

    plain = family.model(device, dtype, **heads, **config)
    calls, report = check_values(kernel, plain, make, dtype, samples=6)
    assert calls.keys() >= IN_FULL
    assert fallen_back(report) == {}


def with_kept_image(model, arguments):
    """The result of a forward that attends to the keys and values of one over an image without text."""
    from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache

    cache = GlmImageKVCache(2)
    cache.set_mode("write")
    image = {name: tensor[:1] for name, tensor in arguments.items()}
    no_text = image["encoder_hidden_states"][:, :0]
    run(model, {**image, "encoder_hidden_states": no_text, "kv_caches": cache})
    cache.set_mode("read")
    return run(model, {**arguments, "kv_caches": cache})


@pytest.mark.skipif(GLM_IMAGE is None, reason="this diffusers version has no GLM-Image")
@dtypes
def test_kept_keys_of_glm_image(kernel, device, dtype):
    plain = GLM_IMAGE.model(device, dtype, **heads_of(dtype))
    make = lambda dtype, seed: GLM_IMAGE.inputs(device, dtype, seed=seed)  # noqa: E731
    calls, report = check_values(kernel, plain, make, dtype, with_kept_image)
    assert calls.get("attention", 0) == (0 if dtype == FLOAT32 else 4)
    assert fallen_back(report) == {}


def halve_some(module, args, out):
    out[:, ::2].mul_(0.5)


def test_modulations_have_one_row(kernel, device):
    """Those of the text, whose time embedding is expanded. Hooks may write to what they get."""
    model, plain, arguments = prepared(FLUX3, device)
    kernel.inject_kernels(model)
    block, strides = model.txt_mode_blocks[0], []
    own = block.forward

    def forward(x, temb_mod, *args):
        strides.append(temb_mod.stride(1))
        return own(x, temb_mod, *args)

    block.forward = forward
    assert_close(run(model, arguments), run(plain, arguments))
    for candidate in (model, plain):
        candidate.early_stream_modulations["txt"].register_forward_hook(halve_some)
    assert_close(run(model, arguments), run(plain, arguments))
    assert strides == [0, 3 * model.inner_dim]


@pytest.mark.parametrize("positions", [None, "learnable"])
def test_controlnet_of_cosmos(kernel, device, positions):
    plain, arguments = controlnet_of_cosmos(device, extra_pos_embed_type=positions)
    model = copy.deepcopy(plain)
    report = kernel.inject_kernels(model)
    assert report.levels == {"": "in full"}
    with torch.no_grad():
        outs = [candidate(**arguments, return_dict=False)[0] for candidate in (model, plain)]
    for mine, expected in zip(*outs, strict=True):
        assert expected.norm() > 0
        assert_close(mine, expected)
    assert on_kernels(report)["CosmosTransformerBlock"] == 3 and fallen_back(report) == {}
    # Learned positions come between a block and the next one.
    joined = kernel_calls(run, model, arguments)["gated_residual_layer_norm_modulate"]
    assert joined == (8 if positions is None else 9)


TOKEN_REPLACE = functools.partial(
    family_hunyuan.hunyuan_video_model, image_condition_type="token_replace"
)
RELATIVES = {  # model, inputs, and what its single blocks are
    "token_replace": (TOKEN_REPLACE, family_hunyuan.hunyuan_video_inputs, "VideoTokenReplace"),
    "image": (family_hunyuan.hunyuan_image_model, family_hunyuan.hunyuan_image_inputs, "Image"),
    "framepack": (family_hunyuan.framepack_model, family_hunyuan.framepack_inputs, "Video"),
}


@pytest.mark.parametrize("name", RELATIVES)
def test_relatives_of_hunyuan_video(kernel, device, name):
    make, make_inputs, block = RELATIVES[name]
    model, plain, report = injected(kernel, make(device))
    arguments = make_inputs(device)
    assert report.levels == {"": "in full"}
    assert_close(run(model, arguments), run(plain, arguments))
    assert on_kernels(report)[f"Hunyuan{block}SingleTransformerBlock"] == 2
    assert fallen_back(report) == {}


# ------------------------------------------------------------------------------------------------
# LTX-2 and LTX-2.3, and both streams' results

FEWER_HEADS = {"audio_num_attention_heads": 1, "rope_type": "interleaved"}
# Self-attention of one sample is skipped in the first block.
PERTURBED = {"spatio_temporal_guidance_blocks": [0], "perturbation_mask": torch.tensor([0.0, 1.0])}
VARIANTS_OF_LTX2 = {  # configuration and arguments
    "interleaved": ({"rope_type": "interleaved"}, {}),
    "fewer heads for audio": (FEWER_HEADS, {}),
    "2.3": (LTX23, {}),
    "2.3 with cross time steps": (LTX23, {"use_cross_timestep": True}),
    "2.3 with isolated modalities": (LTX23, {"isolate_modalities": True}),
    "2.3 with a perturbed sample": (LTX23, PERTURBED),
    "2.3 with all samples perturbed": (LTX23, {"spatio_temporal_guidance_blocks": [1]}),
    "a fixed modulation of the text": ({**LTX23, "use_prompt_adaln_single": False}, {}),
    "2.3's video alone": ({**LTX23, "audio_gated_attn": False, "audio_cross_attn_mod": False}, {}),
    "no biases in feed-forwards": ({"ff_bias": False, "audio_ff_bias": False}, {}),
    "no coordinates": ({}, {"video_coords": None, "audio_coords": None}),
    "a mask for each query": ({}, {"video_self_attention_mask": torch.eye(12).expand(2, 12, 12)}),
}


@torch.no_grad()
def both(model, arguments):
    """The video's and the audio's result in one tensor (B, S * C)."""
    return torch.cat([out.flatten(1) for out in model(**arguments, return_dict=False)], dim=1)


@pytest.mark.skipif(LTX2 is None, reason="this diffusers version has no LTX-2")
@dtypes
@pytest.mark.parametrize("variant", VARIANTS_OF_LTX2)
def test_variants_of_ltx2(kernel, device, variant, dtype):
    config, options = VARIANTS_OF_LTX2[variant]
    heads = heads_of(dtype)
    hidden = heads["heads"] * heads["head_dim"]
    sizes = {"audio_cross_attention_dim": heads["head_dim"]} if config is FEWER_HEADS else {}
    if "gated_attn" in config:  # its text is not projected
        options = {"text_channels": (hidden, hidden), **options}

    def make(dtype, seed):
        arguments = LTX2.inputs(device, dtype, seed=seed, **options)
        for name in ("perturbation_mask", "video_self_attention_mask"):
            if name in arguments:
                arguments[name] = arguments[name].to(device, dtype)
        return arguments

    plain = LTX2.model(device, dtype, **{**heads, **sizes, **config})
    calls, report = check_values(kernel, plain, make, dtype, both)
    # In two blocks of two streams: the norms of each after the first. The first block joins the second.
    norms = 2 if "isolate_modalities" in options else 3
    assert calls["gated_residual_rms_norm_modulate"] == 2 * 2 * norms + 2
    reasons = {reason for found in fallen_back(report).values() for reason in found}
    own = {"attention itself is the model's own: its mask differs between queries or heads"}
    is_masked = "video_self_attention_mask" in options and dtype != FLOAT32
    assert reasons == (own if is_masked else set())


# ------------------------------------------------------------------------------------------------
# Z-Image and its ControlNet: inputs of each form, and replaced gating

REFERENCES = functools.partial(z_image_model, siglip_feat_dim=SIGLIP_CHANNELS)
TWO_PROMPTS = functools.partial(z_image_inputs, prompts=(40, 6))
CONTROLNET = functools.partial(controlnet_of_z_image, refiner="control_noise_refiner")
REFINED_BY_LAYERS = functools.partial(controlnet_of_z_image, refiner="control_layers")
# Model, inputs, and the number of blocks, and of those that the next one takes over from. The ControlNet adds
# to the result of its first block of noise: after it no block hands over.
VARIANTS_OF_Z_IMAGE = {
    "two prompts": (z_image_model, TWO_PROMPTS, 6, 3),
    "reference images": (REFERENCES, reference_inputs, 8, 4),
    "a ControlNet": (CONTROLNET, control_inputs, 8, 1),
    "a ControlNet that refines with its layers": (REFINED_BY_LAYERS, control_inputs, 8, 1),
}


@dtypes
@pytest.mark.parametrize("variant", VARIANTS_OF_Z_IMAGE)
def test_variants_of_z_image(kernel, device, variant, dtype):
    make, make_inputs, blocks, handed = VARIANTS_OF_Z_IMAGE[variant]
    calls, report = check_values(
        kernel,
        make(device, dtype, **heads_of(dtype)),
        lambda dtype, seed: make_inputs(device, dtype, seed=seed),
        dtype,
        small_models.run,
    )
    assert report.levels == {"": "in full"} and fallen_back(report) == {}
    assert calls["swiglu"] == calls["qk_norm_rope"] == blocks
    assert calls["gated_residual_rms_norm_modulate"] == blocks + handed
    assert calls["gated_residual"] == blocks - handed
    assert calls.get("attention", 0) == (blocks if dtype == BFLOAT16 else 0)


def test_a_mask_with_holes(kernel, device):
    """Not from the model: no number of keys stands for it."""
    model, plain, report = injected(kernel, z_image_model(device, torch.bfloat16, **KERNEL_HEADS))
    mask = torch.arange(12, device=device) % torch.tensor([[3], [5]], device=device) > 0
    x = torch.randn(2, 12, 128, device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        expected, out = (m.layers[0].attention(x, attention_mask=mask) for m in (plain, model))
    torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)
    assert on_kernels(report)["Attention"] == 1 and fallen_back(report) == {}


def gating_by_gelu(part, x1, x3):
    return F.gelu(x1) * x3


@pytest.mark.parametrize("by", ["the user", "the library"])
def test_replaced_gating(kernel, device, monkeypatch, by):
    """All feed-forwards of the class run their own code."""
    plain = z_image_model(device, **TINY_HEADS)
    arguments = TWO_PROMPTS(device, seed=0)
    unchanged = small_models.run(plain, arguments)
    cls, gating = type(plain.layers[0].feed_forward), gating_by_gelu
    own = cls._forward_silu_gating
    if by == "the library":  # as reloaders of modules do
        gating = types.FunctionType(gating.__code__, own.__globals__, own.__name__)
    monkeypatch.setattr(cls, own.__name__, gating)
    model, plain, report = injected(kernel, plain)
    expected = small_models.run(plain, arguments)
    assert not torch.equal(expected, unchanged)
    assert_close(small_models.run(model, arguments), expected)
    reason = reasons_of(report)["layers.0.feed_forward"]
    assert reason == "_forward_silu_gating was replaced"


# ------------------------------------------------------------------------------------------------
# Inputs of one sample beside inputs of several: plain diffusers broadcasts them


def one_sample_of(arguments, names):
    """The arguments, with only the first sample of those with these names."""

    def first(value):
        return value[:1] if isinstance(value, (torch.Tensor, list)) else value

    return {name: first(x) if name in names else x for name, x in arguments.items()}


def with_samples(arguments, batch):
    """The names of the arguments with a row for each sample."""
    return [
        name
        for name, x in arguments.items()
        if isinstance(x, (torch.Tensor, list)) and len(x) == batch and getattr(x, "ndim", 1)
    ]


def result_of(model, arguments):
    """None if it raises."""
    try:
        return run(model, arguments)
    except (AssertionError, IndexError, RuntimeError, ValueError):
        return None


@pytest.mark.drawn(times=0, period=5)
@every_family
def test_batches_that_differ(kernel, device, family):
    """The plain model's values wherever it has some. Otherwise it raises, too, or broadcasts."""
    if family.name == "cosmos3" and device == "cuda":
        pytest.skip("its own code would write out of bounds, after which the process has no GPU")
    model, plain, arguments = prepared(family, device, batch=3, seed=4)
    kernel.inject_kernels(model)
    names, rng = with_samples(arguments, 3), random.Random(family.name)
    others = [name for name in names if name != family.main]
    each = [[family.main], others, *([name] for name in others)]
    each += [rng.sample(names, rng.randrange(1, len(names))) for _ in range(2) if others]
    for narrowed in each:
        given = one_sample_of(arguments, narrowed)
        expected, out = result_of(plain, given), result_of(model, given)
        if expected is None and out is not None:
            repeated = {name: 3 * given[name] for name in narrowed if type(given[name]) is list}
            for name in given.keys() & set(narrowed) - repeated.keys():
                repeated[name] = given[name].expand_as(arguments[name]).contiguous()
            expected = run(plain, {**given, **repeated})
        assert (out is None) == (expected is None), narrowed
        if out is not None:
            assert_close(out, expected)


@pytest.mark.whole
@pytest.mark.parametrize("change", [None, "hook", "lora", "fp8"])
def test_one_latent_for_several_embeddings(kernel, device, change):
    """It runs on the kernels; the first block hands over to the second."""
    family = FAMILIES["flux"]
    dtype = BFLOAT16 if change == "fp8" else FLOAT32
    plain = family.model(device, dtype, **heads_of(dtype))
    if change == "hook":
        family.part(plain, "norm2").register_forward_hook(halve_some)
    elif change == "lora":
        adapters.add_lora(family, plain)
    elif change == "fp8":
        pytest.importorskip("torchao")
        for path in family.block_lists:
            fp8_models.quantize(plain.get_submodule(path))
    model = copy.deepcopy(plain)
    plain = fp8_models.eager(plain) if change == "fp8" else plain
    report = kernel.inject_kernels(model)
    arguments = family.inputs(device, dtype, batch=3, seed=4)
    for narrowed in (["hidden_states"], ["hidden_states", "encoder_hidden_states"]):
        given = one_sample_of(arguments, narrowed)
        assert_close(run(model, given), run(plain, given), 0.05 if change == "fp8" else 1e-5)
        if change is None:
            assert kernel_calls(run, model, given) == kernel_calls(run, model, arguments)
    assert change == "hook" or fallen_back(report) == {}


@pytest.mark.whole
def test_rows_of_more_samples(kernel, device):
    """A gate without a norm, rows that tokens choose, and a query of one sample for keys of several."""
    for name, narrowed in (
        ("hunyuan_video", ["hidden_states", "encoder_hidden_states", "encoder_attention_mask"]),
        ("qwenimage21", ["hidden_states", "encoder_hidden_states", "encoder_hidden_states_mask"]),
        ("cosmos", ["hidden_states", "timestep"]),
        ("wan", ["encoder_hidden_states"]),
    ):
        options = {"has_condition": True, "mask": "padded"} if name == "qwenimage21" else {}
        model, plain, arguments = prepared(FAMILIES[name], device, batch=3, seed=4, **options)
        kernel.inject_kernels(model)
        given = one_sample_of(arguments, narrowed)
        assert_close(run(model, given), run(plain, given))
    # Images of several samples are one image's tokens for one sample.
    plain = COSMOS.model(device, img_context_dim_in=IMAGE_CHANNELS, img_context_dim_out=32)
    model, _, _ = injected(kernel, plain)
    given = with_image(COSMOS.inputs(device, batch=1, seed=4), 32)
    given = {**COSMOS.inputs(device, batch=1, seed=4), **given}
    assert_close(run(model, given), run(plain, given))


# ------------------------------------------------------------------------------------------------
# Cosmos 3, Motif-Video, Nucleus-Image, HiDream-I1

NEMOTRON = {"hidden_act": "relu2", "qk_norm_for_text": False, "use_und_k_norm_for_gen": True}
WITHOUT_DECODER = {"num_decoder_layers": 0, "qk_norm": "layer_norm"}
ONE_CROSS_ATTENTION = {"enable_text_cross_attention_dual": False, "image_embed_dim": None}


@dtypes
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("cosmos3", NEMOTRON),
        ("motif_video", WITHOUT_DECODER),
        ("motif_video", ONE_CROSS_ATTENTION),
        ("nucleus", {"moe_enabled": False}),
        ("hidream", {"num_routed_experts": 0}),
    ],
)
def test_configurations(kernel, device, name, config, dtype):
    family = FAMILIES[name]
    plain = family.model(device, dtype, **KERNEL_HEADS, **config)
    make = lambda dtype, seed: family.inputs(device, dtype, seed=seed)  # noqa: E731
    model, plain, report = injected(kernel, plain)
    if dtype == FLOAT32:
        assert_close(run(model, make(dtype, 0)), run(plain, make(dtype, 0)))
    else:
        assert_as_close_as_eager(model, plain, make, samples=4, dtype=dtype)
    assert bool(fallen_back(report)) == (config is NEMOTRON)


def test_text_cache_of_nucleus_image(kernel, device):
    """Its hooks give attention keys and values of the text."""
    cache = pytest.importorskip("diffusers.hooks.text_kv_cache")
    model, plain, arguments = prepared(FAMILIES["nucleus"], device, mask="padded")
    report = kernel.inject_kernels(model)
    cache.apply_text_kv_cache(model, cache.TextKVCacheConfig())
    for _ in range(2):
        assert_close(run(model, arguments), run(plain, arguments))
    assert fallen_back(report) == {}


@dtypes
@pytest.mark.parametrize("chosen", [1, 2, 3])
def test_experts_of_hidream(kernel, device, chosen, dtype):
    """Of four experts, one of which no token chooses."""
    config = {"num_routed_experts": 4, "num_activated_experts": chosen}
    plain = FAMILIES["hidream"].model(device, dtype, **KERNEL_HEADS, **config)
    plain.double_stream_blocks[0].block.ff_i.gate.weight.data[1] = -1
    model, plain, report = injected(kernel, plain)
    layers = [each.double_stream_blocks[0].block.ff_i for each in (model, plain)]
    x = small_models.normal(2, 7, plain.inner_dim).to(device, dtype) + 1
    rows, exact = x.double().flatten(0, 1), copy.deepcopy(layers[1]).double()
    seen = [[], []]
    for calls, layer in zip(seen, layers, strict=True):
        for i, expert in enumerate(layer.experts):
            expert.register_forward_hook(lambda *_, calls=calls, i=i: calls.append(i))
    with torch.no_grad():
        indices, weights, _ = layers[1].gate(x)
        expected = exact.shared_experts(rows)
        for row, out in enumerate(expected):
            for i, weight in zip(indices[row], weights[row].double(), strict=True):
                out += weight * exact.experts[i](rows[row])
        errors = [relative_distance(layer(x).flatten(0, 1), expected) for layer in layers]
    assert errors[0] <= (1e-6 if dtype == FLOAT32 else 1.1 * errors[1])
    assert seen[0] == seen[1] and 1 not in seen[0]
    assert fallen_back(report) == {}
    if dtype == FLOAT32:
        arguments = FAMILIES["hidream"].inputs(device)
        assert_close(run(model, arguments), run(plain, arguments))
