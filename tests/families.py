"""What the tests of injection need of a model family: a small model, inputs, names of its parts.

A test that takes a ``Family`` holds for every family. What is known of one alone (which operators a forward
calls, its coordinates, its masks) is tested in files of its own.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from diffusers import FluxTransformer2DModel

import ltx_models

# A head size that attention's kernel takes, and one for models that are to be as small as can be.
KERNEL_HEADS = {"heads": 2, "head_dim": 64}
TINY_HEADS = {"heads": 2, "head_dim": 16}


@dataclass(frozen=True)
class Family:
    """A kind of model that is injected. The tests' only knowledge of it is here.

    Attributes:
        name: of the family, as in the names of its tests.
        model: ``model(device, dtype=torch.float32, *, seed=0, heads, head_dim, **config)`` makes a model of
            two blocks of each kind with random weights, in which every parameter matters.
        inputs: ``inputs(device, dtype=torch.float32, *, seed=None, batch=2, tokens=1, text_length=5,
            **options)`` makes the keyword arguments of one forward; ``tokens`` scales their number.
        inexact: the arguments that have the model's dtype.
        options: variants of the inputs by name, each keyword arguments for ``inputs``.
        parts: a module of each kind, by its path: block, next_block, attention, norm, qk_norm, linear,
            activation, feed_forward, up (its linear layer), output, rope, modulation, and more of its own.
        lora_targets: linear layers of the blocks, for peft.
        caches: the names of diffusers' caches that the family supports.
        module: where diffusers defines it.
        processor: the class of its attention processors, in that module.
        block_lists: the paths of its lists of blocks, in the order in which they run.
    """

    name: str
    model: Callable
    inputs: Callable
    inexact: tuple[str, ...]
    options: dict
    parts: dict
    lora_targets: list
    caches: tuple[str, ...]
    module: str
    processor: str
    block_lists: tuple[str, ...] = field(default=("transformer_blocks",))

    def cast(self, arguments, dtype):
        """The inputs in another dtype; masks, timesteps and positions keep theirs."""
        return {**arguments, **{name: arguments[name].to(dtype) for name in self.inexact}}

    def blocks(self, model):
        """All blocks, in the order in which they run."""
        return [block for path in self.block_lists for block in model.get_submodule(path)]

    def part(self, model, kind):
        return model.get_submodule(self.parts[kind])

    def reference(self, model, arguments):
        """What a model without kernels computes in float64."""
        return run(copy.deepcopy(model).double(), self.cast(arguments, torch.float64))

    def __str__(self):
        return self.name


@torch.no_grad()
def run(model, arguments):
    return model(**arguments, return_dict=False)[0]


def prepared(family, device, dtype=torch.float32, *, config=None, **options):
    """(model, the same without kernels, arguments); the options are for the inputs."""
    model = family.model(device, dtype, **(config or {}))
    return model, copy.deepcopy(model), family.inputs(device, dtype, **options)


def assert_close(out, expected, slack=1e-5):
    """Values of a float32 model against those computed in float64."""
    assert torch.isfinite(expected).all()
    expected = expected.double()
    scale = expected.abs().max().item()
    torch.testing.assert_close(
        out.double(), expected, rtol=slack, atol=slack * scale, check_device=False
    )


def assert_as_close_as_eager(family, model, plain, *, samples=3, limit=1.05, **options):
    """The distance from the float32 model is at most 1.05 times that of the eager model, ``plain``."""
    exact = copy.deepcopy(plain).float()
    parameter = next(plain.parameters())
    squares = torch.zeros(2, dtype=torch.float64)
    for seed in range(samples):
        arguments = family.inputs(parameter.device, parameter.dtype, seed=seed, **options)
        expected = run(exact, family.cast(arguments, torch.float32)).double()
        for i, candidate in enumerate((model, plain)):
            squares[i] += (run(candidate, arguments).double() - expected).square().sum().cpu()
    error, eager_error = squares.sqrt().tolist()
    assert eager_error > 0
    assert error <= limit * eager_error, f"{error / eager_error:.3f} of the eager model's"


def _seeded(seed, device):
    """A generator on the CPU, so that all devices get the same values."""
    generator = torch.Generator()
    if seed is None:
        seed = int(torch.randint(2**31, ()))
    generator.manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(device)

    return normal


# --------------------------------------------------------------------------------------------------
# LTX-Video


def ltx_model(device, dtype=torch.float32, *, seed=0, blocks=2, heads=2, head_dim=16, **config):
    return ltx_models.transformer(
        device, dtype, blocks=blocks, heads=heads, head_dim=head_dim, seed=seed, **config
    )


def ltx_inputs(
    device,
    dtype=torch.float32,
    *,
    seed=None,
    batch=2,
    tokens=1,
    text_length=5,
    mask="padded",
    per_token=False,
    **options,
):
    """``mask`` is "padded" (each sample has another number of text tokens), "full" or None."""
    normal = _seeded(seed, device)
    frames, height, width = 2, 2 + tokens, 2
    count = frames * height * width
    encoder_attention_mask = None
    if mask is not None:
        lengths = torch.arange(batch) * 3 % text_length + 1
        if mask == "full":
            lengths[:] = text_length
        encoder_attention_mask = (torch.arange(text_length) < lengths[:, None]).to(device).long()
    timestep = normal(batch, count).sigmoid() if per_token else normal(batch).sigmoid()
    return {
        "hidden_states": normal(batch, count, ltx_models.CHANNELS).to(dtype),
        "encoder_hidden_states": normal(batch, text_length, ltx_models.CAPTION_CHANNELS).to(dtype),
        "timestep": timestep * 1000,
        "encoder_attention_mask": encoder_attention_mask,
        "num_frames": frames,
        "height": height,
        "width": width,
        "rope_interpolation_scale": (0.32, 32.0, 32.0),
        **options,
    }


LTX = Family(
    name="ltx",
    model=ltx_model,
    inputs=ltx_inputs,
    inexact=("hidden_states", "encoder_hidden_states"),
    options={
        "padded text": {},
        "full mask": {"mask": "full"},
        "no mask": {"mask": None},
        "batch of 1": {"batch": 1},
        "more tokens": {"batch": 3, "tokens": 5, "text_length": 9},
        "a timestep for each token": {"per_token": True},
    },
    parts={
        "block": "transformer_blocks.0",
        "next_block": "transformer_blocks.1",
        "attention": "transformer_blocks.0.attn1",
        "cross_attention": "transformer_blocks.0.attn2",
        "norm": "transformer_blocks.1.norm1",
        "norm2": "transformer_blocks.0.norm2",
        "qk_norm": "transformer_blocks.0.attn1.norm_q",
        "linear": "transformer_blocks.0.attn1.to_k",
        "output": "transformer_blocks.0.attn1.to_out.0",
        "feed_forward": "transformer_blocks.0.ff",
        "activation": "transformer_blocks.0.ff.net.0",
        "up": "transformer_blocks.0.ff.net.0.proj",
        "rope": "rope",
        "modulation": "time_embed",
    },
    lora_targets=["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"],
    caches=("first_block", "pyramid", "taylorseer", "mag"),
    module="diffusers.models.transformers.transformer_ltx",
    processor="LTXVideoAttnProcessor",
)


# --------------------------------------------------------------------------------------------------
# FLUX.1

FLUX_CHANNELS = 8
FLUX_TEXT_CHANNELS = 24
FLUX_POOLED_CHANNELS = 12


def flux_model(
    device,
    dtype=torch.float32,
    *,
    seed=0,
    blocks=2,
    single_blocks=2,
    heads=2,
    head_dim=16,
    **config,
):
    """Norm weights are not 1, and the modulations differ from token stream to stream and are not small."""
    torch.manual_seed(seed)
    # Each of the three axes has an even number of a head's elements.
    axis = head_dim // 3 // 2 * 2
    model = FluxTransformer2DModel(
        in_channels=FLUX_CHANNELS,
        num_layers=blocks,
        num_single_layers=single_blocks,
        attention_head_dim=head_dim,
        num_attention_heads=heads,
        joint_attention_dim=FLUX_TEXT_CHANNELS,
        pooled_projection_dim=FLUX_POOLED_CHANNELS,
        guidance_embeds=config.pop("guidance_embeds", True),
        axes_dims_rope=(head_dim - 2 * axis, axis, axis),
        **config,
    )
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.RMSNorm):
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
        elif name.endswith(
            ("norm.linear", "norm1.linear", "norm1_context.linear", "norm_out.linear")
        ):
            torch.nn.init.normal_(module.weight, std=module.in_features**-0.5)
            torch.nn.init.normal_(module.bias, std=0.5)
        elif name.startswith("time_text_embed") and isinstance(module, torch.nn.Linear):
            # So that the modulation depends on the timestep, the guidance and the text.
            torch.nn.init.normal_(module.weight, std=2 * module.in_features**-0.5)
    return model.to(device, dtype).eval()


def flux_inputs(
    device,
    dtype=torch.float32,
    *,
    seed=None,
    batch=2,
    tokens=1,
    text_length=5,
    has_guidance=True,
    **options,
):
    normal = _seeded(seed, device)
    height, width = 3 + tokens, 3

    def power_of_two(first):
        """The model multiplies by 1000 in its own dtype: of these the product is exact in each."""
        return first * 2.0 ** (4 * normal(batch).sigmoid()).floor()

    img_ids = torch.zeros(height, width, 3)
    img_ids[..., 1] = torch.arange(height)[:, None]
    img_ids[..., 2] = torch.arange(width)
    return {
        "hidden_states": normal(batch, height * width, FLUX_CHANNELS).to(dtype),
        "encoder_hidden_states": normal(batch, text_length, FLUX_TEXT_CHANNELS).to(dtype),
        "pooled_projections": normal(batch, FLUX_POOLED_CHANNELS).to(dtype),
        "timestep": power_of_two(1 / 8).to(dtype),
        "guidance": power_of_two(1 / 2) if has_guidance else None,
        "img_ids": img_ids.flatten(0, 1).to(device),
        "txt_ids": torch.zeros(text_length, 3, device=device),
        **options,
    }


FLUX = Family(
    name="flux",
    model=flux_model,
    inputs=flux_inputs,
    inexact=("hidden_states", "encoder_hidden_states", "pooled_projections"),
    options={
        "two samples": {},
        "batch of 1": {"batch": 1},
        "more tokens": {"batch": 3, "tokens": 5, "text_length": 9},
        "one token of text": {"text_length": 1},
    },
    parts={
        "block": "transformer_blocks.0",
        "next_block": "transformer_blocks.1",
        "single_block": "single_transformer_blocks.0",
        "last_block": "single_transformer_blocks.1",
        "attention": "transformer_blocks.0.attn",
        "single_attention": "single_transformer_blocks.0.attn",
        "norm": "transformer_blocks.1.norm1",
        "inner_norm": "transformer_blocks.1.norm1.norm",
        "norm2": "transformer_blocks.0.norm2",
        "single_norm": "single_transformer_blocks.1.norm",
        "qk_norm": "transformer_blocks.0.attn.norm_q",
        "added_norm": "transformer_blocks.0.attn.norm_added_k",
        "linear": "transformer_blocks.0.attn.add_k_proj",
        "output": "single_transformer_blocks.0.proj_out",
        "feed_forward": "transformer_blocks.0.ff",
        "feed_forward_of_text": "transformer_blocks.0.ff_context",
        "activation": "transformer_blocks.0.ff_context.net.0",
        "up": "single_transformer_blocks.0.proj_mlp",
        "gelu": "single_transformer_blocks.0.act_mlp",
        "rope": "pos_embed",
        "modulation": "transformer_blocks.0.norm1.linear",
    },
    lora_targets=[
        *("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj"),
        *("to_add_out", "ff.net.0.proj", "ff.net.2", "proj_mlp", "proj_out", "norm1.linear"),
    ],
    caches=("first_block", "pyramid", "taylorseer", "mag"),
    module="diffusers.models.transformers.transformer_flux",
    processor="FluxAttnProcessor",
    block_lists=("transformer_blocks", "single_transformer_blocks"),
)

FAMILIES = {family.name: family for family in (LTX, FLUX)}
every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=str)
