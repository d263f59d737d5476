"""``inject_kernels(attention=...)``: which attentions run in 8 bits, and what the report counts.

The tests' models are small, so fewer tokens and smaller heads than usual run in 8 bits.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from checks import relative_distance
from families import FAMILIES, KERNEL_HEADS, run
from graphs import graphs, module_of, use_emulated_graphs  # noqa: F401
from injected_pairs import fallen_back
from ltx_models import operation_of
from small_models import BY_NAME
from small_models import run as run_small

pytestmark = pytest.mark.usefixtures("_one_thread", "_default_backend")

BFLOAT16 = torch.bfloat16
FLUX, WAN = FAMILIES["flux"], FAMILIES["wan"]
MIN_TOKENS, TOKENS = 8, {"tokens": 5, "text_length": 5}
BY_BLOCKS = "omnigen"  # its mask differs between queries
# The families whose attention runs in 8 bits, and with which values of ``precision``: those for video with
# heads of 128, where the attention's layers are quantized, too.
# Whose attention runs in 8 bits with "fp8", too.
IN_BOTH = {"HunyuanVideo", "HunyuanVideo 1.5", "LTX-2", "Cosmos", "MiniMax-H3", "Mochi"}


@pytest.fixture(autouse=True)
def _small(kernel, monkeypatch):
    decision = module_of(kernel, "attention.decision")
    monkeypatch.setattr(decision, "INT8_MIN_TOKENS", MIN_TOKENS)
    monkeypatch.setattr(decision, "INT8_ABOVE_HEAD_DIM", 32)


@pytest.fixture
def attentions(kernel, monkeypatch):
    """Each attention on the kernels: (operation, query, key, its other arguments)."""
    seen = []
    operations = module_of(kernel, "attention.decision").operations

    def record(name):
        own = getattr(operations, name)

        def recorded(q, k, v, **options):
            seen.append((name, q, k, options))
            return own(q, k, v, **options)

        monkeypatch.setattr(operations, name, recorded)

    record("attention")
    record("attention_int8")
    return seen


def models_of(kernel, family, device, **options):
    """The model in 16 bits, the same with attention in 8 bits, and the latter's report."""
    model = family.model(device, BFLOAT16, **{**KERNEL_HEADS, **options}).requires_grad_(False)
    plain = copy.deepcopy(model)
    kernel.inject_kernels(plain)
    return plain, model, kernel.inject_kernels(model, attention="int8")


def in_int8(report):
    return {calls.name: calls.in_int8 for calls in report.calls if calls.in_int8}


def belongs_in_int8(query, key, options):
    heads = options["heads"]
    head_dim = query.shape[3] if heads is None else query.shape[2] // heads
    is_long = min(query.shape[1], key.shape[1]) >= MIN_TOKENS
    return is_long and head_dim > 32 and options.get("key_bias") is None


@pytest.mark.parametrize("family", [f for f in FAMILIES.values() if f.name != BY_BLOCKS], ids=str)
def test_every_family(kernel, device, family, attentions):
    """Long attention without a bias runs in 8 bits, any other as before. The values are close."""
    plain, model, report = models_of(kernel, family, device)
    arguments = family.inputs(device, BFLOAT16, seed=1, **TOKENS)
    expected = run(plain, arguments)
    before = list(attentions)
    attentions.clear()
    assert all(name == "attention" for name, *_ in before)
    out = run(model, arguments)
    assert len(attentions) == len(before)
    for name, *given in attentions:
        assert name == ("attention_int8" if belongs_in_int8(*given) else "attention")
    count = sum(name == "attention_int8" for name, *_ in attentions)
    assert sum(in_int8(report).values()) == count > 0
    assert not fallen_back(report)
    assert 0 < relative_distance(out, expected) < 0.1


def test_modules(kernel, device):
    """Self-attention of Wan, in each block. Its text has too few keys."""
    _, model, report = models_of(kernel, WAN, device)
    assert "attention or attention_int8" in str(report) and "in 8 bits" not in str(report)
    for _ in range(2):
        run(model, WAN.inputs(device, BFLOAT16, **TOKENS))
    assert in_int8(report) == {"blocks.0.attn1": 2, "blocks.1.attn1": 2}
    assert "attentions in 8 bits: 4\n" in f"{report}\n"


def test_masks(kernel, device, attentions):
    """A bias keeps 16 bits. A number of valid keys does not."""
    _, model, report = models_of(kernel, FAMILIES["qwenimage"], device)
    run(model, FAMILIES["qwenimage"].inputs(device, BFLOAT16, mask="padded", **TOKENS))
    assert attentions and not in_int8(report)
    attentions.clear()
    family = FAMILIES["z_image"]
    plain, model, report = models_of(kernel, family, device)
    arguments = family.inputs(device, BFLOAT16, seed=1, prompts=(40, 6))
    out = run(model, arguments)
    lengths = [o["key_lengths"] for name, *_, o in attentions if name == "attention_int8"]
    assert any(x is not None for x in lengths)
    assert relative_distance(out, run(plain, arguments)) < 0.1


@pytest.mark.parametrize(
    ("queries", "keys", "head_dim", "has_bias", "is_int8"),
    [
        (1024, 1024, 72, False, True),
        (1023, 1024, 128, False, False),
        (1024, 1023, 128, False, False),
        (1024, 1024, 64, False, False),
        (1024, 1024, 128, True, False),
    ],
)
@pytest.mark.parametrize("by_head", [False, True], ids=["rows", "heads"])
def test_limits(
    kernel, device, monkeypatch, attentions, queries, keys, head_dim, has_bias, is_int8, by_head
):
    decision = module_of(kernel, "attention.decision")
    monkeypatch.setattr(decision, "INT8_MIN_TOKENS", 1024)
    monkeypatch.setattr(decision, "INT8_ABOVE_HEAD_DIM", 64)
    shape = (2, head_dim) if by_head else (2 * head_dim,)
    q, k, v = (
        torch.randn(1, length, *shape, device=device, dtype=BFLOAT16)
        for length in (queries, keys, keys)
    )
    options = {"heads": None if by_head else 2}
    options["key_bias"] = torch.zeros(1, keys, device=device) if has_bias else None
    expected = kernel.attention(q, k, v, **options)
    out = torch.empty_like(q)
    for wanted in (True, False):
        assert decision.kernel_attention(wanted, q, k, v, out=out, **options) is out
        assert relative_distance(out, expected) < 0.1
    is_as_wanted = ["attention_int8" if is_int8 else "attention", "attention"]
    assert [name for name, *_ in attentions] == is_as_wanted


@pytest.mark.parametrize("attention", [True, False, "int8", "16-bit"])
@pytest.mark.parametrize("precision", [None, "fp8", "fp8-fast"])
def test_options(kernel, device, monkeypatch, attention, precision):
    """The family's table decides with a precision, unless the option does."""
    monkeypatch.setattr(module_of(kernel, "quantized.precision"), "MIN_FEATURES", 16)
    inject = module_of(kernel, "inject")
    fast_only = tuple(family._replace(int8_tiers=("fp8-fast",)) for family in inject.FAMILIES)
    monkeypatch.setattr(inject, "FAMILIES", fast_only)
    model = FLUX.model(device, BFLOAT16, **KERNEL_HEADS, **FLUX.one_block).requires_grad_(False)
    before = run(model, arguments := FLUX.inputs(device, BFLOAT16, seed=1, **TOKENS))
    report = kernel.inject_kernels(model, attention=attention, precision=precision)
    out = run(model, arguments)
    assert relative_distance(out, before) < 0.2
    is_int8 = attention == "int8" or (attention is True and precision == "fp8-fast")
    assert bool(in_int8(report)) == is_int8
    assert kernel.inject_kernels(model, attention=attention, precision=precision).already_injected
    other = "int8" if attention != "int8" else "16-bit"
    given = f"injected with attention={attention}, got attention={other}: call eject"
    with pytest.raises(ValueError, match=given):
        kernel.inject_kernels(model, attention=other, precision=precision)
    kernel.eject_kernels(model)
    assert torch.equal(run(model, arguments), before)
    report = kernel.inject_kernels(model, attention=other)
    run(model, arguments)
    assert bool(in_int8(report)) == (other == "int8")


def test_table(kernel):
    tiers = {family.name: family.int8_tiers for family in module_of(kernel, "inject").FAMILIES}
    assert {name for name, given in tiers.items() if given == ("fp8", "fp8-fast")} == IN_BOTH
    assert {given for name, given in tiers.items() if name not in IN_BOTH} == {("fp8-fast",)}


@pytest.mark.parametrize(
    ("attention", "error", "got"),
    [("int4", ValueError, "'int4'"), (8, TypeError, "an int"), (None, TypeError, "a NoneType")],
)
def test_wrong_option(kernel, device, attention, error, got):
    accepted = "True or False or 'int8' or '16-bit'"
    with pytest.raises(error, match=f"^inject_kernels: attention must be {accepted}, got {got}$"):
        kernel.inject_kernels(FLUX.model(device), attention=attention)


def test_gradients_and_float32(kernel, device, attentions):
    for dtype in (BFLOAT16, torch.float32):
        model = FLUX.model(device, dtype, **KERNEL_HEADS, **FLUX.one_block)
        report = kernel.inject_kernels(model, attention="int8")
        with torch.set_grad_enabled(dtype == BFLOAT16):
            model(**FLUX.inputs(device, dtype, **TOKENS))
        assert not attentions and not in_int8(report)


def test_copies_and_pipelines(kernel, device):
    """The option is each model's own."""
    model = FLUX.model(device, BFLOAT16, **KERNEL_HEADS, **FLUX.one_block)
    pipe = SimpleNamespace(components={"transformer": model})
    report = kernel.inject_kernels(pipe, attention="int8")
    arguments = FLUX.inputs(device, BFLOAT16, seed=1, **TOKENS)
    twin = copy.deepcopy(model)
    out = run(model, arguments)
    assert sum(in_int8(report).values()) == 2
    assert all(name.startswith("transformer.") for name in in_int8(report))
    assert torch.equal(run(twin, arguments), out)
    of_twin = kernel.inject_kernels(twin, attention="int8")
    assert of_twin.already_injected and sum(in_int8(of_twin).values()) == 2


# --------------------------------------------------------------------------------------------------
# Models in part, compiled models, graphs, ranks


@pytest.mark.parametrize("name", ["minimax_music3", "unet", "stable_audio"])
def test_in_part(kernel, device, name, attentions):
    """Processors that call diffusers' dispatch, and PyTorch's attention."""
    small = BY_NAME[name]
    model = small.model(device, BFLOAT16).requires_grad_(False)
    plain = copy.deepcopy(model)
    expected = run_small(plain, arguments := small.arguments(device, BFLOAT16))
    report = kernel.inject_kernels(model, attention="int8")
    assert relative_distance(run_small(model, arguments), expected) < 0.1
    for operation, *given in attentions:
        assert operation == ("attention_int8" if belongs_in_int8(*given) else "attention")
    count = sum(operation == "attention_int8" for operation, *_ in attentions)
    assert sum(in_int8(report).values()) == count > 0


@pytest.mark.parametrize("name", ["flux", "minimax_music3"])
def test_chosen_backend(kernel, device, name):
    """This package's own, chosen by name, follows the option. Another one runs as it is."""
    is_family, run_it = name == "flux", run if name == "flux" else run_small
    small = FLUX if is_family else BY_NAME[name]
    model = small.model(device, BFLOAT16, **(KERNEL_HEADS if is_family else {}))
    arguments = FLUX.inputs(device, BFLOAT16, **TOKENS) if is_family else None
    arguments = arguments or small.arguments(device, BFLOAT16)
    report = kernel.inject_kernels(model, attention="int8")
    model.set_attention_backend(kernel.register_attention_backend())
    run_it(model, arguments)
    counts = in_int8(report)
    assert counts
    model.set_attention_backend("_native_math")
    run_it(model, arguments)
    assert in_int8(report) == counts


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("name", ["flux", "minimax_music3"])
def test_compiled(kernel, device, name):
    if name == "flux":
        _, model, report = models_of(kernel, FLUX, device, **FLUX.one_block)
        run_it, arguments, count = run, FLUX.inputs(device, BFLOAT16, **TOKENS), 2
    else:
        small = BY_NAME[name]
        model = small.model(device, BFLOAT16)
        report = kernel.inject_kernels(model, attention="int8")
        run_it, arguments, count = run_small, small.arguments(device, BFLOAT16), small.attends
    expected = run_it(model, arguments)
    counts = in_int8(report)
    assert sum(counts.values()) == count
    counter = CompileCounterWithBackend("eager")
    model.compile(fullgraph=True, backend=counter)
    assert relative_distance(run_it(model, arguments), expected) < 0.02
    (graph,) = counter.graphs
    operators = [operation_of(n.target, n.args) for n in graph.graph.nodes]
    assert (operators.count("attention_int8"), operators.count("attention")) == (count, 0)
    assert in_int8(report) == counts


def test_graphs(graphs, device):  # noqa: F811
    _, plain, _ = models_of(graphs, FLUX, device, **FLUX.one_block)
    model = FLUX.model(device, BFLOAT16, **KERNEL_HEADS, **FLUX.one_block).requires_grad_(False)
    report = graphs.inject_kernels(model, attention="int8", cuda_graphs=True)
    for seed in range(4):
        arguments = FLUX.inputs(device, BFLOAT16, seed=seed, **TOKENS)
        assert torch.equal(run(model, arguments), run(plain, arguments))
    (calls,) = report.cuda_graphs
    assert calls.captured == 1 and calls.replayed >= 2
