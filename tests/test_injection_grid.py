"""The rotary embedding's grid that is kept from call to call is never a wrong one."""

import copy

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from injected_pairs import assert_alike, pair
from ltx_models import inputs, run, transformer

pytestmark = pytest.mark.usefixtures("_one_thread")


class Scale:
    """A number of the user's own."""

    def __init__(self, value):
        self.value = value

    def __rmul__(self, other):
        return other * self.value

    def __mul__(self, other):
        return other * self.value


def write_array(device):
    scale = np.array([0.1], dtype=np.float32)
    return (scale, 32.0, 32.0), lambda: scale.fill(0.9)


def write_array_of_no_dimension(device):
    scale = np.array(0.1, dtype=np.float32)
    return (scale, 32.0, 32.0), lambda: scale.fill(0.9)


def write_whole_array(device):
    scales = np.array([0.1, 32.0, 32.0], dtype=np.float32)
    return scales, lambda: scales.__setitem__(0, 0.9)


def write_list(device):
    scales = [0.1, 32.0, 32.0]
    return scales, lambda: scales.__setitem__(0, 0.9)


def write_number(device):
    scale = Scale(0.1)
    return (scale, 32.0, 32.0), lambda: setattr(scale, "value", 0.9)


def write_tensor(device):
    scale = torch.tensor(0.1, device=device)
    return (scale, 32.0, 32.0), lambda: scale.data.fill_(0.9)


def write_whole_tensor(device):
    scales = torch.tensor([0.1, 32.0, 32.0], device=device)
    return scales, lambda: scales.data[0].fill_(0.9)


WRITES = [
    write_array,
    write_array_of_no_dimension,
    write_whole_array,
    write_list,
    write_number,
    write_tensor,
    write_whole_tensor,
]


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_scales_are_changed_in_place(kernel, device, write):
    if device == "cuda" and "array" in write.__name__:
        pytest.skip("the model itself multiplies a tensor on a GPU by no array")
    model, plain, _ = pair(kernel, device)
    scales, change = write(device)
    arguments = inputs(plain, rope_interpolation_scale=scales)
    unlike = run(plain, arguments)
    assert_alike(model, plain, arguments)
    change()
    assert_alike(model, plain, arguments, unlike=unlike)


@pytest.mark.parametrize("name", ["num_frames", "height", "width"])
def test_sizes_that_are_equal_and_not_the_same(kernel, device, name):
    """Equal keys of other types: True is 1, and 2.0 is 2."""
    model, plain, _ = pair(kernel, device)
    arguments = inputs(plain)
    assert_alike(model, plain, arguments)
    assert_alike(model, plain, {**arguments, name: float(arguments[name])})
    assert_alike(model, plain, {**arguments, name: np.int64(arguments[name])})


@pytest.mark.parametrize(
    "name, value",
    [
        ("base_num_frames", 7),
        ("base_height", 100),
        ("base_width", 100),
        ("patch_size", 3),
        ("patch_size_t", 3),
        ("theta", 10.0),
    ],
)
def test_attributes_of_the_embedding_change(kernel, device, name, value):
    model, plain, _ = pair(kernel, device)
    arguments = inputs(plain)
    unlike = run(plain, arguments)
    assert_alike(model, plain, arguments)
    for candidate in (model, plain):
        setattr(candidate.rope, name, value)
    assert_alike(model, plain, arguments, unlike=unlike)


def test_the_grid_is_written(kernel, device):
    """A hook on the embedding that writes the tables, in one forward only."""
    model, plain, _ = pair(kernel, device)
    arguments = inputs(plain)

    def write(module, args, output):
        for table in output:
            table.data.mul_(0.5)

    assert_alike(model, plain, arguments)
    handles = [candidate.rope.register_forward_hook(write) for candidate in (model, plain)]
    assert_alike(model, plain, arguments)
    for handle in handles:
        handle.remove()
    assert_alike(model, plain, arguments)


def test_what_a_forward_read_of_the_tables_is_its_own(kernel, device):
    """A hook writes what it found in one forward; the next one's are as they were."""
    model, plain, _ = pair(kernel, device)
    arguments = inputs(plain)

    def write(block, args, kwargs):
        cos, sin = kwargs["image_rotary_emb"]
        cos.data.mul_(0.5)
        sin.data.mul_(0.5)

    handles = [
        candidate.transformer_blocks[0].register_forward_pre_hook(write, with_kwargs=True)
        for candidate in (model, plain)
    ]
    assert_alike(model, plain, arguments)
    for handle in handles:
        handle.remove()
    assert_alike(model, plain, arguments)


# ------------------------------------------------------------------------------------------------
# Modes in which tensors are none that could be kept


def under_fake_tensors(model, arguments):
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert run(model, arguments).shape == arguments["hidden_states"].shape


def with_fake_arguments(model, arguments):
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    arguments = {
        k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()
    }
    with mode:
        out = run(model, arguments)
    assert out.shape == arguments["hidden_states"].shape


def traced(mode):
    def trace(model, arguments):
        def forward(x):
            return run(model, {**arguments, "hidden_states": x})

        graph = make_fx(forward, tracing_mode=mode, _allow_non_fake_inputs=True)(
            arguments["hidden_states"]
        )
        out = graph(arguments["hidden_states"])
        assert out.shape == arguments["hidden_states"].shape

    trace.__name__ = f"traced_{mode}"
    return trace


def functionalized(model, arguments):
    torch.func.functionalize(lambda x: run(model, {**arguments, "hidden_states": x}))(
        arguments["hidden_states"]
    )


def in_inference_mode(model, arguments):
    with torch.inference_mode():
        model(**arguments)


def in_vmap(model, arguments):
    def forward(x):
        return run(model, {**arguments, "hidden_states": x})

    x = arguments["hidden_states"]
    # Of PyTorch's attentions not all take a mask in a transform.
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        torch.func.vmap(forward)(torch.stack([x, x]))


def with_tangents(model, arguments):
    def forward(x):
        return run(model, {**arguments, "hidden_states": x})

    x = arguments["hidden_states"]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        torch.func.jvp(forward, (x,), (torch.ones_like(x),))


def exported(model, arguments):
    torch.export.export(model, (), {**arguments, "return_dict": False}, strict=False)


TRACES = [
    under_fake_tensors,
    with_fake_arguments,
    traced("fake"),
    traced("symbolic"),
    traced("real"),
    functionalized,
    in_inference_mode,
    in_vmap,
    with_tangents,
    exported,
]


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace.__name__)
@pytest.mark.parametrize("is_warm", [True, False], ids=["warm", "cold"])
def test_nothing_of_a_trace_is_kept(kernel, device, trace, is_warm):
    """The model runs as before, whether its grid was made before the trace or by it."""
    model, plain, _ = pair(kernel, device)
    arguments = inputs(plain)
    if is_warm:
        assert_alike(model, plain, arguments)
    trace(plain, arguments)
    trace(model, arguments)
    assert_alike(model, plain, arguments)
    gradients = []
    for candidate in (model, plain):
        candidate.zero_grad()
        candidate(**arguments, return_dict=False)[0].square().sum().backward()
        gradients.append(candidate.proj_in.weight.grad)
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)


def test_a_copy_in_a_fake_mode(kernel, device):
    model, plain, _ = pair(kernel, device)
    arguments = inputs(plain)
    assert_alike(model, plain, arguments)
    with FakeTensorMode(allow_non_fake_inputs=True):
        copy.deepcopy(model)
    assert_alike(model, plain, arguments)
    assert_alike(copy.deepcopy(model), transformer(device), arguments)
