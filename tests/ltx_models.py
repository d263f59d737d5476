"""Small LTX-Video models and pipelines with random weights, their inputs and results."""

import copy
import re
from collections import Counter

import pytest
import torch
from diffusers import (
    AutoencoderKLLTXVideo,
    FlowMatchEulerDiscreteScheduler,
    LTXPipeline,
    LTXVideoTransformer3DModel,
)
from torch.utils import _pytree as pytree

from checks import Observer
from family import padded, run, seeded

CHANNELS = 8
CAPTION_CHANNELS = 24
GRID = (2, 3, 4)
TEXT_LENGTH = 7

either_order = pytest.mark.parametrize(
    "is_injected_first", [True, False], ids=["injected_first", "injected_after"]
)


def transformer(device, dtype=torch.float32, *, blocks=2, heads=4, head_dim=16, seed=0, **config):
    """A model in which every parameter matters: norm weights differ from 1, modulations are large."""
    torch.manual_seed(seed)
    hidden = heads * head_dim
    model = LTXVideoTransformer3DModel(
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_attention_heads=heads,
        attention_head_dim=head_dim,
        cross_attention_dim=hidden,
        num_layers=blocks,
        caption_channels=CAPTION_CHANNELS,
        **config,
    )
    for name, parameter in model.named_parameters():
        if re.search(r"norm\w*\.weight$", name):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif name.endswith("scale_shift_table"):
            torch.nn.init.normal_(parameter, std=0.5)
    return model.to(device, dtype).eval()


def inputs(model, **options):
    """Keyword arguments of one forward of a model, on its device and in its dtype."""
    parameter = next(model.parameters())
    return make_inputs(parameter.device, parameter.dtype, **options)


def make_inputs(
    device,
    dtype=torch.float32,
    *,
    seed=None,
    batch=2,
    grid=GRID,
    text_length=TEXT_LENGTH,
    per_token=False,
    mask="padded",
    **options,
):
    """Keyword arguments of one forward, including further options.

    The mask is "padded" (a different number of text tokens per sample), "full" or None.
    """
    normal = seeded(seed, device)
    tokens = grid[0] * grid[1] * grid[2]
    if mask is not None:
        shortest = text_length if mask == "full" else 2
        mask = padded(batch, text_length, shortest).to(device).long()
    timestep = normal(batch, tokens) if per_token else normal(batch)
    return {
        "hidden_states": normal(batch, tokens, CHANNELS).to(dtype),
        "encoder_hidden_states": normal(batch, text_length, CAPTION_CHANNELS).to(dtype),
        "timestep": timestep.sigmoid() * 1000,
        "encoder_attention_mask": mask,
        **dict(zip(("num_frames", "height", "width"), grid, strict=True)),
        "rope_interpolation_scale": (0.32, 32.0, 32.0),
        **options,
    }


def cast(arguments, dtype):
    """The hidden states in another dtype; masks, timesteps and coordinates keep theirs."""
    names = ("hidden_states", "encoder_hidden_states")
    return {**arguments, **{name: arguments[name].to(dtype) for name in names}}


def reference(model, arguments):
    """The result of a model without kernels in float64."""
    return run(copy.deepcopy(model).double(), cast(arguments, torch.float64))


def graph_replays(model, arguments, further):
    """Captures a forward in a CUDA graph, copies other inputs to `arguments` and yields each result."""
    arguments.update(
        pytree.tree_map_only(
            torch.Tensor, lambda x: x.clone(memory_format=torch.contiguous_format), arguments
        )
    )
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(model, arguments)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(model, arguments)
    for values in further:
        for leaf, value in zip(*map(pytree.tree_leaves, (arguments, values)), strict=True):
            if isinstance(value, torch.Tensor):
                leaf.copy_(value)
        graph.replay()
        yield out


def prepared(device, *, model_config=None, **options):
    """A float32 model, inputs for it, and the expected result."""
    model = transformer(device, **(model_config or {}))
    arguments = inputs(model, **options)
    return model, arguments, reference(model, arguments)


def computing(expected, model, arguments, slack=1e-5):
    """Runs a float32 model, compares the result with `expected` (from `reference`), and returns the
    number of calls by operator of the package."""
    with KernelCalls() as calls:
        out = run(model, arguments)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=slack, atol=slack, check_device=False)
    return dict(calls.counts)


def operation_of(operator, args=()):
    """The name of the package's operation for a call of an operator, or None.

    qk_norm_rope by coordinates counts as ``qk_norm_coordinate_rope``, attention into memory of the caller as
    ``attention``.
    """
    namespace, _, name = str(operator).partition(".")
    if not namespace.startswith("_h100_diffusers_kernels"):
        return "gelu" if "_addmm_activation" in str(operator) else None
    name = name.partition(".")[0].replace("attention_out", "attention")
    given = dict(zip([argument.name for argument in operator._schema.arguments], args))  # noqa: B905
    norm = "layer_norm" if given.get("is_layer_norm") else "rms_norm"
    if name == "norm":
        is_modulated = given["scale"] is not None or given["shift"] is not None
        return norm + "_modulate" * is_modulated
    if name == "gated_residual_norm_modulate":
        return f"gated_residual_{norm}_modulate"
    if name.startswith("activation"):
        glu, plain = ("swiglu", "silu") if given["is_silu"] else ("geglu", "gelu")
        return name.replace("activation", glu if given["is_gated"] else plain)
    if name == "qk_norm_rope" and given["is_coordinates"]:
        return "qk_norm_coordinate_rope"
    return name


class KernelCalls(Observer):
    """Counts the package's operations. Matmuls with a GELU epilogue also count as gelu."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()
        self.epilogues = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        operation = operation_of(func, args)
        if operation is not None:
            self.counts[operation] += 1
            self.epilogues += func.namespace == "aten"
        return func(*args, **(kwargs or {}))


def kernel_calls(function, *args):
    """The number of calls by operator of the package in a call of a function."""
    with KernelCalls() as calls:
        function(*args)
    return dict(calls.counts)


def calls_of(blocks, *, joined=None, **changes):
    """The operator calls of a forward with `blocks` blocks entirely on the kernels.

    At `joined` places, by default all, the end of a block and the beginning of the next are one
    operation. A keyword overrides the number of calls per block.
    """
    joined = blocks - 1 if joined is None else joined
    one_block = {"qk_norm_coordinate_rope": 1, "rms_norm": 2, "gelu": 1, **changes}
    calls = {name: count * blocks for name, count in one_block.items()}
    calls["rms_norm_modulate"] = blocks - joined
    calls["gated_residual"] = 2 * blocks - joined
    calls["gated_residual_rms_norm_modulate"] = blocks + joined
    return {name: count for name, count in calls.items() if count}


def snapshot(model):
    """Everything that an injection may change: attributes, forwards, processors, parameters.

    The class's own forward on the instance is ignored, because accelerate leaves it there.
    """
    state = {}
    for name, module in model.named_modules():
        attributes = set(vars(module)) - {"_diffusers_hook"}
        if getattr(vars(module).get("forward"), "__func__", None) is type(module).forward:
            attributes.remove("forward")
        state[name] = (attributes, getattr(module.forward, "__func__", None))
        state[f"{name}.processor"] = getattr(module, "processor", None)
    return state


def pipeline(device, dtype=torch.float32, pipeline_class=LTXPipeline, **config):
    """A pipeline without text encoder, which takes embeddings as prompts."""
    model = transformer(device, dtype, **config)
    vae = AutoencoderKLLTXVideo(
        latent_channels=CHANNELS,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        decoder_inject_noise=(False,) * 5,
        upsample_residual=(False,) * 4,
        upsample_factor=(1,) * 4,
        timestep_conditioning=False,
        patch_size=1,
        patch_size_t=1,
    )
    pipe = pipeline_class(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae.to(device, dtype).eval(),
        text_encoder=None,
        tokenizer=None,
        transformer=model,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def prompts(device, dtype=torch.float32):
    """Embeddings and masks of a prompt and a negative prompt, as arguments of a pipeline."""
    result = {}
    for prefix, length in (("", 5), ("negative_", 3)):
        embeds = torch.randn(1, TEXT_LENGTH, CAPTION_CHANNELS, device=device)
        mask = (torch.arange(TEXT_LENGTH, device=device) < length)[None].to(torch.int64)
        result[f"{prefix}prompt_embeds"] = embeds.to(dtype)
        result[f"{prefix}prompt_attention_mask"] = mask
    return result
