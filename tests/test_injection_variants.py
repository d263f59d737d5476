"""Configurations and arguments that only FLUX.3, Cosmos or HunyuanVideo has, and relatives of these."""

import copy
import functools

import pytest
import torch

import family_hunyuan
from families import FAMILIES, KERNEL_HEADS, assert_close, prepared, run
from family import seeded
from family_relatives import controlnet_of_cosmos
from injected_pairs import assert_as_close_as_eager, fallen_back, on_kernels
from ltx_models import kernel_calls

pytestmark = pytest.mark.usefixtures("_one_thread")

FLUX3, COSMOS = FAMILIES["flux3"], FAMILIES["cosmos"]
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
    "an image as context": (
        COSMOS,
        {"img_context_dim_in": IMAGE_CHANNELS},
        with_image,
    ),
    "a time step for each frame": (COSMOS, {}, steps_of_frames),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_variants(kernel, device, variant, dtype):
    family, config, more = VARIANTS[variant]
    heads = {"heads": 2, "head_dim": 16} if dtype == torch.float32 else KERNEL_HEADS
    hidden = heads["heads"] * heads["head_dim"]
    if "img_context_dim_in" in config:
        config = {**config, "img_context_dim_out": hidden}
    model, plain, _ = prepared(family, device, dtype, config={**heads, **config})
    report = kernel.inject_kernels(model)

    def make(dtype, seed):
        arguments = family.inputs(device, dtype, seed=seed)
        return {**arguments, **({} if more is None else more(arguments, hidden))}

    calls = kernel_calls(run, model, make(dtype, 0))
    assert calls.keys() >= IN_FULL
    assert "attention" in calls or dtype == torch.float32
    assert fallen_back(report) == {}
    if dtype == torch.float32:
        assert_close(run(model, make(dtype, 0)), run(plain, make(dtype, 0)), 1e-5)
        return
    assert_as_close_as_eager(model, plain, make, samples=6, forward=run, dtype=dtype)


def halve_some(module, args, out):
    out[:, ::2].mul_(0.5)


def test_modulations_have_one_row(kernel, device):
    """Those of the text, whose time embedding is expanded. Hooks may write to what they get."""
    model, plain, arguments = prepared(FLUX3, device)
    kernel.inject_kernels(model)
    strides = []

    def keep(block, args):
        strides.append(args[1].stride(1))

    handle = model.txt_mode_blocks[0].register_forward_pre_hook(keep)
    assert_close(run(model, arguments), run(plain, arguments))
    for candidate in (model, plain):
        candidate.early_stream_modulations["txt"].register_forward_hook(halve_some)
    assert_close(run(model, arguments), run(plain, arguments))
    handle.remove()
    assert strides == [0, 3 * model.inner_dim]


# ------------------------------------------------------------------------------------------------
# Cosmos' ControlNet


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


# ------------------------------------------------------------------------------------------------
# HunyuanVideo for image-to-video, and HunyuanImage


@pytest.mark.parametrize(
    ("make", "make_inputs", "block"),
    [
        (
            functools.partial(
                family_hunyuan.hunyuan_video_model, image_condition_type="token_replace"
            ),
            family_hunyuan.hunyuan_video_inputs,
            "HunyuanVideoTokenReplaceSingleTransformerBlock",
        ),
        (
            family_hunyuan.hunyuan_image_model,
            family_hunyuan.hunyuan_image_inputs,
            "HunyuanImageSingleTransformerBlock",
        ),
        (
            family_hunyuan.framepack_model,
            family_hunyuan.framepack_inputs,
            "HunyuanVideoSingleTransformerBlock",
        ),
    ],
    ids=["token_replace", "image", "framepack"],
)
def test_relatives_of_hunyuan_video(kernel, device, make, make_inputs, block):
    plain, arguments = make(device), make_inputs(device)
    model = copy.deepcopy(plain)
    report = kernel.inject_kernels(model)
    assert report.levels == {"": "in full"}
    assert_close(run(model, arguments), run(plain, arguments))
    assert on_kernels(report)[block] == 2 and fallen_back(report) == {}
