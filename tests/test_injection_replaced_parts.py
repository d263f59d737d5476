"""Parts of a model that are the user's own, put there before or after the injection."""

import copy

import pytest
import torch
from diffusers.models.normalization import RMSNorm
from diffusers.models.transformers import transformer_ltx
from torch import nn

from families import FAMILIES
from family import KERNEL_HEADS
from foreign_modules import Wrap
from injected_pairs import BFLOAT16, assert_alike, fallen_back, is_said, pair
from ltx_models import either_order, inputs, kernel_calls, run, transformer

pytestmark = pytest.mark.usefixtures("_one_thread")

HIDDEN = 64
BLOCKS = 3

# The first block's norm is the block's own, the second's is made where the first block ends.
each_of_two_blocks = pytest.mark.parametrize("index", [0, 1], ids=["first", "second"])


def values(size=HIDDEN):
    return nn.Parameter(torch.linspace(0.5, 1.5, size))


def output_without_changes(device, arguments, **config):
    return run(transformer(device, blocks=BLOCKS, **config), arguments)


# ------------------------------------------------------------------------------------------------
# Norms


class HalvedNorm(RMSNorm):
    def forward(self, hidden_states):
        return 0.5 * super().forward(hidden_states)


def layer_norm(norm):
    result = nn.LayerNorm(HIDDEN)
    result.weight, result.bias = values(), values()
    return result


def torch_norm(norm, eps=1e-6):
    return nn.RMSNorm(HIDDEN, eps=eps, elementwise_affine=False)


def with_bias(norm):
    result = RMSNorm(HIDDEN, eps=1e-6, bias=True)
    result.weight, result.bias = values(), values()
    return result


def subclassed(norm):
    norm.__class__ = HalvedNorm
    return norm


def weight_added(norm):
    norm.weight = values()
    return norm


def bias_added(norm):
    norm.weight, norm.bias = values(), values()
    return norm


def bias_alone_added(norm):
    """Which diffusers' RMSNorm does not use."""
    norm.bias = values()
    return norm


def other_eps(norm):
    norm.eps = 0.5
    return norm


def forward_on_the_instance(norm):
    forward = norm.forward
    norm.forward = lambda x: 0.5 * forward(x)
    return norm


def hooked(norm):
    norm.register_forward_hook(lambda module, args, output: 0.5 * output)
    return norm


FOREIGN_NORMS = {
    "layer_norm": layer_norm,
    "layer_norm_without_weight": lambda norm: nn.LayerNorm(HIDDEN, elementwise_affine=False),
    "identity": lambda norm: nn.Identity(),
    "wrapper": Wrap,
    "torch_norm": torch_norm,
    "torch_norm_without_eps": lambda norm: torch_norm(norm, eps=None),
    "with_bias": with_bias,
    "subclassed": subclassed,
    "forward_on_the_instance": forward_on_the_instance,
    "hooked": hooked,
}
# What changes the values of a known norm.
CHANGED_NORMS = {
    "weight_added": weight_added,
    "bias_added": bias_added,
    "bias_alone_added": bias_alone_added,
    "other_eps": other_eps,
}
WITHOUT_EFFECT = {"wrapper", "torch_norm", "torch_norm_without_eps", "bias_alone_added"}


def change_norm(kind, index, name):
    def change(model):
        block = model.transformer_blocks[index]
        norm = {**FOREIGN_NORMS, **CHANGED_NORMS}[kind](getattr(block, name))
        setattr(block, name, norm.to(model.device))

    return change


@pytest.mark.parametrize("kind", [*FOREIGN_NORMS, *CHANGED_NORMS])
@pytest.mark.parametrize("name", ["norm1", "norm2"])
@each_of_two_blocks
@either_order
def test_norms_of_a_block(kernel, device, kind, name, index, is_injected_first):
    change = change_norm(kind, index, name)
    model, plain, _ = pair(
        kernel, device, change, is_injected_first=is_injected_first, blocks=BLOCKS
    )
    arguments = inputs(plain)
    unlike = None if kind in WITHOUT_EFFECT else output_without_changes(device, arguments)
    assert_alike(model, plain, arguments, unlike=unlike)
    # The other blocks are on the kernels as they were.
    calls = kernel_calls(run, model, arguments)
    assert calls.get("qk_norm_coordinate_rope", 0) + calls.get("qk_norm_rope", 0) >= 2
    assert calls["gated_residual_rms_norm_modulate"] >= 2


@pytest.mark.parametrize(
    "kind", ["identity", "wrapper", "subclassed", "forward_on_the_instance", "hooked"]
)
@pytest.mark.parametrize("name", ["norm1", "norm2"])
@either_order
def test_other_norms_are_reported(kernel, device, kind, name, is_injected_first):
    """In the injection's report, or among the calls that fell back."""
    model, plain, report = pair(
        kernel,
        device,
        change_norm(kind, 1, name),
        is_injected_first=is_injected_first,
        blocks=BLOCKS,
    )
    run(model, inputs(plain))
    assert is_said(report, kernel, device, blocks=BLOCKS)
    if is_injected_first:
        assert fallen_back(report).keys() == {"transformer_blocks.1"}


@pytest.mark.parametrize("name", ["norm1", "norm2"])
def test_a_weight_is_removed(kernel, device, name):
    def change(model):
        for block in model.transformer_blocks:
            getattr(block, name).weight = None

    config = {"blocks": BLOCKS, "norm_elementwise_affine": True}
    model, plain, _ = pair(kernel, device, change, **config)
    arguments = inputs(plain)
    unlike = run(transformer(device, **config), arguments)
    assert_alike(model, plain, arguments, unlike=unlike)


@pytest.mark.parametrize("name", ["norm1", "norm2"])
@each_of_two_blocks
@either_order
def test_a_norm_that_cannot_compute_raises_its_own_error(
    kernel, device, name, index, is_injected_first
):
    def change(model):
        getattr(model.transformer_blocks[index], name).eps = None

    model, plain, _ = pair(
        kernel, device, change, is_injected_first=is_injected_first, blocks=BLOCKS
    )
    with pytest.raises(TypeError) as expected:
        run(plain, inputs(plain))
    with pytest.raises(TypeError) as error:
        run(model, inputs(plain))
    assert str(error.value) == str(expected.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["norm1", "norm2", "norm3"])
@each_of_two_blocks
@either_order
def test_a_layer_norm_where_the_model_computes_in_float32(
    kernel, device, name, index, dtype, is_injected_first
):
    """One with a weight in 16 bits cannot be called there."""
    family = FAMILIES["wan"]
    arguments = family.inputs(device, torch.bfloat16)
    model, plain = (family.model(device, torch.bfloat16, seed=1, **KERNEL_HEADS) for _ in range(2))

    def change(model):
        norm = nn.LayerNorm(model.blocks[index].ffn.net[2].out_features)
        setattr(model.blocks[index], name, norm.to(device, dtype))

    change(plain)
    if is_injected_first:
        kernel.inject_kernels(model)
    change(model)
    if not is_injected_first:
        kernel.inject_kernels(model)
    if dtype == torch.bfloat16:
        with pytest.raises(RuntimeError) as expected:
            run(plain, arguments)
        with pytest.raises(RuntimeError) as error:
            run(model, arguments)
        assert str(error.value) == str(expected.value)
    else:
        calls = kernel_calls(run, model, arguments)
        assert "gated_residual_layer_norm_modulate" in calls
        torch.testing.assert_close(
            run(model, arguments), run(plain, arguments), rtol=0.05, atol=0.1
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["norm1", "norm2"])
@either_order
def test_a_weight_of_another_dtype(kernel, device, dtype, name, is_injected_first):
    """diffusers' RMSNorm gives float32 for bfloat16 hidden states and a float32 weight."""
    other = torch.bfloat16 if dtype == torch.float32 else torch.float32
    options = {"blocks": BLOCKS, "norm_elementwise_affine": True, "dtype": dtype}

    def change(model):
        getattr(model.transformer_blocks[1], name).to(other)

    model, plain, _ = pair(kernel, device, change, is_injected_first=is_injected_first, **options)
    arguments = inputs(plain)
    try:
        expected = run(plain, arguments)
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=str(error)[:20]):
            run(model, arguments)
    else:
        assert run(model, arguments).dtype == expected.dtype
        assert_alike(model, plain, arguments)


QK_NORMS = {
    "layer_norm": layer_norm,
    "identity": lambda norm: nn.Identity(),
    "wrapper": Wrap,
    "diffusers_norm_with_bias": with_bias,
    "without_eps": lambda norm: torch_norm(norm, eps=None),
    "without_weight": torch_norm,
    "other_eps": other_eps,
    "forward_on_the_instance": forward_on_the_instance,
    "hooked": hooked,
}


@pytest.mark.parametrize("kind", QK_NORMS)
@pytest.mark.parametrize("place", ["attn1.norm_q", "attn1.norm_k", "attn2.norm_q", "attn2.norm_k"])
@either_order
def test_norms_of_query_and_key(kernel, device, kind, place, is_injected_first):
    def change(model):
        attention, name = place.split(".")
        attention = getattr(model.transformer_blocks[1], attention)
        setattr(attention, name, QK_NORMS[kind](getattr(attention, name)).to(model.device))

    model, plain, _ = pair(
        kernel, device, change, is_injected_first=is_injected_first, blocks=BLOCKS
    )
    arguments = inputs(plain)
    without_effect = kind == "wrapper"
    unlike = None if without_effect else output_without_changes(device, arguments)
    if unlike is not None:
        assert not torch.equal(run(plain, arguments), unlike)
    assert_alike(model, plain, arguments)


# ------------------------------------------------------------------------------------------------
# Attention, feed-forward, activation, whole blocks


class Gated(nn.Module):
    """A feed-forward without `.net`."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 32), nn.Linear(16, HIDDEN)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.1)

    def forward(self, hidden_states):
        hidden, gate = self.up(hidden_states).chunk(2, dim=-1)
        return self.down(hidden * gate.sigmoid())


class OwnAttention(nn.Module):
    """Attention that reads the tables of the rotary embedding, and has no processor."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        nn.init.normal_(self.linear.weight, std=0.1)

    def forward(
        self, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None
    ):
        x = self.linear(hidden_states)
        if image_rotary_emb is not None:
            cos, sin = image_rotary_emb
            x = x * cos + x.flip(-1) * sin
        return x


class EndingInTanh(nn.ModuleList):
    """Gives one module more than it holds."""

    def __iter__(self):
        yield from super().__iter__()
        yield nn.Tanh()


def seeded(make):
    torch.manual_seed(11)
    return make()


PARTS = {
    "attn1_wrapped": ("attn1", Wrap),
    "attn2_wrapped": ("attn2", Wrap),
    "attn1_own": ("attn1", lambda part: seeded(OwnAttention)),
    "attn2_own": ("attn2", lambda part: seeded(OwnAttention)),
    "ff_wrapped": ("ff", Wrap),
    "ff_own": ("ff", lambda part: seeded(Gated)),
    "ff_sequential": ("ff", lambda part: nn.Sequential(part, nn.Tanh())),
    "ff_without_activation": ("ff.net", lambda part: nn.ModuleList(list(part)[2:])),
    "ff_longer": ("ff.net", lambda part: nn.ModuleList([*part, nn.Tanh()])),
    "ff_of_another_list": ("ff.net", lambda part: EndingInTanh(part)),
    "dropout_wrapped": ("ff.net.1", Wrap),
    "dropout_own": ("ff.net.1", lambda part: nn.Tanh()),
    "attention_dropout_own": ("attn1.to_out.1", lambda part: nn.Tanh()),
    "activation_wrapped": ("ff.net.0", Wrap),
    "activation_own": ("ff.net.0", lambda part: nn.Sequential(part.proj, nn.SiLU())),
    "projection_wrapped": ("ff.net.0.proj", Wrap),
    "output_wrapped": ("ff.net.2", Wrap),
    "query_wrapped": ("attn1.to_q", Wrap),
    "attention_output_wrapped": ("attn1.to_out.0", Wrap),
    "block_wrapped": ("", Wrap),
}


@pytest.mark.parametrize("part", PARTS)
@each_of_two_blocks
@either_order
def test_parts_of_a_block(kernel, device, part, index, is_injected_first):
    def change(model):
        place, make = PARTS[part]
        path = f"transformer_blocks.{index}" + (f".{place}" if place else "")
        parent, _, name = path.rpartition(".")
        if part == "ff_without_activation":
            # Its first module is then a linear layer of the wrong width: give it the right one.
            model.get_submodule(parent).net = nn.ModuleList(
                [nn.Identity(), seeded(lambda: nn.Linear(HIDDEN, HIDDEN)).to(model.device)]
            )
        else:
            replacement = make(model.get_submodule(path)).to(model.device)
            setattr(model.get_submodule(parent), name, replacement)

    model, plain, report = pair(
        kernel, device, change, is_injected_first=is_injected_first, blocks=BLOCKS
    )
    arguments = inputs(plain)
    changes_values = not part.endswith("_wrapped")
    unlike = output_without_changes(device, arguments) if changes_values else None
    assert_alike(model, plain, arguments, unlike=unlike)
    calls = kernel_calls(run, model, arguments)
    assert calls["gated_residual_rms_norm_modulate"] >= 2
    kernel.eject_kernels(model)
    assert kernel_calls(run, model, arguments) == {}
    assert_alike(model, plain, arguments)


@pytest.mark.parametrize("part", ["attn1_wrapped", "ff_wrapped", "activation_own"])
def test_other_parts_are_left_alone(kernel, device, part):
    """The report says so, and names the module."""
    place, make = PARTS[part]
    model = transformer(device, blocks=BLOCKS)
    path = f"transformer_blocks.1.{place}"
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, make(model.get_submodule(path)))
    report = kernel.inject_kernels(model)
    said = [entry for entry in report.left_alone if entry.name.startswith("transformer_blocks.1")]
    assert said and all(entry.reason for entry in said)


# ------------------------------------------------------------------------------------------------
# Blocks that read the rotary embedding

READS = {
    "unpacked": lambda rope: rope,
    "by_index": lambda rope: (rope[0], rope[1]),
    "by_negative_index": lambda rope: (rope[-2], rope[-1]),
    "by_slice": lambda rope: rope[:2],
    "as_list": list,
    "as_tuple": tuple,
    "each_cast": lambda rope: [table.to(torch.float64).float() for table in rope],
    "by_star": lambda rope: (lambda cos, sin: (cos, sin))(*rope),
    "by_length": lambda rope: [rope[i] for i in range(len(rope))],
    "reversed": lambda rope: tuple(reversed(rope))[::-1],
    "copied": copy.deepcopy,
    "moved": lambda rope: type(rope)(rope) if type(rope) is tuple else tuple(t.cpu() for t in rope),
}


class OwnBlock(nn.Module):
    """A block with the known one's signature."""

    def __init__(self, read, tables):
        super().__init__()
        self.read, self.tables = read, tables
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(
        self,
        hidden_states,
        encoder_hidden_states,
        temb,
        image_rotary_emb=None,
        encoder_attention_mask=None,
    ):
        cos, sin = self.read(image_rotary_emb)
        cos, sin = cos.to(hidden_states.device), sin.to(hidden_states.device)
        self.tables.append((cos, sin))
        x = self.linear(hidden_states)
        real, imaginary = x.unflatten(2, (-1, 2)).unbind(-1)
        rotated = torch.stack([-imaginary, real], dim=-1).flatten(2)
        return hidden_states + (x.float() * cos + rotated.float() * sin).to(x.dtype)


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("options", [{}, {"batch": 1}, {"video_coords": True}], ids=str)
@either_order
def test_a_block_of_the_users_own_reads_the_tables(
    kernel, device, read, options, is_injected_first
):
    """They have the bits of the model's own."""
    tables = {}

    def change(model):
        tables[model] = []
        block = seeded(lambda: OwnBlock(READS[read], tables[model]))
        model.transformer_blocks[1] = block.to(model.device)

    model, plain, _ = pair(
        kernel, device, change, is_injected_first=is_injected_first, blocks=BLOCKS
    )
    if options.get("video_coords"):
        options = {"video_coords": torch.rand(2, 3, 24, device=device) * 100}
    assert_alike(model, plain, inputs(plain, **options))
    assert len(tables[model]) == len(tables[plain]) == 2
    for mine, theirs in zip(tables[model], tables[plain], strict=True):
        for table, expected in zip(mine, theirs, strict=True):
            assert table.shape == expected.shape and table.dtype == expected.dtype
            assert torch.equal(table.cpu(), expected.cpu())


@pytest.mark.parametrize("read", READS)
def test_a_hook_reads_the_tables(kernel, device, read):
    """What any code finds in the arguments of a block is a pair of tensors."""
    seen = {}

    def change(model):
        seen[model] = []

        def hook(block, args, kwargs):
            cos, sin = READS[read](kwargs["image_rotary_emb"])
            seen[model].append((cos, sin))

        for block in model.transformer_blocks:
            block.register_forward_pre_hook(hook, with_kwargs=True)

    model, plain, _ = pair(kernel, device, change, blocks=BLOCKS)
    assert_alike(model, plain)
    for mine, theirs in zip(seen[model], seen[plain], strict=True):
        for table, expected in zip(mine, theirs, strict=True):
            assert torch.equal(table.cpu(), expected.cpu())


def test_a_hook_gives_the_blocks_other_tables(kernel, device):
    def turn(block, args, kwargs):
        cos, sin = kwargs["image_rotary_emb"]
        return args, {**kwargs, "image_rotary_emb": (cos * 0.5, sin * 0.5)}

    def change(model):
        for block in model.transformer_blocks:
            block.register_forward_pre_hook(turn, with_kwargs=True)

    model, plain, _ = pair(kernel, device, change, blocks=BLOCKS)
    arguments = inputs(plain)
    unlike = output_without_changes(device, arguments)
    assert not torch.equal(run(plain, arguments), unlike)
    assert_alike(model, plain, arguments)


def test_a_hook_writes_the_tables(kernel, device):
    """In place: what the blocks after it are given is changed, too."""

    def write(block, args, kwargs):
        cos, sin = kwargs["image_rotary_emb"]
        cos.mul_(0.5)
        sin.data.mul_(0.5)

    def change(model):
        model.transformer_blocks[1].register_forward_pre_hook(write, with_kwargs=True)

    model, plain, _ = pair(kernel, device, change, blocks=BLOCKS)
    arguments = inputs(plain)
    assert not torch.equal(run(plain, arguments), output_without_changes(device, arguments))
    assert_alike(model, plain, arguments)


def plain_block(device):
    return transformer(device, blocks=1, seed=7).transformer_blocks[0]


def injected_block(kernel, device):
    other = transformer(device, blocks=1, seed=7)
    kernel.inject_kernels(other)
    return other.transformer_blocks[0]


@each_of_two_blocks
def test_a_plain_block_is_put_in_after_the_injection(kernel, device, index):
    def change(model):
        model.transformer_blocks[index] = plain_block(device)

    model, plain, report = pair(kernel, device, change, blocks=BLOCKS)
    arguments = inputs(plain)
    unlike = output_without_changes(device, arguments)
    assert_alike(model, plain, arguments, unlike=unlike)
    kernel.eject_kernels(model)
    assert_alike(model, plain, arguments)


def test_a_plain_block_is_appended(kernel, device):
    def change(model):
        model.transformer_blocks.append(plain_block(device))

    model, plain, _ = pair(kernel, device, change, blocks=2)
    assert_alike(model, plain)


@pytest.mark.parametrize("is_injected", [True, False], ids=["injected", "plain"])
def test_the_block_of_another_injected_model(kernel, device, is_injected):
    """In a model that is injected itself, or is not."""
    model, plain = transformer(device, blocks=BLOCKS), transformer(device, blocks=BLOCKS)
    if is_injected:
        kernel.inject_kernels(model)
    model.transformer_blocks[1] = injected_block(kernel, device)
    plain.transformer_blocks[1] = plain_block(device)
    assert_alike(model, plain)


def test_blocks_change_places(kernel, device):
    def change(model):
        first, second, third = model.transformer_blocks
        model.transformer_blocks = nn.ModuleList([third, first, second])

    model, plain, _ = pair(kernel, device, change, blocks=BLOCKS)
    arguments = inputs(plain)
    unlike = output_without_changes(device, arguments)
    assert_alike(model, plain, arguments, unlike=unlike)


@pytest.mark.parametrize(
    "name", ["rope", "time_embed", "proj_in", "caption_projection", "norm_out"]
)
@either_order
def test_parts_of_the_model(kernel, device, name, is_injected_first):
    def change(model):
        setattr(model, name, Wrap(getattr(model, name)))

    model, plain, _ = pair(kernel, device, change, is_injected_first=is_injected_first)
    assert_alike(model, plain)


@either_order
def test_another_rotary_embedding(kernel, device, is_injected_first):
    class Rope(transformer_ltx.LTXVideoRotaryPosEmbed):
        def forward(self, *args, **kwargs):
            cos, sin = super().forward(*args, **kwargs)
            return cos * 0.5, sin

    def change(model):
        model.rope.__class__ = Rope

    model, plain, _ = pair(kernel, device, change, is_injected_first=is_injected_first)
    arguments = inputs(plain)
    assert not torch.equal(run(plain, arguments), run(transformer(device), arguments))
    assert_alike(model, plain, arguments)


@either_order
def test_parts_of_a_bfloat16_model(kernel, device, is_injected_first):
    """Where attention is on its kernel, too."""

    def change(model):
        first, second = model.transformer_blocks
        first.attn1, second.attn2 = Wrap(first.attn1), Wrap(second.attn2)
        first.ff = Wrap(first.ff)

    model, plain, _ = pair(kernel, device, change, is_injected_first=is_injected_first, **BFLOAT16)
    assert_alike(model, plain)
    assert kernel_calls(run, model, inputs(plain))["attention"] >= 2
