"""A model family for the tests of injection: a small model, inputs, names of its parts."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
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
# Common paths of their parts, and the linear layers of their attention.
JOINT_PARTS = {
    "block": "transformer_blocks.0",
    "next_block": "transformer_blocks.1",
    "attention": "transformer_blocks.0.attn",
    "qk_norm": "transformer_blocks.0.attn.norm_q",
    "added_norm": "transformer_blocks.0.attn.norm_added_k",
    "linear": "transformer_blocks.0.attn.add_k_proj",
    "rope": "pos_embed",
}
JOINT_LORA = [
    *("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
]


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
        module: the module of diffusers that defines it.
        processor: the class of its attention processors, in that module.
        block_lists: the paths of its lists of blocks, in execution order.
        condition: the blocks' argument that gives their modulation.
        functions: the functions of its module that attention uses.
        has_backends: whether diffusers' choice of attention backend applies; otherwise it is PyTorch's.
        one_block: a configuration with one block of each kind.
        main: the name of the argument that is denoised: a tensor, or a list with one for each sample.
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
    block_lists: tuple[str, ...] = ("transformer_blocks",)
    condition: str = "temb"
    functions: tuple[str, ...] = ("apply_rotary_emb", "dispatch_attention_fn")
    has_backends: bool = True
    one_block: dict = field(default_factory=lambda: {"blocks": 1})
    main: str = "hidden_states"

    def cast(self, arguments, dtype):
        """The inputs in another dtype; masks, timesteps and positions keep theirs."""
        inexact = {name: arguments[name] for name in self.inexact}
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
        return run(copy.deepcopy(model).double(), self.cast(arguments, torch.float64))

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


def powers_of_two(normal, batch, first):
    """Values whose product with 1000, which a model computes in its dtype, is exact in all dtypes."""
    return first * 2.0 ** (4 * normal(batch).sigmoid()).floor()


def in_dtype(model, device, dtype, is_kept):
    """The model in a dtype, except for the parameters that a published model keeps in float32.

    Args:
        is_kept: tells for a parameter's name whether the model keeps it.
    """
    kept = {name: p.detach().clone() for name, p in model.named_parameters() if is_kept(name)}
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
        elif name.endswith(modulations):
            init.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                init.normal_(module.bias, std=0.5)
        elif name.startswith(embedding) and isinstance(module, torch.nn.Linear):
            init.normal_(module.weight, std=gain * module.in_features**-0.5)
