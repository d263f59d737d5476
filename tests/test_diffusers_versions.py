"""What holds with every supported version of diffusers: values, ejection, LoRA and quantized layers.

`make test` runs this file with the newest version, `make test-versions` with the oldest and one between.
"""

import copy
import sys
from functools import partial

import diffusers
import pytest
import torch

import adapters
import family_cogvideox
import family_hunyuan
from checks import relative_distance
from families import FAMILIES, KERNEL_HEADS, assert_close, every_family
from family import run as run_for_tuple
from family_relatives import (
    CONTROLNETS,
    COPIES_OF_WAN,
    controlnet_of,
    controlnet_of_cosmos,
    controlnet_xs,
    controlnet_xs_inputs,
    copy_of_wan,
    inputs_of_copy,
    with_condition,
)
from family_z_image import control_inputs, controlnet_of_z_image
from ranks import in_ranks
from small_models import BY_NAME, run, to
from test_context_parallel import RING, ULYSSES, inputs_of, model_of, parallelize, prepare_rank

pytestmark = pytest.mark.usefixtures("_one_thread")

VERSION = tuple(map(int, diffusers.__version__.split(".")[:2]))
TRANSPOSED = "it was given tensors whose last dimension has gaps"
# Classes whose blocks get transposed tokens, which only attention's kernel takes.
RUN_OWN_CODE = {"SD3ControlNetModel"} | ({"SD3Transformer2DModel"} if VERSION < (0, 40) else set())


def family_model(name, device, option, dtype=torch.float32, **config):
    """(a model without kernels, arguments of a forward)"""
    family = FAMILIES[name]
    arguments = family.inputs(device, dtype, **family.options[option])
    if name == "qwenimage" and VERSION < (0, 37):  # the model needs it
        batch, text_length, _ = arguments["encoder_hidden_states"].shape
        arguments["txt_seq_lens"] = [text_length] * batch
    return family.model(device, dtype, **config), arguments


def small_model(name, device, dtype=torch.float32, **config):
    return family_model(name, device, next(iter(FAMILIES[name].options)), dtype, **config)


def controlnet(family, device):
    plain, arguments = family_model(family, device, "two samples")
    return controlnet_of(family, plain).to(device), with_condition(arguments)


# What makes a model and the arguments of a forward, of classes without a family.
RELATIVES = {
    **{f"ControlNet of {family}": partial(controlnet, family) for family in CONTROLNETS},
    **{
        name: lambda device, name=name: (copy_of_wan(name).to(device), inputs_of_copy(name, device))
        for name in COPIES_OF_WAN
    },
    **{
        name: lambda device, model=BY_NAME[name]: (model.model(device), model.arguments(device))
        for name in ("unet", "controlnet")
    },
    "ConsisIDTransformer3DModel": lambda device: (
        family_cogvideox.consisid_model(device),
        family_cogvideox.cogvideox_inputs(device),
    ),
    "CosmosControlNetModel": controlnet_of_cosmos,
    "HunyuanImageTransformer2DModel": lambda device: (
        family_hunyuan.hunyuan_image_model(device),
        family_hunyuan.hunyuan_image_inputs(device),
    ),
    "HunyuanVideoFramepackTransformer3DModel": lambda device: (
        family_hunyuan.framepack_model(device),
        family_hunyuan.framepack_inputs(device),
    ),
    "UNetControlNetXSModel": lambda device: (
        controlnet_xs(device),
        to(controlnet_xs_inputs(), device, torch.float32),
    ),
    "ZImageControlNetModel": lambda device: (
        controlnet_of_z_image(device, refiner="control_noise_refiner"),
        control_inputs(device),
    ),
}
# With the newest diffusers alone: test_every_model.py runs them.
OF_EVERY_MODEL = {
    *("AnyFlowFARTransformer3DModel", "Cosmos3OmniTransformer"),
    *("Kandinsky5Transformer3DModel", "Kandinsky6SRTransformer3DModel"),
}
MODELS = [
    *((name, option) for name, family in FAMILIES.items() for option in family.options),
    # Older versions of diffusers do not have all of them.
    *((n, None) for n in RELATIVES if not n.endswith("Model") or hasattr(diffusers, n)),
]


def make(name, option, device):
    return RELATIVES[name](device) if option is None else family_model(name, device, option)


def assert_on_kernels(report, model):
    """Each call, as far as the version of diffusers allows."""
    assert report.levels == {"": "in full"}
    assert any(calls.on_kernels for calls in report.calls)
    expected = {TRANSPOSED} if type(model).__name__ in RUN_OWN_CODE else set()
    assert {reason for calls in report.calls for reason in calls.fell_back} == expected


def test_every_known_model_is_tried(kernel, device):
    first = dict(reversed(MODELS))
    tried = {type(make(name, option, device)[0]).__name__ for name, option in first.items()}
    inject = sys.modules[kernel.inject_kernels.__module__]
    known = [model.path.partition(":")[2] for each in inject.FAMILIES for model in each.models]
    known = {name for name in known if hasattr(diffusers, name)}
    assert tried <= known and known - tried <= OF_EVERY_MODEL


@pytest.mark.parametrize(("name", "option"), MODELS)
def test_values_and_ejection(kernel, device, name, option):
    plain, arguments = make(name, option, device)
    model, expected = copy.deepcopy(plain), run(plain, arguments)
    report = kernel.inject_kernels(model)
    out = run(model, arguments)
    assert_close(out, expected)
    assert not torch.equal(out, expected)
    assert_on_kernels(report, model)
    kernel.eject_kernels(model)
    assert torch.equal(run(model, arguments), expected)


@every_family
def test_attention(kernel, device, family):
    """In 16 bits attention runs on the kernels, too."""
    plain, arguments = small_model(family.name, device, torch.bfloat16, **KERNEL_HEADS)
    model = copy.deepcopy(plain)
    report = kernel.inject_kernels(model)
    assert relative_distance(run(model, arguments), run(plain, arguments)) < 0.02
    assert_on_kernels(report, model)


@every_family
@pytest.mark.parametrize("library", ["peft", "torchao"])
def test_changed_layers(kernel, device, family, library):
    """A LoRA, or int8 weights, put in after the injection."""
    plain, arguments = small_model(family.name, device)
    if library == "peft" and not hasattr(plain, "add_adapter"):
        pytest.skip("this version's class takes no adapters")
    model, without = copy.deepcopy(plain), run(plain, arguments)
    kernel.inject_kernels(model)
    for each in (model, plain):
        if library == "peft":
            adapters.add_lora(family, each)
        else:
            for path in family.block_lists:
                adapters.quantize(each.get_submodule(path))
    expected = run(plain, arguments)
    assert relative_distance(expected, without) > 1e-4
    assert_close(run(model, arguments), expected)
    kernel.eject_kernels(model)
    assert torch.equal(run(model, arguments), expected)


@pytest.mark.skipif(VERSION > (0, 36), reason="test_context_parallel.py tests the newest")
@pytest.mark.parametrize("name", ["flux", "wan", "ltx", "sd3", "z_image"])
@in_ranks
def test_context_parallelism(kernel, name):
    """The injection, and the attention backend alone."""
    prepare_rank()
    backend = kernel.register_attention_backend()
    family, _, plain = model_of(name)
    arguments = inputs_of(family)
    # Older hooks do not take the class of a model's results.
    expected = run_for_tuple(plain, arguments)
    for how in (ULYSSES, RING):
        for is_injected in (True, False):
            if not is_injected and name not in ("flux", "wan", "z_image"):
                continue  # their own code does not split attention, or masks
            model = copy.deepcopy(plain)
            if is_injected:
                kernel.inject_kernels(model)
            else:
                model.set_attention_backend(backend)
            parallelize(kernel, model, how)
            assert relative_distance(run_for_tuple(model, arguments), expected) < 2e-6, how


def test_an_older_version_is_refused(kernel, device, monkeypatch):
    plain, arguments = small_model("ltx", device)
    monkeypatch.setattr(diffusers, "__version__", "0.35.2")
    model = copy.deepcopy(plain)
    report = kernel.inject_kernels(model)
    reason = "diffusers 0.35.2 is loaded, and 0.36 or later is needed"
    assert report.levels == {"": "not at all"} and not report.replaced
    assert report.left_alone == [("", "LTXVideoTransformer3DModel", reason)]
    assert torch.equal(run(model, arguments), run(plain, arguments))
