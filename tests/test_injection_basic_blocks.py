"""diffusers' BasicTransformerBlock in UNets, and its attentions, as a whole."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from diffusers import Transformer2DModel
from diffusers.models import attention_processor
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from injected_pairs import distance
from ltx_models import kernel_calls

pytestmark = pytest.mark.usefixtures("_one_thread", "_fresh_compiler")

BFLOAT16, HALF = torch.bfloat16, torch.float16
BLOCKS = 3
# Relative, of the distance from eager: what roundings leave, and above it what a change must make.
CLOSE, CHANGED = 0.006, 0.03


def transformer(device, dtype=HALF, **config):
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 2, "attention_head_dim": 64, "in_channels": 32}
    options = {"norm_num_groups": 4, "cross_attention_dim": 24, "use_linear_projection": True}
    model = Transformer2DModel(num_layers=BLOCKS, **{**sizes, **options, **config})
    for name, parameter in model.named_parameters():
        if ".norm" in name and name.endswith("weight"):
            nn.init.uniform_(parameter, 0.5, 1.5)
        elif parameter.dim() > 1:
            nn.init.normal_(parameter, std=1.5 * parameter.shape[-1] ** -0.5)  # scores have peaks
    return model.to(device, dtype).eval()


def arguments_of(device, dtype=HALF, seed=1, **more):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(device, dtype)

    text = normal(2, 5, 24)
    return {"hidden_states": normal(2, 32, 6, 4), "encoder_hidden_states": text, **more}


def run(model, arguments):
    with torch.no_grad():
        return model(**arguments, return_dict=False)[0]


def pair(kernel, device, dtype=HALF, **config):
    plain = transformer(device, dtype, **config)
    model = copy.deepcopy(plain)
    return model, plain, kernel.inject_kernels(model)


def counted(report, *classes):
    """Calls on the kernels, and those that fell back, of the blocks and their attentions."""
    chosen = [calls for calls in report.calls if calls.module in (classes or ("Attention", BLOCK))]
    return sum(calls.on_kernels for calls in chosen), sum(bool(c.fell_back) for c in chosen)


BLOCK = "BasicTransformerBlock"
# One pass for each sum and the norm after it, but for the first norm and the last sum.
OPERATIONS = {
    "layer_norm": 1,
    "gated_residual_layer_norm_modulate": 3 * BLOCKS - 1,
    "gated_residual": 1,
    "attention": 2 * BLOCKS,
    "geglu": BLOCKS,
    "group_norm": 1,
}
of_projection = pytest.mark.parametrize("use_linear_projection", [True, False])


@of_projection
@pytest.mark.parametrize("dtype", [BFLOAT16, HALF], ids=str)
def test_it_is_as_close_to_float64_as_eager(kernel, device, dtype, use_linear_projection):
    model, plain, report = pair(kernel, device, dtype, use_linear_projection=use_linear_projection)
    exact = copy.deepcopy(plain).double().cpu()
    errors = torch.zeros(2, dtype=torch.float64)
    for seed in range(12):
        arguments = arguments_of(device, dtype, seed)
        wide = {name: x.double().cpu() for name, x in arguments.items()}
        expected = run(exact, wide)
        for i, candidate in enumerate((model, plain)):
            errors[i] += (run(candidate, arguments).cpu().double() - expected).square().sum()
    error, eager_error = errors.sqrt().tolist()
    assert 0 < error <= 1.05 * eager_error
    assert counted(report) == (12 * BLOCKS * 3, 0)
    assert kernel_calls(run, model, arguments) == OPERATIONS
    kernel.eject_kernels(model)
    assert torch.equal(run(model, arguments), run(plain, arguments))


def test_float32_has_the_norms(kernel, device):
    model, plain, report = pair(kernel, device, torch.float32)
    arguments = arguments_of(device, torch.float32)
    torch.testing.assert_close(run(model, arguments), run(plain, arguments), rtol=1e-4, atol=1e-4)
    assert counted(report, BLOCK) == (BLOCKS, 0)
    calls = kernel_calls(run, model, arguments)
    assert calls == {name: n for name, n in OPERATIONS.items() if name != "attention"}


# --------------------------------------------------------------------------------------------------
# Other kinds of blocks, and other calls


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
        arguments["encoder_hidden_states"] = arguments["encoder_hidden_states"].repeat(1, 1, 6)[
            ..., :128
        ]
    assert distance(run(model, arguments), run(plain, arguments)) < CLOSE
    assert counted(report, BLOCK) == (BLOCKS, 0)


@pytest.mark.parametrize("norm_type", ["ada_norm_single", "ada_norm"])
def test_blocks_with_other_norms_are_left_to_their_parts(kernel, device, norm_type):
    config = {"norm_type": norm_type, "num_embeds_ada_norm": 10}
    model, _, report = pair(kernel, device, **config)
    assert BLOCK not in {entry.module for entry in report.replaced}
    assert "Attention" in {entry.module for entry in report.replaced}


def test_positions_that_are_added_to_the_norms(kernel, device):
    torch.manual_seed(0)
    options = {"cross_attention_dim": 24, "positional_embeddings": "sinusoidal"}
    blocks = [
        BasicTransformerBlock(128, 2, 64, num_positional_embeddings=32, **options) for _ in range(2)
    ]
    plain = nn.Sequential(*blocks).to(device, HALF).eval()
    model = copy.deepcopy(plain)
    report = kernel.inject_kernels(model)
    x, text = torch.randn(2, 7, 128).to(device, HALF), torch.randn(2, 5, 24)
    results = []
    with torch.no_grad():
        for candidate in (model, plain):
            y = x
            for block in candidate:
                y = block(y, encoder_hidden_states=text.to(device, HALF))
            results.append(y)
    assert distance(*results) < CLOSE
    assert counted(report, BLOCK) == (2, 0)


def test_masks(kernel, device):
    model, plain, report = pair(kernel, device)
    keep = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]], device=device)
    of_tokens = torch.ones(2, 24, device=device)
    of_tokens[0, 3:9] = 0
    arguments = arguments_of(device, encoder_attention_mask=keep, attention_mask=of_tokens)
    expected = run(plain, arguments)
    assert distance(run(plain, arguments_of(device)), expected) > CHANGED
    assert distance(run(model, arguments), expected) < CLOSE
    assert counted(report) == (BLOCKS * 3, 0)


@pytest.mark.parametrize("chunk", [2, 12])
def test_chunked_feed_forwards(kernel, device, chunk):
    model, plain, report = pair(kernel, device)
    arguments = arguments_of(device)
    run(model, arguments)
    for candidate in (model, plain):
        candidate.transformer_blocks[1].set_chunk_feed_forward(chunk, 1)
    assert distance(run(model, arguments), run(plain, arguments)) < CLOSE
    fallen = {calls.name: calls.fell_back for calls in report.calls if calls.fell_back}
    assert fallen == {"transformer_blocks.1": {"its feed-forward is chunked": 1}}


def test_arguments_that_are_for_the_processors(kernel, device):
    model, plain, report = pair(kernel, device)
    for given in ({"scale": 0.5}, {"unknown": 3}, {}):
        arguments = arguments_of(device, cross_attention_kwargs=given)
        assert distance(run(model, arguments), run(plain, arguments)) < CLOSE
    fallen = [calls.fell_back for calls in report.calls if calls.module == BLOCK]
    assert fallen == [{"it was given a scale": 1}] * BLOCKS


@pytest.mark.parametrize("batch", [0, 1])
def test_few_samples(kernel, device, batch):
    model, plain, _ = pair(kernel, device)
    arguments = arguments_of(device)
    x = torch.randn(batch, 7, 128).to(device, HALF)
    text = arguments["encoder_hidden_states"][:batch]
    with torch.no_grad():
        out = model.transformer_blocks[0](x, encoder_hidden_states=text)
        assert out.shape == x.shape
        if batch:
            expected = plain.transformer_blocks[0](x, encoder_hidden_states=text)
            assert distance(out, expected) < CLOSE


# --------------------------------------------------------------------------------------------------
# What users change


class Halving(AttnProcessor2_0):
    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs) * 0.5


def half(module, args, output):
    return output * 0.5


def _lora(model):
    torch.manual_seed(2)
    config = LoraConfig(r=4, target_modules=["to_q", "to_out.0"], init_lora_weights=False)
    inject_adapter_in_model(config, model)


CHANGES = {
    "a processor": lambda m: m.transformer_blocks[1].attn1.set_processor(Halving()),
    "the processor without PyTorch's attention": lambda m: m.transformer_blocks[
        1
    ].attn2.set_processor(AttnProcessor()),
    "a hook on a block": lambda m: m.transformer_blocks[1].register_forward_hook(half),
    "a hook on an attention": lambda m: m.transformer_blocks[1].attn1.register_forward_hook(half),
    "a hook on a layer": lambda m: m.transformer_blocks[1].attn2.to_k.register_forward_hook(half),
    "a hook on the first norm": lambda m: m.transformer_blocks[1].norm1.register_forward_hook(half),
    "a hook on a norm": lambda m: m.transformer_blocks[1].norm2.register_forward_hook(half),
    "a hook on the feed-forward": lambda m: m.transformer_blocks[1].ff.register_forward_hook(half),
    "a factor": lambda m: setattr(m.transformer_blocks[1].attn1, "rescale_output_factor", 2.0),
    "a residual": lambda m: setattr(m.transformer_blocks[1].attn1, "residual_connection", True),
    "fewer heads": lambda m: setattr(m.transformer_blocks[1].attn1, "heads", 1),
    "a norm of queries": lambda m: setattr(
        m.transformer_blocks[1].attn1, "norm_q", nn.LayerNorm(64).to(m.device, m.dtype)
    ),
    "a group norm": lambda m: setattr(
        m.transformer_blocks[1].attn1, "group_norm", nn.GroupNorm(4, 128).to(m.device, m.dtype)
    ),
    "a weight": lambda m: m.transformer_blocks[1].norm3.weight.data.mul_(2),
    "another weight": lambda m: setattr(
        m.transformer_blocks[1].attn1.to_v,
        "weight",
        nn.Parameter(torch.ones(128, 128).to(m.device, m.dtype)),
    ),
    "another layer": lambda m: m.transformer_blocks[1].attn1.to_out.__setitem__(0, nn.Identity()),
    "another forward": lambda m: setattr(
        m.transformer_blocks[1], "forward", lambda hidden_states, **_: hidden_states
    ),
    "adapters": _lora,
    "an epsilon": lambda m: setattr(m.transformer_blocks[1].norm1, "eps", 3.0),
    "all in float32": lambda m: m.float(),
}


@pytest.mark.parametrize("is_first", [True, False], ids=["before a call", "after calls"])
@pytest.mark.parametrize("change", list(CHANGES))
def test_changes(kernel, device, change, is_first):
    model, plain, _ = pair(kernel, device)
    arguments = arguments_of(device)
    if not is_first:
        for _ in range(2):
            run(model, arguments)
    before = run(plain, arguments)
    for candidate in (model, plain):
        CHANGES[change](candidate)
    if model.dtype == torch.float32:
        arguments = {name: x.float() for name, x in arguments.items()}
    expected = run(plain, arguments)
    same = ("the processor without PyTorch's attention", "all in float32")
    assert (distance(before, expected) > CHANGED) == (change not in same)
    for _ in range(2):
        assert distance(run(model, arguments), expected) < CLOSE


class Meddling(AttnProcessor2_0):
    """Changes something while it is called."""

    def __init__(self, change):
        super().__init__()
        self._change = change

    def __call__(self, *args, **kwargs):
        self._change()
        return super().__call__(*args, **kwargs)


@pytest.mark.parametrize("heads", [(2, 64), (3, 40)], ids=["kernel", "no kernel"])
@pytest.mark.parametrize(
    "where", ["attn2", "attn1.to_q", "norm3", "ff.net.0.proj", "ff.net.2", "processor"]
)
def test_a_change_in_the_middle_of_a_forward(kernel, device, where, heads):
    """By code of the user's that runs in the first block, of all that the next ones work with."""
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
    expected = run(plain, arguments)
    assert distance(before, expected) > CHANGED
    assert distance(run(model, arguments), expected) < CLOSE


@pytest.mark.parametrize("owner", [F, attention_processor], ids=["PyTorch's", "diffusers'"])
def test_another_attention_of_the_users(kernel, device, monkeypatch, owner):
    model, plain, _ = pair(kernel, device)
    arguments = arguments_of(device)
    before = run(model, arguments)
    own = F.scaled_dot_product_attention

    def halved(*args, **kwargs):
        return 0.5 * own(*args, **kwargs)

    if owner is F:
        monkeypatch.setattr(F, "scaled_dot_product_attention", halved)
    else:
        monkeypatch.setattr(
            attention_processor,
            "F",
            SimpleNamespace(**{**vars(F), "scaled_dot_product_attention": halved}),
        )
    expected = run(plain, arguments)
    assert distance(before, expected) > CHANGED
    assert distance(run(model, arguments), expected) < CLOSE


def test_a_patched_class(kernel, device, monkeypatch):
    model, plain, _ = pair(kernel, device)
    arguments = arguments_of(device)
    run(model, arguments)
    own = attention_processor.AttnProcessor2_0.__call__
    monkeypatch.setattr(
        attention_processor.AttnProcessor2_0,
        "__call__",
        lambda self, *args, **kwargs: own(self, *args, **kwargs) * 0.5,
    )
    assert distance(run(model, arguments), run(plain, arguments)) < CLOSE


class _Doubling(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return 2 * out if func is F.scaled_dot_product_attention else out


def test_a_function_mode_sees_attention(kernel, device):
    model, plain, _ = pair(kernel, device)
    arguments = arguments_of(device)
    before = run(model, arguments)
    with _Doubling():
        expected = run(plain, arguments)
        assert distance(run(model, arguments), expected) < CLOSE
    assert distance(before, expected) > CHANGED
    assert torch.equal(run(model, arguments), before)


def test_attention_false_leaves_it_to_pytorch(kernel, device):
    plain = transformer(device)
    model = copy.deepcopy(plain)
    kernel.inject_kernels(model, attention=False)
    arguments = arguments_of(device)
    assert distance(run(model, arguments), run(plain, arguments)) < CLOSE
    assert "attention" not in kernel_calls(run, model, arguments)


def test_autocast(kernel, device):
    model, plain, _ = pair(kernel, device, torch.float32)
    arguments = arguments_of(device, torch.float32)
    with torch.autocast(device, dtype=BFLOAT16):
        assert kernel_calls(run, model, arguments) == {}
        assert distance(run(model, arguments), run(plain, arguments)) < 1e-6


def test_gradients(kernel, device):
    model, plain, _ = pair(kernel, device, torch.float32)
    results = []
    for candidate in (model, plain):
        arguments = arguments_of(device, torch.float32)
        image = arguments["hidden_states"].requires_grad_()
        candidate(**arguments)[0].square().sum().backward()
        results.append([image.grad, *(p.grad for p in candidate.parameters())])
    for mine, expected in zip(*results, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("what", ["the model", "a block"])
def test_compiled(kernel, device, what):
    model, plain, _ = pair(kernel, device)
    arguments = arguments_of(device)
    expected = run(plain, arguments)
    if what == "the model":
        compiled = torch.compile(model, backend="eager", fullgraph=True)
    else:
        model.transformer_blocks[1].compile(backend="eager", fullgraph=True)
        compiled = model
    assert distance(run(compiled, arguments), expected) < CLOSE
