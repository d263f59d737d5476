"""Behaviour of injected models that was untested until faults were seeded (tools/seeded_faults.toml)."""

import contextlib
import copy

import pytest
import torch
from peft import LoraConfig

from families import FAMILIES, assert_close, prepared, run
from graphs import Pair, graphs  # noqa: F401
from ltx_models import inputs, transformer

pytestmark = pytest.mark.usefixtures("_one_thread")

# In each, the last layer of a block's feed-forward of the text.
DOWN_OF_TEXT = {"flux": "ff_context.net.2", "qwenimage": "txt_mlp.net.2"}


def test_a_block_that_sd3_skips(kernel, device):
    """The block after it gets the same tensors, and must not use what was computed for the skipped one."""
    family = FAMILIES["sd3"]
    model, plain, arguments = prepared(family, device)
    kernel.inject_kernels(model)
    without = run(plain, arguments)
    arguments["skip_layers"] = [1]
    expected = family.reference(plain, arguments)
    assert (expected - without).norm() > 0.01 * without.norm()
    assert_close(run(model, arguments), expected)


def test_two_modulations_of_qwenimage(kernel, device):
    """In image editing, tokens of the reference image have the modulation of time step 0."""
    family = FAMILIES["qwenimage"]
    config = {"zero_cond_t": True}
    model, plain, arguments = prepared(family, device, config=config, images=2)
    kernel.inject_kernels(model)
    assert_close(run(model, arguments), family.reference(plain, arguments))


@pytest.mark.parametrize("name", DOWN_OF_TEXT)
def test_float16_is_clipped_to_its_range(kernel, device, name):
    """Text beyond the range after the first block does not become infinite, as in diffusers."""
    family = FAMILIES[name]
    model, plain, arguments = prepared(family, device, torch.float16)
    for candidate in (model, plain):
        layer = family.part(candidate, "block").get_submodule(DOWN_OF_TEXT[name])
        torch.nn.init.constant_(layer.bias, 60000.0)
    kernel.inject_kernels(model)
    texts = []
    following = family.part(plain, "next_block")
    following.register_forward_pre_hook(
        lambda module, args, kwargs: texts.append(kwargs["encoder_hidden_states"]),
        with_kwargs=True,
    )
    expected = run(plain, arguments)
    assert texts[0].abs().max() == 65504
    assert expected.isfinite().all()
    assert (run(model, arguments) - expected).norm() < 0.03 * expected.norm()


def test_the_modulation_of_wan_stays_float32(kernel, device):
    """Only the result is rounded: nearly all bits of the attention's input are the eager model's."""
    family = FAMILIES["wan"]
    model, plain, arguments = prepared(family, device, torch.bfloat16, batch=1, tokens=4)
    kernel.inject_kernels(model)
    inputs = []
    for candidate in (model, plain):
        family.part(candidate, "attention").register_forward_pre_hook(
            lambda module, args, kwargs: inputs.append([*args, *kwargs.values()][0]),
            with_kwargs=True,
        )
        run(candidate, arguments)
    mine, expected = inputs
    assert mine.dtype == expected.dtype == torch.bfloat16
    assert (mine != expected).float().mean() < 0.02


def test_coordinates_of_another_grid(kernel, device):
    """Of as many tokens. Nothing is kept within a mode, such as the one that counts the kernels' calls."""
    plain = transformer(device)
    model = copy.deepcopy(plain)
    kernel.inject_kernels(model)
    arguments = inputs(plain, grid=(2, 3, 4))
    for grid in ((2, 3, 4), (4, 2, 3), (2, 4, 3), (2, 3, 4)):
        arguments.update(zip(("num_frames", "height", "width"), grid, strict=True))
        assert_close(run(model, arguments), run(plain, arguments), 1e-4)


def test_graphs_after_the_scale_of_an_adapter_alone_changed(graphs, device):  # noqa: F811
    """set_adapters also sets which adapters are active; peft's set_scale changes one number."""
    family = FAMILIES["ltx"]
    pair = Pair(graphs, family, device)
    config = LoraConfig(r=4, init_lora_weights=False, target_modules=family.lora_targets)
    adapted = family.model(device)
    adapted.add_adapter(config)
    state = {name: value for name, value in adapted.state_dict().items() if "lora_" in name}

    def add(model):
        model.add_adapter(config)
        model.load_state_dict(state, strict=False)

    def halve(model):
        for module in model.modules():
            if hasattr(module, "set_scale"):
                module.set_scale("default", 0.5)

    pair.both(add)
    pair.captured()
    captured = pair.calls.captured
    pair.both(halve)
    pair.captured()
    assert pair.calls.captured == captured + 1


@contextlib.contextmanager
def set_for_a_while(function, value, before):
    function(value)
    try:
        yield
    finally:
        function(before)


@pytest.mark.parametrize(
    "setting",
    [
        lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        lambda: set_for_a_while(torch.use_deterministic_algorithms, True, False),
        lambda: set_for_a_while(torch.set_float32_matmul_precision, "high", "highest"),
    ],
    ids=("sdpa", "deterministic", "precision"),
)
def test_settings_of_torch_have_graphs_of_their_own(graphs, device, setting):  # noqa: F811
    """The calls differ in nothing else."""
    pair = Pair(graphs, FAMILIES["ltx"], device)
    pair.captured()
    pair.call()
    replayed = pair.calls.replayed
    assert replayed == 2
    with setting():
        pair.call()
    assert pair.calls.replayed == replayed
