"""The package's attention as a backend of diffusers: chosen for a model, without an injection."""

import copy
import importlib.util
import itertools
import logging
import shutil
import sys
import types

import diffusers
import pytest
import torch
from diffusers.models import attention_dispatch
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from checks import relative_distance
from conftest import CHECKOUT, REPO_ID, VERSION
from families import FAMILIES, KERNEL_HEADS, run
from ltx_models import kernel_calls
from processes import run as run_program

BF16 = torch.bfloat16


@pytest.fixture
def backend(kernel):
    return kernel.register_attention_backend()


@pytest.fixture(autouse=True)
def _as_before(kernel, monkeypatch):
    """``set_attention_backend`` also chooses for all models."""
    registry = attention_dispatch._AttentionBackendRegistry
    monkeypatch.setattr(registry, "_active_backend", registry._active_backend)
    sys.modules[f"{kernel.__name__}.injection.attention.backend"]._logged.clear()


def qkv(device, dtype=BF16, queries=40, keys=24, heads=4, key_heads=4, head_dim=64):
    shapes = (queries, heads), (keys, key_heads), (keys, key_heads)
    return [torch.randn(2, *shape, head_dim, device=device).to(dtype) for shape in shapes]


def assert_attention(given, q, k, v, mask=None, **options):
    """Against PyTorch's attention in float64."""
    exact = [x.double().transpose(1, 2) for x in (q, k, v)]
    if mask is not None and mask.is_floating_point():
        mask = mask.double()
    sdpa = torch.nn.functional.scaled_dot_product_attention
    expected = sdpa(*exact, attn_mask=mask, **options).transpose(1, 2)
    assert relative_distance(given.double(), expected) < (
        1e-5 if q.dtype == torch.float32 else 0.01
    )


def dispatch(q, k, v, mask=None, **options):
    return attention_dispatch.dispatch_attention_fn(
        q, k, v, attn_mask=mask, backend="h100", **options
    )


def masks(device):
    valid = torch.arange(24, device=device) < torch.tensor([[24], [9]], device=device)
    bias = torch.randn(2, 1, 1, 24, device=device)
    return {
        "none": (None, None),
        "a row a sample": (valid, valid[:, None, None]),
        "booleans": (valid[:, None, None], valid[:, None, None]),
        "bias": (bias.bfloat16(), bias.bfloat16()),
        "for all queries": (valid[:, None, None].expand(2, 4, 40, 24),) * 2,
    }


@pytest.mark.parametrize("name", masks("cpu"))
def test_values(backend, device, name):
    q, k, v = qkv(device)
    mask, full = masks(device)[name]
    calls = kernel_calls(lambda: assert_attention(dispatch(q, k, v, mask), q, k, v, full))
    assert calls["attention"] == 1
    assert_attention(dispatch(q, k, v, mask, scale=0.3), q, k, v, full, scale=0.3)


def test_masks_as_for_the_native_backend(backend, device):
    """Of all shapes that broadcast to (B, H, Sq, Sk). In two dimensions it is (B, Sk) if both fit."""
    for batch, queries, keys in ((2, 6, 5), (2, 2, 5), (3, 3, 3), (2, 5, 1), (1, 4, 4)):
        q, k, v = qkv(device, queries=queries, keys=keys)
        k, v, q = (
            x[:1].repeat(batch, 1, 1, 1) + torch.randn(batch, 1, 1, 64).to(x) for x in (k, v, q)
        )
        sizes = [(1, batch), (1, 4), (1, queries), (1, keys)]
        shapes = {full[i:] for full in itertools.product(*sizes) for i in range(3)}
        for shape in sorted({*shapes, (batch, keys)}):
            valid = torch.rand(shape, device=device) < 0.7
            valid[..., -1] = True
            for mask in (valid, torch.randn(shape, device=device).to(BF16)):
                exact = [x.double() for x in (q, k, v)]
                bias = mask if mask.dtype == torch.bool else mask.double()
                options = {"attn_mask": bias, "backend": "native"}
                expected = attention_dispatch.dispatch_attention_fn(*exact, **options)
                assert relative_distance(dispatch(q, k, v, mask), expected) < 0.02, (shape, mask)


def window(b, h, q, k):
    return (q - k).abs() <= 5 + 5 * h


def block_mask(device, mask_mod=window):
    shape = None, 4, 40, 24
    mask = create_block_mask(mask_mod, *shape, device=device, BLOCK_SIZE=64)
    return mask, create_mask(mask_mod, *shape, device=device)


def test_masks_that_differ_between_queries(backend, device):
    """The kernel computes them if the keys of each query are an interval."""
    q, k, v = qkv(device)
    blocks, dense = block_mask(device)
    bias = torch.zeros(dense.shape, dtype=BF16, device=device).masked_fill(~dense, -torch.inf)
    for mask in (blocks, dense, bias, dense.expand(2, 4, 40, 24)):
        calls = kernel_calls(
            lambda mask=mask: assert_attention(dispatch(q, k, v, mask), q, k, v, dense)
        )
        assert calls == {"attention_blocks": 1}
    options = {"attention_kwargs": {"return_lse": True}}
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / 8
    exact = scores.masked_fill(~dense, -torch.inf).logsumexp(-1).transpose(1, 2)
    for mask in (blocks, dense):
        out, lse = dispatch(q, k, v, mask, **options)
        assert_attention(out, q, k, v, dense)
        torch.testing.assert_close(lse.double(), exact, rtol=1e-5, atol=1e-4)


def test_causal(backend, device):
    """Of query and key in the same place, as PyTorch's."""
    for queries, keys in ((40, 24), (24, 40)):
        q, k, v = qkv(device, queries=queries, keys=keys)

        def given(q=q, k=k, v=v):
            assert_attention(dispatch(q, k, v, is_causal=True), q, k, v, is_causal=True)

        assert kernel_calls(given) == {"attention_blocks": 1}
    assert_attention(
        dispatch(q.float(), k.float(), v.float(), is_causal=True), q, k, v, is_causal=True
    )


def test_a_block_mask_that_cannot_be_read(kernel, device, caplog, monkeypatch):
    """FlexAttention computes it, also if diffusers is loaded after the package."""
    decision = sys.modules[f"{kernel.__name__}.injection.attention.decision"]
    monkeypatch.setattr(decision.FLEX, "function", None)
    kernel.register_attention_backend()
    caplog.set_level(logging.WARNING, logger="h100_diffusers_kernels")
    q, k, v = qkv(device)
    mask, dense = block_mask(device, lambda b, h, q, k: (q + k) % 2 == 0)
    for _ in range(2):
        assert_attention(dispatch(q, k, v, mask), q, k, v, dense)
    readable, dense = block_mask(device)
    exact = [x.float() for x in (q, k, v)]
    assert_attention(dispatch(*exact, readable), *exact, dense)
    messages = [r.getMessage() for r in caplog.records if r.name == "h100_diffusers_kernels"]
    assert len(messages) == 2 and "does not give each query one interval" in messages[0]


def test_masks_that_cannot_be_split(backend, device):
    q, k, v = qkv(device, keys=40)
    config = types.SimpleNamespace(context_parallel_config=object())
    mask = create_block_mask(window, None, 4, 40, 40, device=device)
    for options in ({"attn_mask": mask}, {"is_causal": True}):
        with pytest.raises(ValueError, match="cannot be split between ranks: it"):
            attention_dispatch._AttentionBackendRegistry._backends[backend](
                q, k, v, _parallel_config=config, **options
            )


def test_grouped_queries(backend, device):
    q, k, v = qkv(device, key_heads=2)
    given = dispatch(q, k, v, enable_gqa=True)
    assert_attention(given, q, k, v, enable_gqa=True)


def test_what_pytorch_computes(backend, device, caplog):
    """Right values, and one line of log for each reason."""
    caplog.set_level(logging.WARNING, logger="h100_diffusers_kernels")
    q, k, v = qkv(device)
    by_query = torch.rand(2, 1, 40, 24, device=device) < 0.7
    for _ in range(2):
        assert_attention(dispatch(q, k, v, by_query), q, k, v, by_query)
        exact = [x.float() for x in (q, k, v)]
        assert_attention(dispatch(*exact), *exact)
    messages = [r.getMessage() for r in caplog.records if r.name == "h100_diffusers_kernels"]
    assert len(messages) == 2 and all("runs PyTorch's attention" in text for text in messages)
    leaf = q.float().requires_grad_()
    dispatch(leaf.to(BF16), k, v).float().square().sum().backward()
    other = q.float().requires_grad_()
    sdpa = torch.nn.functional.scaled_dot_product_attention
    sdpa(*[x.transpose(1, 2) for x in (other.to(BF16), k, v)]).float().square().sum().backward()
    assert relative_distance(leaf.grad, other.grad) < 0.05


def test_log_sum_exp(backend, device):
    q, k, v = qkv(device)
    out, lse = dispatch(q, k, v, attention_kwargs={"return_lse": True})
    assert_attention(out, q, k, v)
    scores = torch.einsum("bqhd,bkhd->bqhk", q.double(), k.double()) / 8
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-4)
    by_query = torch.rand(2, 1, 40, 24, device=device) < 0.7
    with pytest.raises(ValueError, match="no return_lse: its mask differs"):
        dispatch(q, k, v, by_query, attention_kwargs={"return_lse": True})


@pytest.mark.parametrize("name", ["flux", "wan", "qwenimage", "ltx", "z_image"])
def test_models(kernel, backend, device, name):
    """The backend alone, by ``set_attention_backend`` and for a block of code, and with the injection."""
    family = FAMILIES[name]
    model = family.model(device, BF16, **KERNEL_HEADS)
    arguments = family.inputs(device, BF16, seed=2)
    expected = run(model, arguments)
    before = copy.deepcopy(model)
    model.set_attention_backend(backend)
    attentions = kernel_calls(run, model, arguments)["attention"]
    assert attentions and relative_distance(run(model, arguments), expected) < 0.02
    with attention_dispatch.attention_backend(backend):
        assert kernel_calls(run, before, arguments)["attention"] == attentions
    report = kernel.inject_kernels(model)
    assert relative_distance(run(model, arguments), expected) < 0.02
    calls = kernel_calls(run, model, arguments)
    # diffusers repeats LTX-Video's mask for the heads, which the backend cannot see.
    on_kernels = sum(calls.get(name, 0) for name in ("attention", "attention_out"))
    assert on_kernels == attentions or (name == "ltx" and on_kernels == 2 * attentions)
    assert not any(entry.own_attention for entry in report.calls)
    kernel.eject_kernels(model)
    model.set_attention_backend("native")
    assert torch.equal(run(model, arguments), expected)


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled(backend, device):
    family = FAMILIES["flux"]
    model = family.model(device, BF16, **KERNEL_HEADS, **family.one_block)
    arguments = family.inputs(device, BF16, seed=2)
    expected = run(model, arguments)
    model.set_attention_backend(backend)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert relative_distance(run(compiled, arguments), expected) < 0.02


def test_registered_once(kernel):
    names = attention_dispatch.AttentionBackendName
    assert kernel.register_attention_backend() == kernel.register_attention_backend() == "h100"
    assert [name.value for name in names].count("h100") == 1
    assert names("h100") is names["H100"] is names.H100 and names.H100 == "h100"
    assert copy.deepcopy(names.H100) is names.H100


def test_diffusers_is_missing_or_different(kernel, monkeypatch):
    monkeypatch.delattr(attention_dispatch, "_AttentionBackendRegistry")
    with pytest.raises(RuntimeError, match="no known registry of attention backends"):
        kernel.register_attention_backend()
    monkeypatch.delitem(sys.modules, "diffusers.models.attention_dispatch")
    with pytest.raises(RuntimeError, match="diffusers must be imported first"):
        kernel.register_attention_backend()


# -- The patch of docs/upstream.md ---------------------------------------------------------------


@pytest.mark.skipif(diffusers.__version__ != "0.42.1", reason="the patch is for diffusers 0.42.1")
@pytest.mark.skipif(shutil.which("patch") is None, reason="there is no patch program")
def test_the_patch_for_diffusers(kernel, device, tmp_path, monkeypatch):
    """It applies, and its backend computes the attention that the native one computes."""
    file = shutil.copy(attention_dispatch.__file__, tmp_path)
    process = run_program("patch", file, CHECKOUT / "docs" / "upstream.patch")
    assert process.returncode == 0 and "fuzz" not in process.stdout, process.stdout
    spec = importlib.util.spec_from_file_location("diffusers.models.patched", file)
    patched = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, patched)
    spec.loader.exec_module(patched)
    name = patched.AttentionBackendName.H100_HUB
    patched.DIFFUSERS_TRUST_REMOTE_KERNELS = True
    patched._check_attention_backend_requirements(name)
    patched._maybe_download_kernel_for_backend(name)
    config = patched._HUB_KERNELS_REGISTRY[name]
    assert (config.repo_id, config.version) == (REPO_ID, VERSION)
    assert config.kernel_fn is kernel.attention
    assert patched._AttentionBackendRegistry._is_context_parallel_available(name)

    def dispatch(*qkv, **options):
        return patched.dispatch_attention_fn(*qkv, backend=name, **options)

    q, k, v = qkv(device, key_heads=2)
    keys = torch.arange(24, device=device) < torch.tensor([[24], [9]], device=device)
    for mask in (None, keys, keys[:, None, None], torch.randn(1, 24, device=device).bfloat16()):
        expected = mask if mask is None or mask.dim() == 4 else mask[:, None, None]
        compiled = torch.compile(dispatch, fullgraph=True, backend="aot_eager")
        for function in (dispatch, compiled):
            given = function(q, k, v, attn_mask=mask, enable_gqa=True)
            assert_attention(given, q, k, v, expected, enable_gqa=True)
    scores = torch.einsum("bqhd,bkhd->bqhk", q.float(), k.repeat_interleave(2, 2).float()) / 8
    _, lse = dispatch(q, k, v, enable_gqa=True, attention_kwargs={"return_lse": True})
    torch.testing.assert_close(lse, scores.logsumexp(-1), atol=1e-3, rtol=0)
    for refused in ({"is_causal": True}, {"dropout_p": 0.1}, {"attn_mask": keys[:, None, :, None]}):
        with pytest.raises(ValueError, match="h100_hub"):
            dispatch(q, k, v, **refused)
