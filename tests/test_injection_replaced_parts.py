"""Users' own modules in a model, added before or after injection."""

import functools

import pytest
import torch
from diffusers.models.transformers import transformer_ltx
from torch import nn

from families import FAMILIES, every_family
from family import KERNEL_HEADS
from family import run as family_run
from injected_pairs import assert_alike, assert_same_outcome, injected, pair, reasons_of
from ltx_models import either_order, inputs, kernel_calls, run, transformer

pytestmark = pytest.mark.usefixtures("_one_thread")

HIDDEN = 64
BLOCKS = 3


def seeded(make):
    torch.manual_seed(11)
    return make()


def unchanged(device, arguments, **config):
    """The result of an unchanged model."""
    return run(transformer(device, blocks=BLOCKS, **config), arguments)


def putting(path, make):
    """A change of a model: ``make(module)`` replaces the module at a path."""

    def change(model):
        parent, _, name = path.rpartition(".")
        replacement = make(model.get_submodule(path)).to(model.device)
        setattr(model.get_submodule(parent), name, replacement)

    return change


def setting(name, value):
    """A change of a module that sets its attribute."""
    return lambda module: (setattr(module, name, value), module)[1]


def cast_to(dtype):
    return lambda norm: norm.to(dtype)


OUTCOMES = {  # of a norm, in a model of a dtype whose norms have weights
    "a weight is removed": (setting("weight", None), torch.float32),
    "it cannot compute": (setting("eps", None), torch.float32),
    "a bfloat16 weight among float32": (cast_to(torch.bfloat16), torch.float32),
    "a float32 weight among bfloat16": (cast_to(torch.float32), torch.bfloat16),
}


@pytest.mark.parametrize("case", OUTCOMES)
@pytest.mark.parametrize("place", ["0.norm1", "1.norm1", "1.norm2"])
def test_norms_that_change_or_raise_as_the_models(kernel, device, case, place):
    change, dtype = OUTCOMES[case]
    options = {"blocks": BLOCKS, "norm_elementwise_affine": True, "dtype": dtype}
    change = putting(f"transformer_blocks.{place}", change)
    model, plain, _ = pair(kernel, device, change, **options)
    assert_same_outcome(model, plain, **inputs(plain), return_dict=False, slack=0.03)


QUERY_AND_KEY = [f"{FAMILIES['flux3'].parts['attention']}.{name}" for name in ("norm_q", "norm_k")]
IN_FLOAT32 = [  # norms of a family, and their width
    *(("wan", [f"blocks.{name}"], 128) for name in ("0.norm1", "1.norm1", "1.norm2", "1.norm3")),
    ("flux3", QUERY_AND_KEY, KERNEL_HEADS["head_dim"]),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("name", "paths", "width"), IN_FLOAT32, ids=str)
def test_a_layer_norm_where_the_model_computes_in_float32(
    kernel, device, name, paths, width, dtype
):
    """One with a weight in 16 bits cannot be called there."""
    family = FAMILIES[name]
    arguments = family.inputs(device, torch.bfloat16)
    plain = family.model(device, torch.bfloat16, seed=1, **KERNEL_HEADS)

    def change(model):
        for path in paths:
            putting(path, lambda _: nn.LayerNorm(width).to(dtype))(model)

    model, plain, _ = injected(kernel, plain, change)
    expected = assert_same_outcome(model, plain, **arguments, return_dict=False, slack=0.03)
    assert isinstance(expected, str) == (dtype == torch.bfloat16)
    if name == "wan" and not isinstance(expected, str):
        assert "gated_residual_layer_norm_modulate" in kernel_calls(run, model, arguments)


KREA2_PLACES = (
    *("text_fusion.refiner_blocks.0.norm1", "text_fusion.refiner_blocks.1.norm2"),
    *("transformer_blocks.0.norm1", "transformer_blocks.1.norm1", "transformer_blocks.1.norm2"),
    *("transformer_blocks.0.attn.norm_q", "transformer_blocks.0.attn.norm_k", "final_layer.norm"),
)


@pytest.mark.parametrize("path", KREA2_PLACES)
def test_a_layer_norm_where_only_the_norm_computes_in_float32(kernel, device, path):
    """Krea 2 calls it with hidden states in bfloat16, so its weight may be in bfloat16."""
    family = FAMILIES["krea2"]
    arguments = family.inputs(device, torch.bfloat16)
    plain = family.model(device, torch.bfloat16, **KERNEL_HEADS)
    unlike = family_run(plain, arguments)

    def layer_norm(norm):
        made = nn.LayerNorm(norm.dim, dtype=torch.bfloat16)
        nn.init.constant_(made.weight, 0.5)
        nn.init.constant_(made.bias, 2.0)
        return made

    model, plain, _ = injected(kernel, plain, putting(path, layer_norm))
    assert_alike(model, plain, arguments, unlike=unlike, forward=family_run, changed=0.03)


@every_family
def test_a_norm_that_the_kernels_do_not_know_is_called_as_in_the_model(kernel, device, family):
    """With hidden states in the same dtype."""
    seen = {}

    def change(model):
        dtypes = seen[model] = set()
        for name, module in model.named_modules():
            if "Norm" in type(module).__name__:
                record = functools.partial(record_dtypes, dtypes, name)
                module.register_forward_pre_hook(record, with_kwargs=True)

    plain = family.model(device, torch.bfloat16, **KERNEL_HEADS)
    model, plain, _ = injected(kernel, plain, change)
    arguments = family.inputs(device, torch.bfloat16)
    assert_alike(model, plain, arguments, forward=family_run, slack=0.03)
    assert seen[model] == seen[plain] != set()


def record_dtypes(dtypes, name, module, args, kwargs):
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    dtypes.add((name, *[tensor.dtype for tensor in tensors]))


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
    """Attention without a processor that reads the tables of the rotary embedding."""

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
    """Iterates over one more module than it contains."""

    def __iter__(self):
        yield from super().__iter__()
        yield nn.Tanh()


class HalvedRope(transformer_ltx.LTXVideoRotaryPosEmbed):
    def forward(self, *args, **kwargs):
        cos, sin = super().forward(*args, **kwargs)
        return cos * 0.5, sin


def with_own_forward(feed_forward):
    feed_forward.forward = lambda x: feed_forward.net[2](feed_forward.net[0](x)) * 0.5
    return feed_forward


BLOCK = "transformer_blocks.1"
PARTS = {
    "attention": (f"{BLOCK}.attn1", lambda part: seeded(OwnAttention)),
    "cross-attention": (f"{BLOCK}.attn2", lambda part: seeded(OwnAttention)),
    "feed-forward": (f"{BLOCK}.ff", lambda part: seeded(Gated)),
    "feed-forward in a sequence": (f"{BLOCK}.ff", lambda part: nn.Sequential(part, nn.Tanh())),
    "feed-forward without activation": (
        f"{BLOCK}.ff.net",
        lambda part: nn.ModuleList([nn.Identity(), seeded(lambda: nn.Linear(HIDDEN, HIDDEN))]),
    ),
    "longer feed-forward": (f"{BLOCK}.ff.net", lambda part: nn.ModuleList([*part, nn.Tanh()])),
    "feed-forward of another list": (f"{BLOCK}.ff.net", lambda part: EndingInTanh(part)),
    "dropout": (f"{BLOCK}.ff.net.1", lambda part: nn.Tanh()),
    "attention's dropout": (f"{BLOCK}.attn1.to_out.1", lambda part: nn.Tanh()),
    "activation": (f"{BLOCK}.ff.net.0", lambda part: nn.Sequential(part.proj, nn.SiLU())),
    "activation without bias": (f"{BLOCK}.ff.net.0.proj", setting("bias", None)),
    "feed-forward without bias": (f"{BLOCK}.ff.net.2", setting("bias", None)),
    "feed-forward with a forward of its own": (f"{BLOCK}.ff", with_own_forward),
    "rope": ("rope", setting("__class__", HalvedRope)),
}
NAMED = ("attention", "feed-forward", "activation")


@pytest.mark.whole
@pytest.mark.parametrize("part", PARTS)
@either_order
def test_other_parts(kernel, device, part, is_injected_first):
    path, make = PARTS[part]
    model, plain, report = pair(
        kernel, device, putting(path, make), is_injected_first=is_injected_first, blocks=BLOCKS
    )
    arguments = inputs(plain)
    assert_alike(model, plain, arguments, unlike=unchanged(device, arguments))
    if part in NAMED and not is_injected_first:
        assert any(name.startswith(BLOCK) for name in reasons_of(report))
    assert kernel_calls(run, model, arguments)["gated_residual_rms_norm_modulate"] >= 2
    kernel.eject_kernels(model)
    assert kernel_calls(run, model, arguments) == {}
    assert_alike(model, plain, arguments, times=1)


READS = {
    "unpacked": lambda rope: rope,
    "by_index": lambda rope: (rope[-2], rope[1]),
    "as_list": list,
    "by_length": lambda rope: [rope[i] for i in range(len(rope))],
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
        self.tables.append((cos, sin))
        x = self.linear(hidden_states)
        real, imaginary = x.unflatten(2, (-1, 2)).unbind(-1)
        rotated = torch.stack([-imaginary, real], dim=-1).flatten(2)
        return hidden_states + (x.float() * cos + rotated.float() * sin).to(x.dtype)


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("options", [{}, {"batch": 1}, {"video_coords": True}], ids=str)
def test_a_block_and_a_hook_read_the_tables(kernel, device, read, options):
    """They are bitwise equal to the model's own."""
    tables = {}

    def change(model):
        seen = tables[model] = []
        block = seeded(lambda: OwnBlock(READS[read], seen))
        model.transformer_blocks[1] = block.to(model.device)
        model.transformer_blocks[2].register_forward_pre_hook(
            lambda block, args, kwargs: seen.append(READS[read](kwargs["image_rotary_emb"])),
            with_kwargs=True,
        )

    model, plain, _ = pair(kernel, device, change, blocks=BLOCKS)
    if options.get("video_coords"):
        options = {"video_coords": torch.rand(2, 3, 24, device=device) * 100}
    assert_alike(model, plain, inputs(plain, **options))
    assert len(tables[model]) == len(tables[plain]) == 4
    for mine, theirs in zip(tables[model], tables[plain], strict=True):
        for table, expected in zip(mine, theirs, strict=True):
            assert table.shape == expected.shape and table.dtype == expected.dtype
            assert torch.equal(table, expected)


def give_others(block, args, kwargs):
    cos, sin = kwargs["image_rotary_emb"]
    return args, {**kwargs, "image_rotary_emb": (cos * 0.5, sin * 0.5)}


def write(block, args, kwargs):
    """In place, so the next blocks get changed values."""
    cos, sin = kwargs["image_rotary_emb"]
    cos.mul_(0.5)
    sin.data.mul_(0.5)


@pytest.mark.parametrize("hook", [give_others, write])
def test_a_hook_changes_the_tables(kernel, device, hook):
    """Only in that forward."""
    handles = []

    def change(model):
        block = model.transformer_blocks[1]
        handles.append(block.register_forward_pre_hook(hook, with_kwargs=True))

    model, plain, _ = pair(kernel, device, change, blocks=BLOCKS)
    arguments = inputs(plain)
    assert_alike(model, plain, arguments, unlike=unchanged(device, arguments))
    for handle in handles:
        handle.remove()
    assert_alike(model, plain, arguments)


@pytest.mark.parametrize("is_injected", [True, False], ids=["injected", "plain"])
def test_the_block_of_another_injected_model(kernel, device, is_injected):
    """In a model that is itself injected or not."""
    model, plain = transformer(device, blocks=BLOCKS), transformer(device, blocks=BLOCKS)
    if is_injected:
        kernel.inject_kernels(model)
    others = [transformer(device, blocks=1, seed=7) for _ in range(2)]
    kernel.inject_kernels(others[0])
    for candidate, other in zip((model, plain), others, strict=True):
        candidate.transformer_blocks[1] = other.transformer_blocks[0]
    assert_alike(model, plain)
