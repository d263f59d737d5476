"""diffusers' Transformer2DModel of UNets, its BasicTransformerBlocks and their attentions."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from diffusers import Transformer2DModel
from diffusers.models import attention_processor
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from torch import nn

from checks import relative_distance
from injected_pairs import (
    assert_alike,
    assert_as_close_as_eager,
    assert_gradients_agree,
    fallen_back,
    injected,
    on_kernels,
)
from ltx_models import kernel_calls
from small_models import run

pytestmark = pytest.mark.usefixtures("_one_thread", "_fresh_compiler")

BFLOAT16, HALF, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
BLOCK, MODEL = "BasicTransformerBlock", "Transformer2DModel"
BLOCKS = 3
FIRST, LAST = torch.contiguous_format, torch.channels_last
# The minimum relative distance because of a change.
CHANGED = 0.03


def transformer(device, dtype=HALF, memory_format=FIRST, **config):
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 2, "attention_head_dim": 64, "in_channels": 32}
    sizes["num_layers"] = BLOCKS
    options = {"norm_num_groups": 4, "cross_attention_dim": 24, "use_linear_projection": True}
    model = Transformer2DModel(**{**sizes, **options, **config})
    for name, parameter in model.named_parameters():
        if ".norm" in name and name.endswith("weight"):
            nn.init.uniform_(parameter, 0.5, 1.5)
        elif parameter.dim() > 1:
            nn.init.normal_(parameter, std=1.5 * parameter.shape[-1] ** -0.5)  # scores have peaks
    return model.to(device, dtype, memory_format=memory_format).eval()


def arguments_of(device, dtype=HALF, seed=1, **more):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(device, dtype)

    text = normal(2, 5, 24)
    return {"hidden_states": normal(2, 32, 6, 4), "encoder_hidden_states": text, **more}


def pair(kernel, device, change=None, dtype=HALF, **config):
    """(injected, plain, report)"""
    options = {"attention": config.pop("attention", True)}
    return injected(kernel, transformer(device, dtype, **config), change, **options)


# Each sum is fused with the norm after it. The first norm and the last sum are alone.
OPERATIONS = {
    "layer_norm": 1,
    "gated_residual_layer_norm_modulate": 3 * BLOCKS - 1,
    "gated_residual": 1,
    "attention": 2 * BLOCKS,
    "geglu": BLOCKS,
    "group_norm": 1,
}
WITHOUT_ATTENTION = {name: n for name, n in OPERATIONS.items() if name != "attention"}


@pytest.mark.parametrize("use_linear_projection", [True, False])
@pytest.mark.parametrize("dtype", [BFLOAT16, HALF], ids=str)
def test_it_is_as_close_to_float32_as_eager(kernel, device, dtype, use_linear_projection):
    config = {"dtype": dtype, "use_linear_projection": use_linear_projection}
    model, plain, report = pair(kernel, device, **config)
    make = lambda dtype, seed: arguments_of(device, dtype, seed)  # noqa: E731
    assert_as_close_as_eager(model, plain, make, samples=12)
    counts = on_kernels(report)
    assert (counts[BLOCK], counts["Attention"]) == (12 * BLOCKS, 24 * BLOCKS)
    assert fallen_back(report) == {}
    arguments = arguments_of(device, dtype)
    assert kernel_calls(run, model, arguments) == OPERATIONS
    kernel.eject_kernels(model)
    assert torch.equal(run(model, arguments), run(plain, arguments))


@pytest.mark.parametrize("options", [{"dtype": FLOAT32}, {"attention": False}], ids=str)
def test_norms_alone(kernel, device, options):
    """Where attention is PyTorch's."""
    model, plain, report = pair(kernel, device, **options)
    arguments = arguments_of(device, plain.dtype)
    assert kernel_calls(run, model, arguments) == WITHOUT_ATTENTION
    assert on_kernels(report)[BLOCK] == BLOCKS
    assert_alike(model, plain, arguments)


@pytest.mark.parametrize(
    "config",
    [
        {"cross_attention_dim": None},
        {"double_self_attention": True},
        {"only_cross_attention": True, "cross_attention_dim": 128},
        {"attention_bias": True, "activation_fn": "gelu"},
        {"num_attention_heads": 3, "attention_head_dim": 40},
        {"norm_elementwise_affine": False},
    ],
    ids=str,
)
def test_kinds_of_blocks(kernel, device, config):
    model, plain, report = pair(kernel, device, **config)
    arguments = arguments_of(device)
    if config.get("cross_attention_dim", 24) is None or config.get("double_self_attention"):
        del arguments["encoder_hidden_states"]
    elif config.get("only_cross_attention"):
        text = arguments["encoder_hidden_states"]
        arguments["encoder_hidden_states"] = text.repeat(1, 1, 6)[..., :128]
    assert_alike(model, plain, arguments, times=1)
    assert on_kernels(report)[BLOCK] == BLOCKS


@pytest.mark.parametrize("norm_type", ["ada_norm_single", "ada_norm"])
def test_blocks_with_other_norms_are_left_to_their_parts(kernel, device, norm_type):
    _, _, report = pair(kernel, device, norm_type=norm_type, num_embeds_ada_norm=10)
    replaced = {entry.module for entry in report.replaced}
    assert BLOCK not in replaced and "Attention" in replaced


@pytest.mark.parametrize("batch", [0, 1, 2])
def test_blocks_by_themselves(kernel, device, batch):
    """With positions that are added to the norms."""
    torch.manual_seed(0)
    positions = {"positional_embeddings": "sinusoidal", "num_positional_embeddings": 32}
    blocks = (BasicTransformerBlock(128, 2, 64, cross_attention_dim=24, **positions),)
    plain = nn.ModuleList(blocks).to(device, HALF).eval()
    model, plain, report = injected(kernel, plain)
    x, text = (torch.randn(batch, *shape).to(device, HALF) for shape in ((7, 128), (5, 24)))

    def forward(blocks, _):
        with torch.no_grad():
            return blocks[0](x, encoder_hidden_states=text)

    if batch:
        assert_alike(model, plain, (), forward=forward, times=1)
        assert on_kernels(report)[BLOCK] == 1
    else:
        assert forward(model, ()).shape == x.shape


def test_masks(kernel, device):
    model, plain, report = pair(kernel, device)
    keep = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]], device=device)
    of_tokens = torch.ones(2, 24, device=device)
    of_tokens[0, 3:9] = 0
    arguments = arguments_of(device, encoder_attention_mask=keep, attention_mask=of_tokens)
    unlike = run(plain, arguments_of(device))
    assert_alike(model, plain, arguments, unlike=unlike, times=1)
    assert on_kernels(report)["Attention"] == 2 * BLOCKS and fallen_back(report) == {}


@pytest.mark.parametrize("chunk", [2, 12])
def test_chunked_feed_forwards(kernel, device, chunk):
    def set_chunk(model):
        model.transformer_blocks[1].set_chunk_feed_forward(chunk, 1)

    model, plain, report = pair(kernel, device, set_chunk)
    assert_alike(model, plain, arguments_of(device), times=1)
    reason = "its feed-forward is chunked"
    assert fallen_back(report) == {"transformer_blocks.1": {reason: 1}}


def test_arguments_that_are_for_the_processors(kernel, device):
    model, plain, report = pair(kernel, device)
    for given in ({"scale": 0.5}, {"unknown": 3}, {}):
        arguments = arguments_of(device, cross_attention_kwargs=given)
        assert_alike(model, plain, arguments, times=1)
    fallen = [calls.fell_back for calls in report.calls if calls.module == BLOCK]
    assert fallen == [{"it was given a scale": 1}] * BLOCKS


class Halving(AttnProcessor2_0):
    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs) * 0.5


def half(module, args, output):
    return output * 0.5


def put(path, make):
    """A change of a block: ``make(block)`` becomes its attribute at a path."""
    owner, _, name = path.rpartition(".")
    return lambda block: setattr(block.get_submodule(owner), name, make(block))


def like_weights(make):
    """A module that has the device and the dtype of the block."""
    return lambda block: make().to(block.norm1.weight)


CHANGES = {
    "the processor without PyTorch's attention": lambda block: block.attn2.set_processor(
        AttnProcessor()
    ),
    "a hook on the first norm": lambda block: block.norm1.register_forward_hook(half),
    "a factor": put("attn1.rescale_output_factor", lambda block: 2.0),
    "a residual": put("attn1.residual_connection", lambda block: True),
    "fewer heads": put("attn1.heads", lambda block: 1),
    "a norm of queries": put("attn1.norm_q", like_weights(lambda: nn.LayerNorm(64))),
    "a group norm": put("attn1.group_norm", like_weights(lambda: nn.GroupNorm(4, 128))),
    "another forward": put("forward", lambda block: lambda hidden_states, **_: hidden_states),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_changes(kernel, device, change):
    """Of the second block, after a call."""
    model, plain, _ = pair(kernel, device)
    arguments = arguments_of(device)
    run(model, arguments)
    before = run(plain, arguments)
    for candidate in (model, plain):
        CHANGES[change](candidate.transformer_blocks[1])
    has_effect = change != "the processor without PyTorch's attention"
    assert_alike(model, plain, arguments, unlike=before if has_effect else None, changed=CHANGED)


class Meddling(AttnProcessor2_0):
    """A module that changes something during its call."""

    def __init__(self, change):
        super().__init__()
        self._change = change

    def __call__(self, *args, **kwargs):
        self._change()
        return super().__call__(*args, **kwargs)


@pytest.mark.parametrize("heads", [(2, 64), (3, 40)], ids=["kernel", "no kernel"])
@pytest.mark.parametrize("where", ["attn2", "attn1.to_q", "norm3", "ff.net.2", "processor"])
def test_a_change_in_the_middle_of_a_forward(kernel, device, where, heads):
    """User code in the first block changes anything that the next blocks use."""
    sizes = {"num_attention_heads": heads[0], "attention_head_dim": heads[1]}
    model, plain, _ = pair(kernel, device, **sizes)
    arguments = arguments_of(device)
    run(model, arguments)
    before = run(plain, arguments)
    for candidate in (model, plain):
        first, second, third = candidate.transformer_blocks

        def change(*_, second=second, third=third):
            second.ff.net[0].proj.weight = nn.Parameter(second.ff.net[0].proj.weight * 2)
            third.attn1.to_out[0].register_forward_hook(lambda module, args, output: output * 3)
            third.attn2.set_processor(Halving())

        if where == "processor":
            first.attn1.set_processor(Meddling(change))
        else:
            first.get_submodule(where).register_forward_hook(change)
    assert_alike(model, plain, arguments, unlike=before, times=1)


def test_an_attention_of_diffusers_that_is_replaced(kernel, device, monkeypatch):
    """By a different function in the namespace of its processors."""
    model, plain, _ = pair(kernel, device)
    arguments = arguments_of(device)
    before = run(model, arguments)
    halved = lambda *args, **kwargs: 0.5 * F.scaled_dot_product_attention(*args, **kwargs)  # noqa: E731
    functions = {**vars(F), "scaled_dot_product_attention": halved}
    monkeypatch.setattr(attention_processor, "F", SimpleNamespace(**functions))
    assert_alike(model, plain, arguments, unlike=before, changed=CHANGED)


@pytest.mark.parametrize("what", ["the model", "a block"])
def test_compiled(kernel, device, what):
    model, plain, _ = pair(kernel, device, num_layers=1)
    module = model if what == "the model" else model.transformer_blocks[0]
    module.compile(backend="eager", fullgraph=True)
    assert_alike(model, plain, arguments_of(device), times=1)


@pytest.mark.parametrize("memory_format", [FIRST, LAST], ids=str)
def test_gradients(kernel, device, memory_format):
    config = {"dtype": FLOAT32, "memory_format": memory_format}
    model, plain, _ = pair(kernel, device, **config)
    arguments = arguments_of(device, FLOAT32)
    arguments["hidden_states"].requires_grad_()
    assert_gradients_agree(model, plain, arguments, 1e-3)


# --------------------------------------------------------------------------------------------------
# The model around the blocks


def pictures_of(device, memory_format=LAST):
    arguments = arguments_of(device, FLOAT32)
    image = arguments["hidden_states"].contiguous(memory_format=memory_format)
    return {**arguments, "hidden_states": image}


@pytest.mark.parametrize("use_linear_projection", [True, False])
@pytest.mark.parametrize("memory_format", [LAST, FIRST], ids=str)
def test_the_format_is_the_classs(kernel, device, use_linear_projection, memory_format):
    config = {"memory_format": memory_format, "use_linear_projection": use_linear_projection}
    model, plain, report = pair(kernel, device, dtype=FLOAT32, **config)
    arguments = pictures_of(device, memory_format)
    with torch.no_grad():
        (out,), (expected,) = (m(**arguments, return_dict=False) for m in (model, plain))
    assert out.stride() == expected.stride()
    assert_alike(model, plain, arguments, times=1)
    assert on_kernels(report)[MODEL] == 2
    assert fallen_back(report) == {}


def test_calls_that_its_own_code_computes(kernel, device):
    """Its class of results, masks of booleans, a scale."""
    model, plain, report = pair(kernel, device)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]], device=device)
    for given in ({"encoder_attention_mask": mask}, {"cross_attention_kwargs": {"scale": None}}):
        assert_alike(model, plain, arguments_of(device, **given), times=1)
    with torch.no_grad():
        outs = [candidate(**arguments_of(device)) for candidate in (model, plain)]
    assert type(outs[0]) is type(outs[1])
    assert relative_distance(outs[0].sample, outs[1].sample) < 0.01
    assert on_kernels(report).get(MODEL, 0) == 0 and fallen_back(report) == {}


def test_hooks_on_the_projection_see_it(kernel, device):
    model, _, _ = pair(kernel, device, dtype=FLOAT32, memory_format=LAST)
    arguments = pictures_of(device)
    before = run(model, arguments)
    hook = model.proj_out.register_forward_hook(lambda module, args, out: out * 0)
    assert torch.equal(run(model, arguments), arguments["hidden_states"].flatten())
    hook.remove()
    assert torch.equal(run(model, arguments), before)


def test_another_method_of_the_users_is_called(kernel, device, monkeypatch):
    model, _, report = pair(kernel, device, dtype=FLOAT32, memory_format=LAST)

    def zeros(*args, residual, **kwargs):
        return torch.zeros_like(residual)

    name = "_get_output_for_continuous_inputs"
    monkeypatch.setattr(Transformer2DModel, name, zeros)
    assert not run(model, pictures_of(device)).any()
    assert fallen_back(report)[""] == {f"{name} was replaced": 1}


def test_subclasses_are_left_alone(kernel, device):
    model = nn.Sequential(transformer(device))
    model[0].__class__ = type("Other", (Transformer2DModel,), {})
    report = kernel.inject_kernels(model)
    assert "Other" not in [entry.module for entry in report.replaced]
