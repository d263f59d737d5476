"""Embeddings of positions and time steps are bitwise equal to diffusers', with all uses of the cache."""

import pytest
import torch
from diffusers.models import embeddings
from diffusers.models.transformers import transformer_flux, transformer_flux2, transformer_flux3
from torch._subclasses import FakeTensorMode

from families import FAMILIES, run
from injected_pairs import assert_gradients_agree, fallen_back, injected

TIMESTEPS = {  # the first of each family; Krea 2 has none
    name: paths[0]
    for name, family in FAMILIES.items()
    if (
        paths := [
            path
            for path, module in family.model("cpu").named_modules()
            if isinstance(module, embeddings.Timesteps)
        ]
    )
}
POSITIONS = {"flux": transformer_flux, "flux2": transformer_flux2, "flux3": transformer_flux3}
every_position = pytest.mark.parametrize("name", POSITIONS)


def pair_of(kernel, device, name, path=None):
    """A module of an injected model, by default its time step embedding, the same module of a plain model,
    and the injection's report."""
    model, plain, report = injected(kernel, FAMILIES[name].model(device))
    path = path or TIMESTEPS[name]
    return model.get_submodule(path), plain.get_submodule(path), report


def kept_of(module):
    return module.forward.__self__.cached


def assert_same(module, plain, x):
    """Embeddings of one tensor twice, and of another with the same form in between."""
    with torch.no_grad():
        for given in (x, x.flip(0), x):
            expected = plain(given)
            out = module(given)
            torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
            assert type(out) is type(expected)
        return out


def positions(device, dtype=torch.float32, axes=3, tokens=37):
    """Positions of text (all 0) and of an image; some are negative or large."""
    ids = torch.zeros(tokens, axes, device=device)
    ids[5:] = torch.arange((tokens - 5) * axes, device=device).view(-1, axes) * 3 - 40
    return ids.to(dtype)


def steps(device, dtype=torch.float32):
    return torch.tensor([1000.0, 937.5, 0.25, 0.0, -3.0], device=device).to(dtype)


CASES = {**{f"{name} steps": name for name in TIMESTEPS}, **{name: name for name in POSITIONS}}


@pytest.mark.parametrize("case", CASES)
def test_values_are_kept_by_form(kernel, device, case):
    name, is_position = CASES[case], case in POSITIONS
    path = "pos_embed" if is_position else None
    module, plain, report = pair_of(kernel, device, name, path)
    make = positions if is_position else steps
    options = {"axes": len(module.axes_dim)} if is_position else {}
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.float32):
        x = make(device, dtype, **options)
        assert_same(module, plain, x)
        kept = kept_of(module)
        out = assert_same(module, plain, x[:3])
        assert kept is not None and kept_of(module) is kept
        if is_position:
            assert out[0].dtype == out[1].dtype == torch.float32 and out[0].is_contiguous()
    assert_same(module, plain, x[:0])
    assert fallen_back(report) == {}


@pytest.mark.parametrize("theta", [10000, 2000, 1e4])
@pytest.mark.parametrize("dims", [(16, 56, 56), (2, 4, 6)])
def test_positions_of_published_sizes(kernel, device, theta, dims):
    module, plain, _ = pair_of(kernel, device, "flux", "pos_embed")
    for candidate in (module, plain):
        candidate.theta, candidate.axes_dim = theta, list(dims)
    assert_same(module, plain, positions(device, torch.bfloat16, tokens=4608))


@pytest.mark.parametrize("fps", [None, 30, 23.976, torch.tensor(16.0)], ids=str)
def test_positions_of_cosmos(kernel, device, fps):
    """Tables of each axis are kept, if the frame rate is a number."""
    module, plain, report = pair_of(kernel, device, "cosmos", "rope")
    for sizes in ((3, 4, 6), (3, 6, 4), (1, 64, 48)):
        x = torch.empty(2, 4, *sizes, device=device)
        for factor in (1.0, 2.5):
            module.t_ntk_factor = plain.t_ntk_factor = factor
            for _ in range(2):
                with torch.no_grad():
                    tables, expected = module(x, fps), plain(x, fps)
                for mine, theirs in zip(tables, expected, strict=True):
                    assert torch.equal(mine, theirs) and mine.is_contiguous()
            assert (kept_of(module) is None) == isinstance(fps, torch.Tensor)
    assert fallen_back(report) == {}


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
    module, plain, _ = pair_of(kernel, device, "flux")
    before = assert_same(module, plain, steps(device))
    for candidate in (module, plain):
        setattr(candidate, attribute, value)
    out = assert_same(module, plain, steps(device))
    assert out.shape != before.shape or not out.equal(before)


@pytest.mark.parametrize("case", [*POSITIONS, "steps"])
def test_forms_that_are_left_to_the_class(kernel, device, case):
    name, path = ("flux", None) if case == "steps" else (case, "pos_embed")
    module, plain, _ = pair_of(kernel, device, name, path)
    if case == "flux":  # which has a table for fewer axes
        assert_same(module, plain, positions(device, axes=2))
    x = torch.ones((), device=device)
    if case != "steps":
        x = positions(device, axes=len(module.axes_dim))[0]
    with pytest.raises(Exception) as raised:
        plain(x)
    with pytest.raises(type(raised.value)):
        module(x)


@pytest.mark.parametrize("case", [*POSITIONS, "steps"])
def test_the_function_is_replaced(kernel, device, case, monkeypatch):
    name, path = ("wan", None) if case == "steps" else (case, "pos_embed")
    module, plain, report = pair_of(kernel, device, name, path)
    library, function, x = embeddings, "get_timestep_embedding", steps(device)
    if case != "steps":
        library, function = POSITIONS[case], "get_1d_rotary_pos_embed"
        x = positions(device, axes=len(module.axes_dim))
    before, own = assert_same(module, plain, x), getattr(library, function)

    def doubled(*args, **kwargs):
        result = own(*args, **kwargs)
        return [2 * t for t in result] if isinstance(result, (list, tuple)) else 2 * result

    monkeypatch.setattr(library, function, doubled)
    out = assert_same(module, plain, x)
    assert out[0].equal(2 * before[0])
    (reasons,) = fallen_back(report).values()
    assert reasons == {f"{function} was replaced": 3}


def test_the_user_writes_the_tables(kernel, device):
    module, plain, _ = pair_of(kernel, device, "flux", "pos_embed")
    ids = positions(device)
    with torch.no_grad():
        for table in module(ids):
            table.fill_(7)
    assert_same(module, plain, ids)


def test_gradients(kernel, device):
    module, plain, _ = pair_of(kernel, device, "flux")
    assert_gradients_agree(module, plain, (steps(device).requires_grad_(),), 1e-6)


def test_kept_values_serve_all_modes(kernel, device):
    """Values cached in inference mode are used outside of it."""
    module, plain, _ = pair_of(kernel, device, "flux", "pos_embed")
    ids = positions(device)
    with torch.inference_mode():
        torch.testing.assert_close(module(ids), plain(ids), rtol=0, atol=0)
    kept = kept_of(module)
    assert_same(module, plain, ids)
    assert kept_of(module) is kept
    with torch.no_grad():
        cos, _ = module(ids)
    assert not cos.is_inference()
    weight = torch.ones_like(cos).requires_grad_()
    (cos * weight).sum().backward()
    assert weight.grad.equal(cos)


def test_frequencies_of_ltx2_are_kept(kernel, device):
    model, _, _ = injected(kernel, FAMILIES["ltx2"].model(device))
    ropes = [module for name, module in model.named_modules() if name.endswith("rope")]
    assert len(ropes) == 4
    kept = []
    for seed in range(2):
        run(model, FAMILIES["ltx2"].inputs(device, seed=seed))
        kept.append([kept_of(rope) for rope in ropes])
    assert all(before is not None and before is after for before, after in zip(*kept, strict=True))


def test_values_of_several_sizes_are_kept(kernel, device):
    """Those of the latest eight, so that calls of other sizes may come in between."""
    module, plain, _ = pair_of(kernel, device, "cogview4", "rope")
    own = lambda x: tuple(table.to(device) for table in plain(x))  # noqa: E731
    images = [torch.zeros(1, 4, 2 * rows, 6, device=device) for rows in range(1, 10)]
    for image in images:
        assert_same(module, own, image)
    kept = kept_of(module)
    assert_same(module, own, images[1])
    assert kept_of(module) is kept and len(kept) == 8
    assert_same(module, own, images[0])
    assert kept_of(module) is not kept


@pytest.mark.usefixtures("_fresh_compiler")
def test_nothing_of_a_trace_is_kept(kernel, device):
    module, plain, _ = pair_of(kernel, device, "flux", "pos_embed")
    with FakeTensorMode() as mode, torch.no_grad():
        cos, _ = module(mode.from_tensor(positions(device)))
        assert cos.shape == (37, sum(module.axes_dim))
    assert kept_of(module) is None
    assert_same(module, plain, positions(device))
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    with torch.no_grad():
        out = compiled(positions(device))
        torch.testing.assert_close(out, plain(positions(device)), rtol=0, atol=0)


def test_streams_and_graphs(kernel, device):
    """Another stream's values are not used, because they may not be ready; a graph has its own values."""
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
