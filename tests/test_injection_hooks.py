"""Hooks and other forwards on the modules of an injected model, coming and going in any order."""

import functools
import itertools

import accelerate
import pytest
import torch
from accelerate.hooks import add_hook_to_module, remove_hook_from_module
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.models.activations import GEGLU
from diffusers.models.normalization import RMSNorm
from diffusers.models.transformers.transformer_ltx import LTXVideoAttnProcessor

from ltx_models import (
    calls_of,
    computing,
    either_order,
    kernel_calls,
    prepared,
    reference,
    run,
    snapshot,
)

pytestmark = pytest.mark.usefixtures("_one_thread")


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


class Accelerate:
    @staticmethod
    def add(module, counted):
        add_hook_to_module(module, AccelerateHook(counted))

    @staticmethod
    def remove(module):
        remove_hook_from_module(module)


class AccelerateChain(Accelerate):
    @staticmethod
    def add(module, counted):
        add_hook_to_module(module, AccelerateHook(Counted()))
        add_hook_to_module(module, AccelerateHook(counted), append=True)


class Diffusers:
    hooks = {"counted": DiffusersHook}

    @classmethod
    def add(cls, module, counted):
        registry = HookRegistry.check_if_exists_or_initialize(module)
        for name, hook in cls.hooks.items():
            registry.register_hook(hook(counted if name == "counted" else Counted()), name)

    @classmethod
    def remove(cls, module):
        for name in reversed(cls.hooks):
            module._diffusers_hook.remove_hook(name, recurse=False)


class DiffusersForward(Diffusers):
    hooks = {"counted": DiffusersForwardHook}


class DiffusersChain(Diffusers):
    hooks = {"inner": DiffusersHook, "counted": DiffusersForwardHook, "outer": DiffusersHook}


class DiffusersAroundAccelerate:
    @staticmethod
    def add(module, counted):
        Accelerate.add(module, Counted())
        Diffusers.add(module, counted)

    @staticmethod
    def remove(module):
        Diffusers.remove(module)
        Accelerate.remove(module)


class AccelerateAroundDiffusers:
    @staticmethod
    def add(module, counted):
        DiffusersForward.add(module, Counted())
        Accelerate.add(module, counted)

    @staticmethod
    def remove(module):
        Accelerate.remove(module)
        DiffusersForward.remove(module)


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
    Accelerate,
    AccelerateChain,
    Diffusers,
    DiffusersForward,
    DiffusersChain,
    DiffusersAroundAccelerate,
    AccelerateAroundDiffusers,
    Torch,
]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
# Hooks are added before they are removed, kernels injected before they are ejected.
ORDERS = [
    order
    for order in itertools.permutations(["add", "inject", "remove", "eject"])
    if order.index("add") < order.index("remove") and order.index("inject") < order.index("eject")
]
ONE_BLOCK = {"blocks": 1}


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
@every_kind
def test_hooks_in_every_order(kernel, device, kind, order):
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


@every_kind
@either_order
def test_hooks_on_the_norm_of_a_block(kernel, device, kind, is_injected_first):
    """The norm must be called for its hooks to run. All else is the kernels'."""
    model, arguments, expected = prepared(device)
    counted = Counted()
    norm = model.transformer_blocks[0].norm1
    if is_injected_first:
        kernel.inject_kernels(model)
        kind.add(norm, counted)
    else:
        kind.add(norm, counted)
        left_alone = kernel.inject_kernels(model).left_alone
        reasons = {entry.name: entry.reason for entry in left_alone}
        assert "norm1 has hooks" in reasons["transformer_blocks.0"]
    expected_calls = calls_of(2)
    del expected_calls["rms_norm_modulate"]
    assert computing(expected, model, arguments) == expected_calls
    assert counted.count == 1


@every_kind
@either_order
def test_hooks_on_the_norms_of_query_and_key(kernel, device, kind, is_injected_first):
    """Those norms are called; the others, and the rotation, are the kernels' all the same."""
    model, arguments, expected = prepared(device, model_config=ONE_BLOCK)
    counted = Counted()
    if is_injected_first:
        kernel.inject_kernels(model)
    block = model.transformer_blocks[0]
    kind.add(block.attn1.norm_q, counted)
    kind.add(block.attn2.norm_k, counted)
    kernel.inject_kernels(model)
    assert computing(expected, model, arguments) == calls_of(1)
    assert counted.count == 2


@every_kind
@either_order
def test_hooks_on_linear_layers(kernel, device, kind, is_injected_first):
    model, arguments, expected = prepared(device, model_config=ONE_BLOCK)
    counted = Counted()
    if is_injected_first:
        kernel.inject_kernels(model)
    linears = [m for m in model.transformer_blocks.modules() if type(m) is torch.nn.Linear]
    for linear in linears:
        kind.add(linear, counted)
    kernel.inject_kernels(model)
    assert computing(expected, model, arguments) == calls_of(1)
    assert counted.count == len(linears)


@every_kind
def test_hooks_on_the_rotary_embedding_see_tables(kernel, device, kind):
    model, arguments, expected = prepared(device, model_config=ONE_BLOCK)
    counted = Counted()
    kernel.inject_kernels(model)
    kind.add(model.rope, counted)
    with_tables = calls_of(1, qk_norm_coordinate_rope=0, qk_norm_rope=1)
    assert computing(expected, model, arguments) == with_tables
    assert counted.count == 1
    kind.remove(model.rope)
    assert computing(expected, model, arguments) == calls_of(1)


# ------------------------------------------------------------------------------------------------
# Other modules and other forwards than the known ones


def reasons_for_leaving(kernel, model):
    return {entry.name: entry.reason for entry in kernel.inject_kernels(model).left_alone}


def test_another_forward_on_the_instance_is_left_alone(kernel, device):
    """As guidance methods put it on a block."""
    model, arguments, expected = prepared(device, model_config={"blocks": 3})
    for module in (model.transformer_blocks[1], model.transformer_blocks[2].ff.net[0]):
        original = module.forward
        module.forward = lambda *args, _forward=original, **kwargs: _forward(*args, **kwargs)
    before = snapshot(model)
    reasons = reasons_for_leaving(kernel, model)
    assert "replaced by something else" in reasons["transformer_blocks.1"]
    assert "replaced by something else" in reasons["transformer_blocks.2.ff.net.0"]
    calls = computing(expected, model, arguments)
    assert calls["qk_norm_coordinate_rope"] == 3
    assert (calls["rms_norm_modulate"], calls["gelu"]) == (2, 2)
    kernel.eject_kernels(model)
    assert snapshot(model) == before


def test_another_forward_of_the_model_hands_nothing_on(kernel, device):
    model, arguments, expected = prepared(device)
    original = model.forward
    model.forward = lambda *args, **kwargs: original(*args, **kwargs)
    reasons = reasons_for_leaving(kernel, model)
    assert "replaced by something else" in reasons[""]
    assert computing(expected, model, arguments) == calls_of(2, joined=0)


@pytest.mark.parametrize("target", ["block", "attention", "activation", "rope", "model"])
def test_another_forward_of_a_class_is_left_alone(kernel, device, monkeypatch, target):
    model, arguments, expected = prepared(device)
    block = model.transformer_blocks[0]
    module = {
        "block": block,
        "attention": block.attn1,
        "activation": block.ff.net[0],
        "rope": model.rope,
        "model": model,
    }[target]
    original = type(module).forward

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        return original(self, *args, **kwargs)

    monkeypatch.setattr(type(module), "forward", forward)
    reasons = reasons_for_leaving(kernel, model)
    names = {
        "block": "transformer_blocks.0",
        "attention": "transformer_blocks.0.attn1",
        "activation": "transformer_blocks.0.ff.net.0",
        "rope": "rope",
        "model": "",
    }
    assert "not the one known" in reasons[names[target]]
    changes = {
        "attention": {"qk_norm_coordinate_rope": 0, "rms_norm": 0},
        "activation": {"gelu": 0},
        "rope": {"qk_norm_coordinate_rope": 0, "qk_norm_rope": 1},
        "model": {"joined": 0},
    }
    calls = computing(expected, model, arguments)
    if target == "block":
        assert calls == {"qk_norm_coordinate_rope": 2, "rms_norm": 4, "gelu": 2}
    else:
        assert calls == calls_of(2, **changes[target])


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
    reasons = reasons_for_leaving(kernel, model)
    assert ("transformer_blocks.0" in reasons) == bool(more)
    without_blocks = {"qk_norm_coordinate_rope": 2, "rms_norm": 4, "gelu": 2}
    assert computing(expected, model, arguments) == (without_blocks if more else calls_of(2))


def test_a_subclass_with_a_forward_of_its_own_is_left_alone(kernel, device):
    model, arguments, expected = prepared(device)
    block = model.transformer_blocks[1]

    def forward(self, *args, **kwargs):
        return super(type(block), self).forward(*args, **kwargs)

    block.__class__ = type("MyBlock", (type(block),), {"forward": forward})
    reasons = reasons_for_leaving(kernel, model)
    assert "not the one known" in reasons["transformer_blocks.1"]
    attentions_and_gelu = {"qk_norm_coordinate_rope": 2, "rms_norm": 4, "gelu": 2}
    assert computing(expected, model, arguments) == {**calls_of(1), **attentions_and_gelu}


@pytest.mark.parametrize("target", ["block", "activation", "rope", "processor"])
def test_what_is_replaced_after_the_injection_stays(kernel, device, target):
    """With right numbers: an attention processor that is not the kernels' own gets tables."""
    model, arguments, expected = prepared(device)
    kernel.inject_kernels(model)
    block = model.transformer_blocks[0]
    calls = []
    if target == "processor":

        class Processor(LTXVideoAttnProcessor):
            def __call__(self, *args, **kwargs):
                calls.append(1)
                return super().__call__(*args, **kwargs)

        block.attn1.set_processor(Processor())
    else:
        module = {"block": block, "activation": block.ff.net[0], "rope": model.rope}[target]
        original = type(module).forward.__get__(module)

        def forward(*args, **kwargs):
            calls.append(1)
            return original(*args, **kwargs)

        module.forward = forward
    computing(expected, model, arguments)
    assert calls == [1]
    kernel.eject_kernels(model)
    assert computing(expected, model, arguments) == {}
    assert calls == [1, 1]


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
    reasons = reasons_for_leaving(kernel, model)
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


def test_layers_of_another_dtype(kernel, device):
    """A layer that returns bfloat16: the residual stream and the norms stay in float32."""

    class Bfloat16Linear(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x).bfloat16()

    model, arguments, _ = prepared(device)
    block = model.transformer_blocks[0]
    for layer in (block.attn1.to_out[0], block.attn2.to_out[0], block.ff.net[2]):
        layer.__class__ = Bfloat16Linear
    expected = run(model, arguments)
    kernel.inject_kernels(model)
    with torch.no_grad():
        calls = computing(expected.double(), model, arguments, slack=2e-2)
    # Of the first block the residuals are the model's own code.
    assert calls["rms_norm_modulate"] == 3
    assert calls["gated_residual"] == 2
    assert calls["gated_residual_rms_norm_modulate"] == 1


@pytest.mark.parametrize("has_own_processor", [True, False])
def test_who_reads_the_tables_gets_the_models(kernel, device, has_own_processor):
    """As mixed precision does that casts a module's inputs."""
    model, arguments, _ = prepared(device)
    plain, _, _ = prepared(device)
    kernel.inject_kernels(model)

    def cast(module, args, kwargs):
        rope = tuple(table.bfloat16() for table in kwargs["image_rotary_emb"])
        return args, {**kwargs, "image_rotary_emb": rope}

    for candidate in (model, plain):
        block = candidate.transformer_blocks[0]
        if not has_own_processor:
            block.attn1.set_processor(LTXVideoAttnProcessor())
        block.register_forward_pre_hook(cast, with_kwargs=True)
    expected = run(plain, arguments)
    torch.testing.assert_close(run(model, arguments), expected, rtol=1e-5, atol=1e-5)


def test_other_models_are_not_touched(kernel, device):
    model, _, _ = prepared(device)
    other, arguments, expected = prepared(device)
    kernel.inject_kernels(model)
    assert kernel_calls(run, other, arguments) == {}
    assert computing(expected, other, arguments) == {}
