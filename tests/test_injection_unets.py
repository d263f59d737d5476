"""UNets of Stable Diffusion with what users add to them: residuals, adapters, guidance, conditions."""

import collections
import copy

import pytest
import torch
from torch import nn

from adapters import add_lora
from changes import image_embeds, load_ip_adapter
from families_in_part import family_of
from injected_pairs import assert_alike, assert_as_close_as_eager, fallen_back, injected, on_kernels
from ltx_models import kernel_calls
from small_models import BY_NAME, normal, run, to

pytestmark = pytest.mark.usefixtures("_one_thread")

SD, SDXL = "unet", "unet_of_sdxl"


def controlnet_residuals():
    down = [normal(2, 64, 8, 8), normal(2, 64, 8, 8), normal(2, 64, 4, 4), normal(2, 128, 4, 4)]
    return {
        "down_block_additional_residuals": down,
        "mid_block_additional_residual": normal(2, 128, 4, 4),
    }


def adapter_residuals():
    return {"down_intrablock_additional_residuals": [normal(2, 64, 4, 4), normal(2, 128, 4, 4)]}


def gligen():
    objects = {"boxes": torch.rand(2, 3, 4), "masks": torch.ones(2, 3)}
    objects["positive_embeddings"] = normal(2, 3, 24)
    return {"cross_attention_kwargs": {"gligen": objects}}


# A forward's operations in 16 bits. The residual of each block's end joins the next block of its transformer.
OPERATIONS = {
    SD: {
        "group_norm": 21,
        "layer_norm": 4,
        "gated_residual_layer_norm_modulate": 2 * 4,
        "gated_residual": 4,
        "attention": 8,
        "geglu": 4,
    }
}
OPERATIONS[SDXL] = {
    **OPERATIONS[SD],
    "gated_residual_layer_norm_modulate": 2 * 4 + 3 * 4,
    "attention": 16,
    "geglu": 8,
}
SLICED = (
    "its processor is a diffusers.models.attention_processor.SlicedAttnProcessor,"
    " which has its own attention"
)
GUIDED = "it is guided by GLIGEN"
# In a guided block only attentions, the added one too, and both feed-forwards' activations use kernels.
OF_BLOCKS = ("layer_norm", "gated_residual_layer_norm_modulate", "gated_residual")
GUIDED_OPERATIONS = {**dict.fromkeys(OF_BLOCKS, 0), "attention": 12, "geglu": 8}
GATED = {"attention_type": "gated"}
CLASSES = {"num_class_embeds": 3}
CHANGES = {
    "FreeU": lambda model: model.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4),
    "slices": lambda model: model.set_attention_slice("auto"),
    "IP-Adapter": load_ip_adapter,
    "LoRA": lambda model: add_lora(family_of(SD), model),
}

# Name: (model, configuration, further arguments, other operations, reasons of what falls back)
VARIANTS = {
    "ControlNet": (SDXL, {}, controlnet_residuals, {}, {}),
    "T2I-Adapter": (SDXL, {}, adapter_residuals, {}, {}),
    "both residuals": (SD, {}, lambda: controlnet_residuals() | adapter_residuals(), {}, {}),
    "FreeU": (SDXL, {}, dict, {}, {}),
    "slices": (SDXL, {}, dict, {"attention": 0}, {SLICED: 16}),
    "GLIGEN": (SD, GATED, gligen, GUIDED_OPERATIONS, {GUIDED: 4}),
    "GLIGEN without objects": (SD, GATED, dict, {}, {}),
    "IP-Adapter": (SD, {}, image_embeds, {"attention": 12}, {}),
    "class labels": (SD, CLASSES, lambda: {"class_labels": torch.tensor([0, 2])}, {}, {}),
    "LoRA": (SDXL, {}, dict, {}, {}),
}
WITHOUT_EFFECT = ("slices", "GLIGEN without objects")
NO_KERNEL = {torch.float32: {"attention": 0}, torch.bfloat16: {}}


def forward(model, arguments):
    """`run` with copies of lists: a forward takes an adapter's residuals out of their list."""
    lists = {name: list(value) for name, value in arguments.items() if isinstance(value, list)}
    return run(model, {**arguments, **lists})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(kernel, device, variant, dtype):
    name, config, more, operations, reasons = VARIANTS[variant]
    small = BY_NAME[name]
    plain = small.model(device, dtype, **config)
    usual = forward(plain, small.arguments(device, dtype)) if config != CLASSES else None
    model, plain, report = injected(kernel, plain, CHANGES.get(variant))

    def make(dtype, seed):
        return {**small.arguments(device, dtype, seed), **to(more(), device, dtype)}

    arguments = make(dtype, 1)
    calls = {**OPERATIONS[name], **operations, **NO_KERNEL[dtype]}
    calls = {operation: count for operation, count in calls.items() if count}
    if variant == "LoRA" and device == "cuda" and dtype == torch.bfloat16:
        calls["lora_down"] = 48
    assert kernel_calls(forward, model, arguments) == calls
    assert on_kernels(report)["ResnetBlock2D"] == 8
    fallen = (reason for found in fallen_back(report).values() for reason in found)
    assert collections.Counter(fallen) == reasons
    unlike = None if variant in WITHOUT_EFFECT else usual
    if dtype == torch.float32:
        assert_alike(model, plain, arguments, forward=forward, unlike=unlike)
    else:
        assert_as_close_as_eager(model, plain, make, samples=4, forward=forward)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_controlnet_and_its_unet(kernel, device, dtype):
    """Both are injected."""
    models = nn.ModuleList(BY_NAME[name].model(device, dtype) for name in ("controlnet", SD))
    injected_models = copy.deepcopy(models)
    reports = [kernel.inject_kernels(model) for model in injected_models]

    def make(dtype, seed):
        return BY_NAME["controlnet"].arguments(device, dtype, seed)

    @torch.no_grad()
    def guided(models, arguments):
        controlnet, unet = models
        down, mid = controlnet(**arguments, conditioning_scale=0.7, return_dict=False)
        residuals = {"down_block_additional_residuals": down, "mid_block_additional_residual": mid}
        inputs = {name: x for name, x in arguments.items() if name != "controlnet_cond"}
        return run(unet, {**inputs, **residuals})

    arguments = make(dtype, 1)
    assert_alike(injected_models, models, arguments, forward=guided, times=1)
    if dtype == torch.bfloat16:
        assert_as_close_as_eager(injected_models, models, make, samples=4, forward=guided)
    assert [fallen_back(report) for report in reports] == [{}, {}]
    calls = kernel_calls(guided, injected_models, arguments)
    assert calls["group_norm"] == OPERATIONS[SD]["group_norm"] + 10
    assert calls["gated_residual"] == OPERATIONS[SD]["gated_residual"] + 2
