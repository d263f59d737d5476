"""Embeddings of positions and of time steps have the bits of diffusers' own, whatever is kept."""

import copy

import pytest
import torch
from diffusers.models import embeddings
from diffusers.models.transformers import transformer_flux, transformer_flux2
from torch._subclasses import FakeTensorMode

from families import FAMILIES

TIMESTEPS = {
    name: next(
        path
        for path, module in family.model("cpu").named_modules()
        if isinstance(module, embeddings.Timesteps)
    )
    for name, family in FAMILIES.items()
}
POSITIONS = {"flux": transformer_flux, "flux2": transformer_flux2}
every_family = pytest.mark.parametrize("name", TIMESTEPS)
every_position = pytest.mark.parametrize("name", POSITIONS)


def pair_of(kernel, device, name, path):
    """A module of an injected model, the same of a plain one, and the injection's report."""
    plain = FAMILIES[name].model(device)
    model = copy.deepcopy(plain)
    report = kernel.inject_kernels(model)
    return model.get_submodule(path), plain.get_submodule(path), report


def kept_of(module):
    return module.forward.__self__.cached


def assert_same(module, plain, x):
    """Of one tensor twice, and of another of the same form in between."""
    with torch.no_grad():
        for given in (x, x.flip(0), x):
            expected = plain(given)
            out = module(given)
            torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
            assert type(out) is type(expected)
        return out


def positions(device, dtype=torch.float32, axes=3, tokens=37):
    """Of text, which has none, and of a picture; some are negative or large."""
    ids = torch.zeros(tokens, axes, device=device)
    ids[5:] = torch.arange((tokens - 5) * axes, device=device).view(-1, axes) * 3 - 40
    return ids.to(dtype)


def steps(device, dtype=torch.float32):
    return torch.tensor([1000.0, 937.5, 0.25, 0.0, -3.0], device=device).to(dtype)


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64]


@every_family
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_time_steps(kernel, device, name, dtype):
    module, plain, _ = pair_of(kernel, device, name, TIMESTEPS[name])
    assert_same(module, plain, steps(device, dtype))
    kept = kept_of(module)
    assert_same(module, plain, steps(device, dtype))
    assert kept is not None and kept_of(module) is kept


@every_position
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_positions(kernel, device, name, dtype):
    module, plain, report = pair_of(kernel, device, name, "pos_embed")
    ids = positions(device, dtype, axes=len(module.axes_dim))
    cos, sin = assert_same(module, plain, ids)
    assert cos.dtype == sin.dtype == torch.float32 and cos.is_contiguous()
    kept = kept_of(module)
    assert_same(module, plain, ids[:11])
    assert kept is not None and kept_of(module) is kept
    (calls,) = [entry for entry in report.calls if entry.name == "pos_embed"]
    assert (calls.on_kernels, calls.fell_back) == (6, {})


@pytest.mark.parametrize("theta", [10000, 2000, 1e4])
@pytest.mark.parametrize("dims", [(16, 56, 56), (32, 32, 64), (2, 4, 6)])
def test_positions_of_published_sizes(kernel, device, theta, dims):
    module, plain, _ = pair_of(kernel, device, "flux", "pos_embed")
    for candidate in (module, plain):
        candidate.theta, candidate.axes_dim = theta, list(dims)
    assert_same(module, plain, positions(device, torch.bfloat16, tokens=4608))


@every_position
def test_attributes_of_positions_change(kernel, device, name):
    module, plain, _ = pair_of(kernel, device, name, "pos_embed")
    ids = positions(device, axes=len(module.axes_dim))
    before = assert_same(module, plain, ids)
    for candidate in (module, plain):
        candidate.theta = 500
    (cos, _) = assert_same(module, plain, ids)
    assert not cos.equal(before[0])
    for candidate in (module, plain):
        # In place.
        candidate.axes_dim = list(candidate.axes_dim)
    assert_same(module, plain, ids)
    for candidate in (module, plain):
        candidate.axes_dim[1] += 2
    (cos, _) = assert_same(module, plain, ids)
    assert cos.shape[1] == before[0].shape[1] + 2


@pytest.mark.parametrize(
    "attribute, value",
    [
        ("num_channels", 32),
        ("num_channels", 33),
        ("flip_sin_to_cos", False),
        ("downscale_freq_shift", 1),
        ("downscale_freq_shift", 0.5),
        ("scale", 1000),
        ("scale", 0.1),
    ],
)
def test_attributes_of_time_steps_change(kernel, device, attribute, value):
    module, plain, _ = pair_of(kernel, device, "flux", TIMESTEPS["flux"])
    before = assert_same(module, plain, steps(device))
    for candidate in (module, plain):
        setattr(candidate, attribute, value)
    out = assert_same(module, plain, steps(device))
    assert out.shape != before.shape or not out.equal(before)


def test_a_tensor_among_the_attributes(kernel, device):
    """It may have another value in the next call."""
    module, plain, _ = pair_of(kernel, device, "flux", TIMESTEPS["flux"])
    shift = torch.zeros((), device=device)
    for candidate in (module, plain):
        candidate.downscale_freq_shift = shift
    before = assert_same(module, plain, steps(device))
    shift.data.fill_(1)
    assert not assert_same(module, plain, steps(device)).equal(before)


@every_position
def test_forms_that_are_left_to_the_class(kernel, device, name):
    module, plain, _ = pair_of(kernel, device, name, "pos_embed")
    axes = len(module.axes_dim)
    if name == "flux":  # which has a table for fewer axes
        assert_same(module, plain, positions(device, axes=axes - 1))
    with pytest.raises(Exception) as raised:
        plain(positions(device, axes=axes)[0])
    with pytest.raises(type(raised.value)):
        module(positions(device, axes=axes)[0])
    assert_same(module, plain, positions(device, axes=axes)[:0])


def test_time_steps_of_no_batch(kernel, device):
    module, plain, _ = pair_of(kernel, device, "flux", TIMESTEPS["flux"])
    for candidate in (module, plain):
        with pytest.raises(AssertionError, match="1d"):
            candidate(torch.ones((), device=device))
    assert_same(module, plain, steps(device)[:0])


@every_position
def test_the_function_is_replaced(kernel, device, name, monkeypatch):
    library = POSITIONS[name]
    module, plain, report = pair_of(kernel, device, name, "pos_embed")
    ids = positions(device, axes=len(module.axes_dim))
    (before, _) = assert_same(module, plain, ids)
    own = library.get_1d_rotary_pos_embed
    doubled = lambda *args, **kwargs: [2 * t for t in own(*args, **kwargs)]  # noqa: E731
    monkeypatch.setattr(library, "get_1d_rotary_pos_embed", doubled)
    (cos, _) = assert_same(module, plain, ids)
    assert cos.equal(2 * before)
    (calls,) = [entry for entry in report.calls if entry.name == "pos_embed"]
    assert calls.fell_back == {"get_1d_rotary_pos_embed was replaced": 3}


def test_the_function_of_time_steps_is_replaced(kernel, device, monkeypatch):
    module, plain, _ = pair_of(kernel, device, "wan", TIMESTEPS["wan"])
    before = assert_same(module, plain, steps(device))
    own = embeddings.get_timestep_embedding
    monkeypatch.setattr(embeddings, "get_timestep_embedding", lambda *a, **k: 2 * own(*a, **k))
    assert assert_same(module, plain, steps(device)).equal(2 * before)


def test_the_user_writes_the_tables(kernel, device):
    module, plain, _ = pair_of(kernel, device, "flux", "pos_embed")
    ids = positions(device)
    with torch.no_grad():
        for table in module(ids):
            table.fill_(7)
    assert_same(module, plain, ids)


def test_gradients(kernel, device):
    module, plain, _ = pair_of(kernel, device, "flux", TIMESTEPS["flux"])
    gradients = []
    for candidate in (module, plain):
        given = steps(device).requires_grad_()
        candidate(given).sum().backward()
        gradients.append(given.grad)
    assert gradients[0].equal(gradients[1]) and gradients[0].any()


def test_kept_values_serve_all_modes(kernel, device):
    """Those of inference mode are used outside of it, too."""
    module, plain, _ = pair_of(kernel, device, "flux", "pos_embed")
    ids = positions(device)
    with torch.inference_mode():
        expected = plain(ids)
        torch.testing.assert_close(module(ids), expected, rtol=0, atol=0)
    kept = kept_of(module)
    assert_same(module, plain, ids)
    assert kept_of(module) is kept
    with torch.no_grad():
        cos, _ = module(ids)
    assert not cos.is_inference()
    weight = torch.ones_like(cos).requires_grad_()
    (cos * weight).sum().backward()
    assert weight.grad.equal(cos)


def test_fake_tensors_are_not_kept(kernel, device):
    module, plain, _ = pair_of(kernel, device, "flux", "pos_embed")
    with FakeTensorMode() as mode, torch.no_grad():
        cos, _ = module(mode.from_tensor(positions(device)))
        assert cos.shape == (37, sum(module.axes_dim))
    assert kept_of(module) is None
    assert_same(module, plain, positions(device))


def test_compiled(kernel, device):
    module, plain, _ = pair_of(kernel, device, "flux", "pos_embed")
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        out = compiled(positions(device))
        torch.testing.assert_close(out, plain(positions(device)), rtol=0, atol=0)


def test_streams_and_graphs(kernel, device):
    """Of another stream nothing is taken, as it may not be there yet; a graph has values of its own."""
    if device != "cuda":
        pytest.skip("there are streams on a GPU alone")
    module, plain, _ = pair_of(kernel, device, "flux", "pos_embed")
    ids = positions(device)
    assert_same(module, plain, ids)
    kept = kept_of(module)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert_same(module, plain, ids)
        assert kept_of(module) is not kept
    torch.cuda.synchronize()
    kept = kept_of(module)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = module(ids)
    assert kept_of(module) is kept
    ids.add_(1)
    graph.replay()
    torch.testing.assert_close(captured, plain(ids), rtol=0, atol=0)
    assert_same(module, plain, ids)
