"""Hooks and other forwards on modules of an injected model, added and removed in any order."""

import itertools

import pytest

from changes import HOOKS, Counted
from graphs import module_of
from injected_pairs import reasons_of
from ltx_models import calls_of, computing, prepared, snapshot

pytestmark = pytest.mark.usefixtures("_one_thread")

# Hooks are added before they are removed, kernels injected before they are ejected.
ORDERS = [
    order
    for order in itertools.permutations(["add", "inject", "remove", "eject"])
    if order.index("add") < order.index("remove") and order.index("inject") < order.index("eject")
]


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_in_every_order(kernel, device, kind):
    model, arguments, expected = prepared(device, model_config={"blocks": 1})
    before = snapshot(model)
    block = model.transformer_blocks[0]
    targets = [block, block.attn1, block.attn2, block.ff, block.ff.net[0]]
    counts = [Counted() for _ in targets]
    steps = {
        "add": lambda: [HOOKS[kind](*both) for both in zip(targets, counts, strict=True)],
        "remove": lambda: [counted.remove() for counted in counts],
        "inject": lambda: kernel.inject_kernels(model),
        "eject": lambda: kernel.eject_kernels(model),
    }
    for order in ORDERS:
        is_hooked = is_injected = False
        for step in order:
            steps[step]()
            is_hooked = step == "add" or (is_hooked and step != "remove")
            is_injected = step == "inject" or (is_injected and step != "eject")
            for counted in counts:
                counted.count = 0
            calls = computing(expected, model, arguments)
            assert calls == (calls_of(1) if is_injected else {})
            assert all(counted.count == is_hooked for counted in counts)
        assert snapshot(model) == before


PATHS = {
    "block": "transformer_blocks.0",
    "attention": "transformer_blocks.0.attn1",
    "activation": "transformer_blocks.0.ff.net.0",
    "rope": "rope",
    "model": "",
}
WITHOUT_BLOCKS = {"qk_norm_coordinate_rope": 2, "rms_norm": 4, "gelu": 2}


# Remaining operator calls of a forward with two blocks.
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
    assert "not the known one" in reasons[PATHS[target]]
    assert computing(expected, model, arguments) == OF_CLASSES[target]


@pytest.mark.parametrize("more", ["", ", audio=None"], ids=["same", "another"])
def test_parameters_of_a_forward(kernel, device, monkeypatch, more):
    """A version of diffusers with another parameter may compute something different."""
    model, arguments, expected = prepared(device)
    block_class = type(model.transformer_blocks[0])
    parameters = "self, hidden_states, encoder_hidden_states, temb, image_rotary_emb"
    namespace = {"__name__": "diffusers.another_version", "original": block_class.forward}
    exec(
        f"def forward({parameters}=None, encoder_attention_mask=None{more}):\n"
        f"    return original({parameters}, encoder_attention_mask)",
        namespace,
    )
    for known in module_of(kernel, "core.checks")._known:
        if getattr(known, "function", None) is block_class.forward:
            monkeypatch.setattr(known, "function", None)  # as before diffusers is loaded
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
    assert "not the known one" in reasons["transformer_blocks.1"]
    assert computing(expected, model, arguments) == {**calls_of(1), **WITHOUT_BLOCKS}
