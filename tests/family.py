"""A model family for the tests of injection: a small model, inputs, names of its parts."""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import diffusers
import torch
from diffusers.loaders import PeftAdapterMixin
from torch.utils import _pytree as pytree

# A head size that attention's kernel accepts, and one for the smallest models.
KERNEL_HEADS = {"heads": 2, "head_dim": 64}
TINY_HEADS = {"heads": 2, "head_dim": 16}


# Variants of the inputs of models with an image and a text stream.
TWO_STREAM_OPTIONS = {
    "two samples": {},
    "batch of 1": {"batch": 1},
    "more tokens": {"batch": 3, "tokens": 5, "text_length": 9},
    "one token of text": {"text_length": 1},
}
# The linear layers of attention and of a feed-forward, for peft.
ATTENTION_LORA = ["to_q", "to_k", "to_v", "to_out.0"]
FEED_FORWARD_LORA = ["ff.net.0.proj", "ff.net.2"]
JOINT_LORA = [*ATTENTION_LORA, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]


def block_parts(attention, blocks="transformer_blocks"):
    """The paths of a block's common parts. ``attention``: its path in a block."""
    return {
        "block": f"{blocks}.0",
        "next_block": f"{blocks}.1",
        "attention": f"{blocks}.0.{attention}",
        "norm": f"{blocks}.1.norm1",
        "qk_norm": f"{blocks}.0.{attention}.norm_q",
        "linear": f"{blocks}.0.{attention}.to_k",
        "output": f"{blocks}.0.{attention}.to_out.0",
    }


def feed_forward_parts(path="transformer_blocks.0.ff"):
    return {"feed_forward": path, "activation": f"{path}.net.0", "up": f"{path}.net.0.proj"}


# Parts of models with an image and a text stream, and those of the two streams' feed-forwards.
JOINT_PARTS = {
    **block_parts("attn"),
    "norm2": "transformer_blocks.0.norm2",
    "added_norm": "transformer_blocks.0.attn.norm_added_k",
    "linear": "transformer_blocks.0.attn.add_k_proj",
    "rope": "pos_embed",
}
JOINT_FEED_FORWARD_PARTS = {
    **feed_forward_parts(),
    "feed_forward_of_text": "transformer_blocks.0.ff_context",
    "activation": "transformer_blocks.0.ff_context.net.0",
    "modulation": "transformer_blocks.0.norm1.linear",
}


@dataclass(frozen=True)
class Family:
    """A family of injected models. All of the tests' knowledge about it is here.

    Attributes:
        name: the family's name in the tests.
        model: ``model(device, dtype=torch.float32, *, seed=0, heads, head_dim, **config)`` makes a model of
            two blocks of each kind with random weights, in which every parameter matters.
        inputs: ``inputs(device, dtype=torch.float32, *, seed=None, batch=2, tokens=1, text_length=5,
            **options)`` makes the keyword arguments of one forward; ``tokens`` scales their number.
        inexact: names of the arguments with the model's dtype.
        options: variants of the inputs by name: keyword arguments for ``inputs``.
        parts: the path of one module of each kind: block, next_block, attention, norm, qk_norm, linear,
            activation, feed_forward, up (its linear layer), output, rope, modulation, and others.
        lora_targets: linear layers of the blocks, for peft.
        caches: the names of diffusers' caches that the family supports.
        module: the module of diffusers that defines it, by default that of its name.
        processor: the class of its attention processors, in that module.
        block_lists: the paths of its lists of blocks, in execution order.
        condition: the blocks' argument that gives their modulation.
        functions: the functions of its module that attention uses.
        has_backends: whether diffusers' choice of attention backend applies; otherwise it is PyTorch's.
        one_block: a configuration with one block of each kind.
        main: the name of the argument that is denoised: a tensor, or a list with one for each sample.
        fp8_calls: the calls of each FP8 operation in a forward of the small model; the operations are those
            of ``test_injection_fp8.test_calls``.
        fp8_twice: the number of FP8 layers that a forward computes for each of two streams.
        keeps_rotations: whether its kernels take matrices of rotations, and multiples of these, only.
    """

    name: str
    model: Callable
    inputs: Callable
    parts: dict
    processor: str
    module: str = ""
    inexact: tuple[str, ...] = ("hidden_states", "encoder_hidden_states")
    options: dict = field(default_factory=lambda: TWO_STREAM_OPTIONS)
    lora_targets: list = field(default_factory=lambda: [*ATTENTION_LORA, *FEED_FORWARD_LORA])
    caches: tuple[str, ...] = ()
    block_lists: tuple[str, ...] = ("transformer_blocks",)
    condition: str = "temb"
    functions: tuple[str, ...] = ("apply_rotary_emb", "dispatch_attention_fn")
    has_backends: bool = True
    one_block: dict = field(default_factory=lambda: {"blocks": 1})
    main: str = "hidden_states"
    fp8_calls: list = field(default_factory=list)
    fp8_twice: int = 0
    keeps_rotations: bool = False

    def __post_init__(self):
        if not self.module:
            module = f"diffusers.models.transformers.transformer_{self.name}"
            object.__setattr__(self, "module", module)

    def cast(self, arguments, dtype):
        """The inputs in another dtype; masks, timesteps and positions keep theirs."""
        inexact = {name: arguments[name] for name in self.inexact if name in arguments}
        return {**arguments, **pytree.tree_map(lambda tensor: tensor.to(dtype), inexact)}

    def with_main(self, arguments, change):
        """The inputs with ``change`` applied to each tensor that is denoised."""
        return {**arguments, self.main: pytree.tree_map(change, arguments[self.main])}

    def blocks(self, model):
        """All blocks in execution order."""
        return [block for path in self.block_lists for block in model.get_submodule(path)]

    def part(self, model, kind):
        return model.get_submodule(self.parts[kind])

    def reference(self, model, arguments):
        """The result of a model without kernels in float64."""
        exact = self.in_float64(copy.deepcopy(model))
        return run(exact, self.cast(arguments, torch.float64))

    def in_float64(self, model):
        return model.double()

    def __str__(self):
        return self.name


@torch.no_grad()
def run(model, arguments):
    return joined(model(**arguments, return_dict=False)[0])


def joined(result):
    """A model's result; a list of tensors as one row."""
    if isinstance(result, torch.Tensor):
        return result
    return torch.cat([tensor.flatten() for tensor in result])


def prepared(family, device, dtype=torch.float32, *, config=None, **options):
    """(model, the same model without kernels, arguments); the options are for the inputs."""
    model = family.model(device, dtype, **(config or {}))
    return model, copy.deepcopy(model), family.inputs(device, dtype, **options)


def assert_close(out, expected, slack=1e-5):
    """Compares a float32 model's values with float64."""
    assert torch.isfinite(expected).all()
    expected = expected.double()
    scale = expected.abs().max().item()
    torch.testing.assert_close(
        out.double(), expected, rtol=slack, atol=slack * scale, check_device=False
    )


def seeded(seed, device):
    """A generator on the CPU, so that all devices get the same values."""
    generator = torch.Generator()
    if seed is None:
        seed = int(torch.randint(2**31, ()))
    generator.manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(device)

    return normal


def model_of(cls, modulations=(), embedding=(), *, gain=2, blocks=2, finish=None):
    """A decorator of a function that returns a configuration: makes it a family's ``model``.

    Args:
        cls: the name of the model's class in diffusers.
        modulations, embedding, gain: see ``make_all_matter``.
        blocks: the number of blocks by default.
        finish: sets parameters of the model that ``make_all_matter`` does not know.
    """

    def decorator(config):
        def make(
            device, dtype=torch.float32, *, seed=0, blocks=blocks, heads=2, head_dim=16, **changes
        ):
            if "single_blocks" in changes:
                changes["num_single_layers"] = changes.pop("single_blocks")
            torch.manual_seed(seed)
            own_class = with_adapters(getattr(diffusers, changes.pop("cls", cls)))
            model = own_class(**{**config(blocks, heads, head_dim), **changes})
            make_all_matter(model, modulations, embedding, gain=gain)
            if finish is not None:
                finish(model)
            return in_dtype(model, device, dtype)

        make.config, make.cls = config, cls
        return make

    return decorator


@functools.cache
def with_adapters(cls):
    """The class, with diffusers' methods for adapters of peft. Without them users call peft itself."""
    if hasattr(cls, "add_adapter"):
        return cls
    return type(cls.__name__, (cls, PeftAdapterMixin), {"__module__": cls.__module__})


def sizes(blocks, heads, head_dim):
    """Arguments of most models."""
    return {"num_layers": blocks, "num_attention_heads": heads, "attention_head_dim": head_dim}


def three_axes(head_dim):
    """An even number of a head's elements for each axis of positions."""
    axis = head_dim // 3 // 2 * 2
    return head_dim - 2 * axis, axis, axis


def inputs_of(make):
    """A decorator: makes a function of random numbers a family's ``inputs``.

    ``make(normal, dtype, batch, tokens, text_length, **options)`` returns the arguments of a forward.
    """

    def inputs(
        device, dtype=torch.float32, *, seed=None, batch=2, tokens=1, text_length=5, **options
    ):
        arguments = make(seeded(seed, device), dtype, batch, tokens, text_length, **options)
        return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), arguments)

    return inputs


def padded(batch, length, shortest=1):
    """A mask with a different number of tokens for each sample, at least ``shortest``."""
    return torch.arange(length) < (torch.arange(batch) * 3 % length + shortest)[:, None]


def text_mask(batch, length, shortest, holes=False):
    """A different number of valid tokens for each sample, first or after some padding."""
    mask = padded(batch, length, shortest)
    if holes:
        mask = mask.flip(1)
        mask[:, 0] = True
    return mask.long()


def padded_prompts(batch, length):
    """A mask of prompts of different lengths, the first of them without padding."""
    return torch.arange(length) < (length - torch.arange(batch) * 3 % length)[:, None]


def powers_of_two(normal, batch, first):
    """Values whose product with 1000, which a model computes in its dtype, is exact in all dtypes."""
    return first * 2.0 ** (4 * normal(batch).sigmoid()).floor()


def in_dtype(model, device, dtype):
    """The model in a dtype, except for the parts that diffusers keeps in float32."""
    parts = {*(type(model)._keep_in_fp32_modules or ())}
    kept = {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if not parts.isdisjoint(name.split("."))
    }
    model.to(device, dtype).eval()
    if dtype != torch.float64:
        for name, values in kept.items():
            model.get_parameter(name).data = values.to(device)
    return model


def make_all_matter(model, modulations, embedding, *, gain=2):
    """Sets norm weights different from 1, and large modulations that depend on all inputs.

    Args:
        modulations: name suffixes of the linear layers for modulations.
        embedding: name prefix of the layers that embed timestep, guidance and text.
        gain: the standard deviation of their outputs for inputs of standard deviation 1.
    """
    init = torch.nn.init
    for name, parameter in model.named_parameters():
        if name.endswith("scale_shift_table"):
            init.normal_(parameter, std=0.5)
    for name, module in model.named_modules():
        if type(module).__name__ in ("RMSNorm", "LayerNorm", "FP32LayerNorm"):
            if module.weight is not None:
                init.uniform_(module.weight, 0.5, 1.5)
            if getattr(module, "bias", None) is not None:
                init.normal_(module.bias, std=0.5)
        elif name.endswith(modulations) and isinstance(module, torch.nn.Linear):
            init.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                init.normal_(module.bias, std=0.5)
        elif name.startswith(embedding) and isinstance(module, torch.nn.Linear):
            init.normal_(module.weight, std=gain * module.in_features**-0.5)
