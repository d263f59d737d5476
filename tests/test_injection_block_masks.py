"""Models whose attention has a mask of FlexAttention, and masks that differ between queries."""

import collections
import copy
import sys

import pytest
import torch
from torch.nn.attention import flex_attention

pytest.importorskip("diffusers.models.transformers.transformer_kandinsky6_sr")


from checks import relative_distance
from every_model import MODELS
from family_relatives import copy_of_wan
from graphs import graphs  # noqa: F401 - a fixture

pytestmark = pytest.mark.usefixtures("_one_thread", "_quiet", "_default_backend")

BF16 = torch.bfloat16
UNREADABLE = "attention itself is the model's own: its mask_mod does not give each query one interval of keys"
CHOSEN = "attention itself is the model's own: a backend is chosen for it"


def by_lists(query, key, value, block_mask=None, scale=None, **_):
    """FlexAttention by the lists of blocks, as if it were compiled. PyTorch's eager one ignores them."""
    rows, columns = block_mask.BLOCK_SIZE
    sizes = *query.shape[:2], query.shape[2], key.shape[2]
    mask = flex_attention.create_mask(block_mask.mask_mod, *sizes, device=query.device)
    listed = block_mask.to_dense().bool().repeat_interleave(rows, 2).repeat_interleave(columns, 3)
    assert listed.shape[2:] == mask.shape[2:]
    scores = (query.float() * (scale or query.shape[3] ** -0.5)) @ key.float().transpose(2, 3)
    scores = scores.masked_fill(~(mask & listed), -torch.inf)
    return (scores.softmax(3).nan_to_num(0) @ value.float()).to(query.dtype)


@torch.no_grad()
def run(model, arguments):
    out = model(**copy.deepcopy(arguments), return_dict=False)[0]
    return torch.stack(out) if isinstance(out, list) else out


def pair(kernel, name, device, values="nothing"):
    """Large ``values`` make the output depend on which keys are attended to."""
    plain = MODELS[name].model(device, BF16)
    for layer_name, layer in plain.named_modules():
        if layer_name.endswith(values):
            layer.weight.data.mul_(8)
    model = copy.deepcopy(plain)
    return model, plain, kernel.inject_kernels(model)


def fallen(report):
    return {entry.name: dict(entry.fell_back) for entry in report.calls if entry.fell_back}


@pytest.fixture
def readings(kernel, monkeypatch):
    """Counts the masks that were read."""
    decision = sys.modules[f"{kernel.__name__}.injection.attention.decision"]
    counts = collections.Counter()

    def counting(name):
        function = getattr(decision, name)

        def counted(*args):
            counts[name] += 1
            return function(*args)

        monkeypatch.setattr(decision, name, counted)

    counting("read_block_mask")
    counting("bounds_of_mask")
    return counts


def nabla(device, frames=2, size=2):
    """Kandinsky 5's, as its pipeline: each block of 64 tokens sees itself, and others by their scores."""
    count = frames * size * size
    near = torch.eye(count, dtype=torch.bool, device=device)[None, None]
    return {"sta_mask": near, "attention_type": "nabla", "to_fractal": True, "P": 0.5}


@pytest.mark.parametrize("chosen", ["flex", "h100", None])
def test_kandinsky5(kernel, device, chosen, monkeypatch):
    """NABLA's lists run on the kernel with any backend that takes them. With flex other attentions are
    FlexAttention's."""
    model, plain, report = pair(kernel, "Kandinsky5Transformer3DModel", device, "to_value")
    arguments = MODELS["Kandinsky5Transformer3DModel"].arguments(device, BF16)
    arguments["hidden_states"] = torch.randn(1, 2, 32, 32, 4, device=device).to(BF16)
    positions = [torch.arange(n, device=device) for n in (2, 16, 16)]
    arguments.update(visual_rope_pos=positions, sparse_params=nabla(device))
    if chosen is not None:
        model.set_attention_backend(
            kernel.register_attention_backend() if chosen == "h100" else chosen
        )
    out = run(model, arguments)
    counts = {entry.name: entry for entry in report.calls}
    for i in range(2):
        of_block = counts[f"visual_transformer_blocks.{i}.self_attention"]
        assert of_block.on_kernels == 1 and not of_block.fell_back and not of_block.own_attention
        other = counts[f"visual_transformer_blocks.{i}.cross_attention"]
        assert dict(other.own_attention) == ({CHOSEN: 1} if chosen == "flex" else {})
    plain.set_attention_backend("flex")
    dense = run(plain, arguments)
    flex = flex_attention.flex_attention
    monkeypatch.setattr(
        flex_attention,
        "flex_attention",
        lambda *a, block_mask=None, **k: (flex if block_mask is None else by_lists)(
            *a, block_mask=block_mask, **k
        ),
    )
    expected = run(plain, arguments)
    assert relative_distance(out, expected) < 0.02
    assert relative_distance(dense, expected) > 0.05


def test_kandinsky6_sr(kernel, device, monkeypatch):
    """Its processor asks for FlexAttention."""
    name = "Kandinsky6SRTransformer3DModel"
    model, plain, report = pair(kernel, name, device, "to_value")
    for one in (model, plain):
        one.register_to_config(nabla_window=(1, 1, 1), nabla_threshold=0.3)
    arguments = MODELS[name].arguments(device, BF16)
    arguments["hidden_states"] = torch.randn(1, 2, 16, 16, 9, device=device).to(BF16)
    out = run(model, arguments)
    assert not fallen(report)
    assert sum(e.on_kernels for e in report.calls if e.module == "Kandinsky6SRAttention") == 2
    dense = run(plain, arguments)
    monkeypatch.setattr(flex_attention, "flex_attention", by_lists)
    expected = run(plain, arguments)
    assert relative_distance(out, expected) < 0.02
    assert relative_distance(dense, expected) > 0.05


@pytest.mark.parametrize("has_clean", [False, True], ids=["causal", "clean context"])
def test_anyflow_far(kernel, device, readings, has_clean):
    """Chunks see those before them: read once for all blocks. With three chunks of a clean context the keys
    of a query are no interval."""
    name = "AnyFlowFARTransformer3DModel"
    model, plain, report = pair(kernel, name, device)
    arguments = MODELS[name].arguments(device, BF16)
    if has_clean:
        for one in (model, plain):
            one.register_to_config(full_chunk_limit=3)
        arguments["chunk_partition"] = (1, 1, 1)
        arguments["clean_hidden_states"] = arguments["hidden_states"] / 2
        arguments["clean_timestep"] = arguments["timestep"] / 2
    out = run(model, arguments)
    assert relative_distance(out, run(plain, arguments)) < 0.02
    assert readings == {"read_block_mask": 1}
    reasons = {f"blocks.{i}.attn1": {UNREADABLE: 1} for i in range(2)} if has_clean else {}
    assert fallen(report) == reasons


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=["bfloat16", "float32"])
def test_anyflow_far_with_a_cache(kernel, device, dtype):
    """Chunks are written to the cache, and the next one attends to it, and to zeros up to a whole block."""
    plain = MODELS["AnyFlowFARTransformer3DModel"].model(device, dtype)
    model = copy.deepcopy(plain)
    report = kernel.inject_kernels(model)
    arguments = MODELS["AnyFlowFARTransformer3DModel"].arguments(device, dtype)
    shapes = {"full_cache": (2, 2, 2, 16, 64), "compressed_cache": (2, 2, 2, 4, 64)}
    chunks, outs = [(1,), (1, 1), (1, 1, 1)], []
    for one in (plain, model):
        cache = [
            {key: torch.zeros(shape, device=device, dtype=dtype) for key, shape in shapes.items()}
            for _ in one.blocks
        ]
        for i, partition in enumerate(chunks):
            frames = slice(0, i + 1) if i < len(chunks) - 1 else slice(i, i + 1)
            given = {
                key: value[:, frames] if value.shape[1] == 3 else value
                for key, value in arguments.items()
                if isinstance(value, torch.Tensor)
            }
            flag = {"num_cached_chunks": i, "is_cache_step": i < len(chunks) - 1}
            given.update(chunk_partition=partition, kv_cache=cache, kv_cache_flag=flag)
            with torch.no_grad():
                out = one(**given, return_dict=False)[0]
        outs.append([out, *[tensor for layer in cache for tensor in layer.values()]])
    assert not fallen(report) or dtype == torch.float32
    slack = 0.02 if dtype == BF16 else 1e-5
    assert all(relative_distance(*both) < slack for both in zip(*outs[::-1], strict=True))


def test_a_mask_that_is_not_the_calls(kernel, device):
    """One for another number of tokens goes to FlexAttention, which refuses it."""
    name = "AnyFlowFARTransformer3DModel"
    model, plain, _ = pair(kernel, name, device)
    arguments = MODELS[name].arguments(device, BF16)
    causal = lambda b, h, q, k: q >= k  # noqa: E731
    mask = flex_attention.create_block_mask(causal, None, None, 256, 256, device=device)
    for one in (model, plain):
        with pytest.raises(ValueError, match="block_mask was created for"):
            run(one, {**arguments, "attention_mask": mask})


# --------------------------------------------------------------------------------------------------
# Masks that differ between queries, in models in full


def frames(device):
    config = {"num_frame_per_block": 2, "attention_head_dim": 64}
    plain = copy_of_wan("SkyReelsV2Transformer3DModel", **config).to(device, BF16)
    arguments = {
        "hidden_states": torch.randn(1, 4, 4, 4, 6, device=device, dtype=BF16),
        "encoder_hidden_states": torch.randn(1, 5, 24, device=device, dtype=BF16),
        "timestep": torch.tensor([[500, 500, 700, 900]], device=device),
        "enable_diffusion_forcing": True,
    }
    return copy.deepcopy(plain), plain, arguments


def attention_calls(report):
    return {e.name: e for e in report.calls if e.name.endswith(".attn1")}.values()


def test_frames_that_see_those_before_them(kernel, device, readings):
    """The mask is read once a forward. With hooks on a block each would read it, so it is left alone."""
    model, plain, arguments = frames(device)
    report = kernel.inject_kernels(model)
    expected = run(plain, arguments)
    for count in (1, 2):
        assert relative_distance(run(model, arguments), expected) < 0.02
        assert readings == {"bounds_of_mask": count}
    assert all(e.on_kernels == 2 for e in attention_calls(report))
    model.blocks[0].attn1.register_forward_hook(lambda *_: None)
    assert relative_distance(run(model, arguments), expected) < 0.02
    assert readings == {"bounds_of_mask": 3} and set(fallen(report)) == {"blocks.0.attn1"}


def test_frames_in_int8(kernel, device, monkeypatch):
    """Attention in 8 bits has no such mask."""
    decision = sys.modules[f"{kernel.__name__}.injection.attention.decision"]
    monkeypatch.setattr(decision, "INT8_MIN_TOKENS", 1)
    monkeypatch.setattr(decision, "INT8_ABOVE_HEAD_DIM", 8)
    model, plain, arguments = frames(device)
    report = kernel.inject_kernels(model, attention="int8")
    assert relative_distance(run(model, arguments), run(plain, arguments)) < 0.05
    assert not any(e.in_int8 or e.fell_back for e in attention_calls(report))


def test_no_graph_of_a_mask_that_is_read(graphs, device):  # noqa: F811
    """What the mask allows may be another at a replay."""
    model, plain, arguments = frames(device)
    report = graphs.inject_kernels(model, cuda_graphs=True)
    with torch.inference_mode():
        for _ in range(3):
            out = model(**arguments, return_dict=False)[0]
    assert relative_distance(out, run(plain, arguments)) < 0.02
    (calls,) = report.cuda_graphs
    assert calls.captured == 0 and "reads the values of a mask" in "".join(calls.uncaptured)
    assert all(e.on_kernels == 3 for e in attention_calls(report))
