"""Hooks and other forwards on the modules of an injected model, coming and going in any order."""

import itertools

import accelerate
import pytest
import torch
from accelerate.hooks import add_hook_to_module, remove_hook_from_module
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.models.activations import GEGLU
from diffusers.models.normalization import RMSNorm
from diffusers.models.transformers.transformer_ltx import LTXVideoAttnProcessor

from injected_pairs import assert_alike, pair, reasons_of
from ltx_models import (
    calls_of,
    computing,
    either_order,
    prepared,
    reference,
    snapshot,
)

pytestmark = pytest.mark.usefixtures("_one_thread")

ONE_BLOCK = {"blocks": 1}


# ------------------------------------------------------------------------------------------------
# The kinds of hooks: each adds one that counts its calls, some among others that do not


class Counted:
    """How often the hooks that were given this ran."""

    def __init__(self):
        self.count = 0


class AccelerateHook(accelerate.hooks.ModelHook):
    def __init__(self, counted):
        self.counted = counted

    def pre_forward(self, module, *args, **kwargs):
        self.counted.count += 1
        return args, kwargs


class DiffusersHook(ModelHook):
    def __init__(self, counted):
        super().__init__()
        self.counted = counted

    def pre_forward(self, module, *args, **kwargs):
        self.counted.count += 1
        return args, kwargs


class DiffusersForwardHook(ModelHook):
    """As caches are: it calls the forward that it replaces, or does not."""

    def __init__(self, counted):
        super().__init__()
        self.counted = counted

    def new_forward(self, module, *args, **kwargs):
        self.counted.count += 1
        return self.fn_ref.original_forward(*args, **kwargs)


class AccelerateChain:
    @staticmethod
    def add(module, counted):
        add_hook_to_module(module, AccelerateHook(Counted()))
        add_hook_to_module(module, AccelerateHook(counted), append=True)

    @staticmethod
    def remove(module):
        remove_hook_from_module(module)


class DiffusersChain:
    hooks = {"inner": DiffusersHook, "counted": DiffusersForwardHook, "outer": DiffusersHook}

    @classmethod
    def add(cls, module, counted):
        registry = HookRegistry.check_if_exists_or_initialize(module)
        for name, hook in cls.hooks.items():
            registry.register_hook(hook(counted if name == "counted" else Counted()), name)

    @classmethod
    def remove(cls, module):
        for name in reversed(cls.hooks):
            module._diffusers_hook.remove_hook(name, recurse=False)


def nested(outer, inner):
    class Nested:
        @staticmethod
        def add(module, counted):
            inner.add(module, Counted())
            outer.add(module, counted)

        @staticmethod
        def remove(module):
            outer.remove(module)
            inner.remove(module)

    Nested.__name__ = f"{outer.__name__}Around{inner.__name__}"
    return Nested


class Torch:
    handles = {}

    @classmethod
    def add(cls, module, counted):
        def count(module, args, kwargs):
            counted.count += 1

        cls.handles[module] = module.register_forward_pre_hook(count, with_kwargs=True)

    @classmethod
    def remove(cls, module):
        cls.handles.pop(module).remove()


KINDS = [
    AccelerateChain,
    DiffusersChain,
    nested(DiffusersChain, AccelerateChain),
    nested(AccelerateChain, DiffusersChain),
    Torch,
]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
# Hooks are added before they are removed, kernels injected before they are ejected.
ORDERS = [
    order
    for order in itertools.permutations(["add", "inject", "remove", "eject"])
    if order.index("add") < order.index("remove") and order.index("inject") < order.index("eject")
]


@every_kind
def test_hooks_in_every_order(kernel, device, kind):
    model, arguments, expected = prepared(device, model_config=ONE_BLOCK)
    before = snapshot(model)
    block = model.transformer_blocks[0]
    targets = [block, block.attn1, block.attn2, block.ff, block.ff.net[0]]
    counted = Counted()
    steps = {
        "add": lambda: [kind.add(module, counted) for module in targets],
        "remove": lambda: [kind.remove(module) for module in targets],
        "inject": lambda: kernel.inject_kernels(model),
        "eject": lambda: kernel.eject_kernels(model),
    }
    for order in ORDERS:
        is_hooked = is_injected = False
        for step in order:
            steps[step]()
            is_hooked = step == "add" or (is_hooked and step != "remove")
            is_injected = step == "inject" or (is_injected and step != "eject")
            counted.count = 0
            calls = computing(expected, model, arguments)
            assert calls == (calls_of(1) if is_injected else {})
            assert counted.count == (len(targets) if is_hooked else 0)
        assert snapshot(model) == before


def norm_of_a_block(model):
    return [model.transformer_blocks[0].norm1]


def norms_of_query_and_key(model):
    block = model.transformer_blocks[0]
    return [block.attn1.norm_q, block.attn2.norm_k]


def linear_layers(model):
    return [m for m in model.transformer_blocks.modules() if type(m) is torch.nn.Linear]


def rotary_embedding(model):
    return [model.rope]


# What is hooked, and what that changes of the operator calls of a forward of one block.
HOOKED = {
    norm_of_a_block: {"rms_norm_modulate": None},
    norms_of_query_and_key: {},
    linear_layers: {},
    rotary_embedding: {"qk_norm_coordinate_rope": None, "qk_norm_rope": 1},
}


@pytest.mark.parametrize("hooked", HOOKED, ids=lambda hooked: hooked.__name__)
@every_kind
@either_order
def test_hooks_on_parts(kernel, device, hooked, kind, is_injected_first):
    """Hooked parts are called: a norm by its class's code, a rotary embedding for its tables."""
    model, arguments, expected = prepared(device, model_config=ONE_BLOCK)
    counted = Counted()
    if is_injected_first:
        kernel.inject_kernels(model)
    parts = hooked(model)
    for part in parts:
        kind.add(part, counted)
    reasons = reasons_of(kernel.inject_kernels(model))
    if hooked is norm_of_a_block and not is_injected_first:
        assert "norm1 has hooks" in reasons["transformer_blocks.0"]
    calls = {**calls_of(1), **HOOKED[hooked]}
    calls = {name: count for name, count in calls.items() if count}
    assert computing(expected, model, arguments) == calls
    assert counted.count == len(parts)
    for part in parts:
        kind.remove(part)
    assert computing(expected, model, arguments) == calls_of(1)


# ------------------------------------------------------------------------------------------------
# Other modules and other forwards than the known ones

PATHS = {
    "block": "transformer_blocks.0",
    "attention": "transformer_blocks.0.attn1",
    "activation": "transformer_blocks.0.ff.net.0",
    "rope": "rope",
    "model": "",
}
WITHOUT_BLOCKS = {"qk_norm_coordinate_rope": 2, "rms_norm": 4, "gelu": 2}


# What is left of the operator calls of a forward of two blocks.
OF_CLASSES = {
    "block": WITHOUT_BLOCKS,
    "attention": calls_of(2, qk_norm_coordinate_rope=0, rms_norm=0),
    "activation": calls_of(2, gelu=0),
    "rope": calls_of(2, qk_norm_coordinate_rope=0, qk_norm_rope=1),
    "model": calls_of(2, joined=0),
}


@pytest.mark.parametrize("target", PATHS)
def test_another_forward_of_a_class_is_left_alone(kernel, device, monkeypatch, target):
    model, arguments, expected = prepared(device)
    cls = type(model.get_submodule(PATHS[target]))
    original = cls.forward
    monkeypatch.setattr(cls, "forward", lambda self, *a, **k: original(self, *a, **k))
    reasons = reasons_of(kernel.inject_kernels(model))
    assert "not the one known" in reasons[PATHS[target]]
    assert computing(expected, model, arguments) == OF_CLASSES[target]


@pytest.mark.parametrize("more", ["", ", audio=None"], ids=["same", "another"])
def test_parameters_of_a_forward(kernel, device, monkeypatch, more):
    """A version of diffusers with another parameter may compute something else."""
    model, arguments, expected = prepared(device)
    block_class = type(model.transformer_blocks[0])
    parameters = "self, hidden_states, encoder_hidden_states, temb, image_rotary_emb"
    namespace = {"__name__": "diffusers.another_version", "original": block_class.forward}
    exec(
        f"def forward({parameters}=None, encoder_attention_mask=None{more}):\n"
        f"    return original({parameters}, encoder_attention_mask)",
        namespace,
    )
    monkeypatch.setattr(block_class, "forward", namespace["forward"])
    reasons = reasons_of(kernel.inject_kernels(model))
    assert ("transformer_blocks.0" in reasons) == bool(more)
    assert computing(expected, model, arguments) == (WITHOUT_BLOCKS if more else calls_of(2))


def test_a_subclass_with_a_forward_of_its_own_is_left_alone(kernel, device):
    model, arguments, expected = prepared(device)
    block = model.transformer_blocks[1]

    def forward(self, *args, **kwargs):
        return super(type(block), self).forward(*args, **kwargs)

    block.__class__ = type("MyBlock", (type(block),), {"forward": forward})
    reasons = reasons_of(kernel.inject_kernels(model))
    assert "not the one known" in reasons["transformer_blocks.1"]
    assert computing(expected, model, arguments) == {**calls_of(1), **WITHOUT_BLOCKS}


@pytest.mark.kernels_ci
def test_nothing_is_replaced_by_its_name(kernel, device):
    """diffusers' RMSNorm is not torch's, with a weight or without, and a GEGLU is no GELU."""
    model, arguments, _ = prepared(device, model_config={"blocks": 5})
    blocks, hidden = model.transformer_blocks, 64
    blocks[0].norm1 = torch.nn.RMSNorm(hidden, eps=1e-6, elementwise_affine=False)
    blocks[1].norm2 = RMSNorm(hidden, eps=1e-6, bias=True)
    torch.nn.init.normal_(blocks[1].norm2.bias)
    blocks[2].attn1.norm_q = RMSNorm(hidden, eps=1e-5)
    blocks[3].ff.net[0] = GEGLU(hidden, 4 * hidden)
    blocks[4].attn2.norm_k = torch.nn.LayerNorm(hidden)
    expected = reference(model.to(device), arguments)
    reasons = reasons_of(kernel.inject_kernels(model))
    assert reasons["transformer_blocks.1"] == "norm2 has a bias"
    assert "GEGLU" in reasons["transformer_blocks.3.ff.net.0"]
    # Every other norm is a kernel, too.
    assert computing(expected, model, arguments) == {
        "rms_norm_modulate": 1,
        "qk_norm_coordinate_rope": 5,
        "rms_norm": 9,
        "layer_norm": 1,
        "gated_residual": 7,
        "gated_residual_rms_norm_modulate": 8,
        "gelu": 4,
    }


def test_norms_of_unequal_eps(kernel, device):
    model, arguments, _ = prepared(device)
    for block in model.transformer_blocks:
        block.attn1.norm_k.eps = 0.1
        block.attn2.norm_q.eps = None
    expected = reference(model, arguments)
    kernel.inject_kernels(model)
    assert computing(expected, model, arguments) == calls_of(2, rms_norm=3)


@pytest.mark.parametrize("has_own_processor", [True, False])
def test_who_reads_the_tables_gets_the_models(kernel, device, has_own_processor):
    """As mixed precision does that casts a module's inputs."""

    def cast(module, args, kwargs):
        rope = tuple(table.bfloat16() for table in kwargs["image_rotary_emb"])
        return args, {**kwargs, "image_rotary_emb": rope}

    def change(model):
        block = model.transformer_blocks[0]
        if not has_own_processor:
            block.attn1.set_processor(LTXVideoAttnProcessor())
        block.register_forward_pre_hook(cast, with_kwargs=True)

    assert_alike(*pair(kernel, device, change)[:2])
