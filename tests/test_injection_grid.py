"""The cached grid of the rotary embedding is never stale."""

import copy

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from injected_pairs import assert_alike, assert_gradients_agree, pair
from ltx_models import inputs, run

pytestmark = pytest.mark.usefixtures("_one_thread")

WRITES = {
    "list": lambda device: [0.1, 32.0, 32.0],
    "array": lambda device: np.array([0.1, 32.0, 32.0], dtype=np.float32),
    "tensor": lambda device: torch.tensor([0.1, 32.0, 32.0], device=device),
    "array in a tuple": lambda device: (np.array([0.1], dtype=np.float32), 32.0, 32.0),
    "tensor in a tuple": lambda device: (torch.tensor([0.1], device=device), 32.0, 32.0),
}


@pytest.mark.parametrize("case", WRITES)
def test_scales_are_changed_in_place(kernel, device, case):
    if device == "cuda" and "array" in case:
        pytest.skip("the model itself multiplies a tensor on a GPU by no array")
    model, plain, _ = pair(kernel, device)
    scales = WRITES[case](device)
    arguments = inputs(plain, rope_interpolation_scale=scales)
    unlike = run(plain, arguments)
    assert_alike(model, plain, arguments)
    (scales[0] if isinstance(scales, tuple) else scales)[0] = 0.9
    assert_alike(model, plain, arguments, unlike=unlike)


@pytest.mark.parametrize("name", ["num_frames", "height", "width"])
def test_sizes_that_are_equal_and_not_the_same(kernel, device, name):
    """Equal keys of different types: 2.0 and 2."""
    model, plain, _ = pair(kernel, device)
    arguments = inputs(plain)
    for cls in (int, float, np.int64):
        assert_alike(model, plain, {**arguments, name: cls(arguments[name])})


@pytest.mark.parametrize(
    "name", ["base_num_frames", "base_height", "base_width", "patch_size", "patch_size_t", "theta"]
)
def test_attributes_of_the_embedding_change(kernel, device, name):
    model, plain, _ = pair(kernel, device)
    arguments = inputs(plain)
    unlike = run(plain, arguments)
    assert_alike(model, plain, arguments)
    for candidate in (model, plain):
        setattr(candidate.rope, name, 7.0 if name == "theta" else 7)
    assert_alike(model, plain, arguments, unlike=unlike)


# ------------------------------------------------------------------------------------------------
# Modes whose tensors cannot be cached


def forward_of(model, arguments):
    return lambda x: run(model, {**arguments, "hidden_states": x})


def with_fake_arguments(model, arguments):
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    arguments = {
        k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()
    }
    with mode:
        assert run(model, arguments).shape == arguments["hidden_states"].shape
        copy.deepcopy(model)


def traced(mode):
    def trace(model, arguments):
        x = arguments["hidden_states"]
        forward = forward_of(model, arguments)
        graph = make_fx(forward, tracing_mode=mode, _allow_non_fake_inputs=True)(x)
        assert graph(x).shape == x.shape

    trace.__name__ = f"traced_{mode}"
    return trace


def functionalized(model, arguments):
    torch.func.functionalize(forward_of(model, arguments))(arguments["hidden_states"])


def in_inference_mode(model, arguments):
    with torch.inference_mode():
        model(**arguments)


def in_vmap(model, arguments):
    x = arguments["hidden_states"]
    # Not all of PyTorch's attentions accept a mask in a transform.
    with sdpa_kernel(SDPBackend.MATH):
        torch.func.vmap(forward_of(model, arguments))(torch.stack([x, x]))


def with_tangents(model, arguments):
    x = arguments["hidden_states"]
    with sdpa_kernel(SDPBackend.MATH):
        torch.func.jvp(forward_of(model, arguments), (x,), (torch.ones_like(x),))


def exported(model, arguments):
    torch.export.export(model, (), {**arguments, "return_dict": False}, strict=False)


TRACES = [
    with_fake_arguments,
    traced("fake"),
    traced("real"),
    traced("symbolic"),
    functionalized,
    in_inference_mode,
    in_vmap,
    with_tangents,
    exported,
]


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("is_warm", [True, False], ids=["warm", "cold"])
def test_nothing_of_a_trace_is_kept(kernel, device, trace, is_warm):
    """The model runs as before, whether its grid was made before or during the trace."""
    model, plain, _ = pair(kernel, device, blocks=1)
    arguments = inputs(plain)
    if is_warm:
        assert_alike(model, plain, arguments)
    trace(model, arguments)
    assert_alike(model, plain, arguments)
    assert_gradients_agree(model, plain, arguments, 1e-3)
