"""The benchmarks' kinds of attention inputs: that their scores are what they say."""

import sys

import pytest
import torch

from conftest import CHECKOUT

sys.path.insert(0, str(CHECKOUT / "benchmarks"))

import attention_inputs

CPU = torch.device("cpu")
SHAPES = [(2, 192, 1024, 2, 64), (1, 192, 1024, 2, 128)]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=["64", "128"])


def scores(q, k):
    """In nats, (B, H, Sq, Sk)."""
    q, k = (t.double().transpose(1, 2) for t in (q, k))
    return q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5


def made(kind, shape):
    q, k, _ = attention_inputs.INPUTS[kind](shape, CPU)
    return scores(q, k)


@each_shape
@pytest.mark.parametrize("kind", attention_inputs.INPUTS)
def test_shapes_dtypes_and_values(kind, shape):
    batch, queries, keys, heads, head_dim = shape
    q, k, v = attention_inputs.INPUTS[kind](shape, CPU)
    assert q.shape == (batch, queries, heads, head_dim)
    assert k.shape == v.shape == (batch, keys, heads, head_dim)
    for t in (q, k, v):
        assert t.dtype == torch.bfloat16 and t.is_contiguous() and t.isfinite().all()
    if kind == "constant":
        assert len(torch.stack([k, v]).unique()) == 1
    else:
        assert v.float().mean().abs() < 0.02 and v.float().std() == pytest.approx(1, abs=0.02)


@each_shape
@pytest.mark.parametrize(
    ("kind", "std"), [("std 1", 1), ("std 3", 3), ("std 6", 6), ("large range", 30)]
)
def test_standard_deviation_of_the_scores(kind, std, shape):
    of_rows = made(kind, shape).std(-1)
    assert of_rows.square().mean().sqrt() == pytest.approx(std, rel=0.04)


@each_shape
@pytest.mark.parametrize("cosine", [0.5, 0.8])
@pytest.mark.parametrize("weight", [1, 2, 4])
def test_clusters(cosine, weight, shape):
    """Cosines, and the norms that make scores of them."""
    batch, queries, keys, _, head_dim = shape
    kind, root = f"clusters {cosine}, {weight}", head_dim**0.5
    q, k, _ = attention_inputs.INPUTS[kind]((batch, queries, keys, 16, head_dim), CPU)
    for t in (q, k):
        norms = t.double().norm(dim=-1)
        expected = torch.full_like(norms, (weight * head_dim) ** 0.5)
        torch.testing.assert_close(norms, expected, rtol=4e-3, atol=0)
    cosines = scores(q, k) / (weight * root)
    is_same = (cosines.mean(1, keepdim=True) > cosine / 2).expand_as(cosines)  # of any head
    assert is_same.double().mean() == pytest.approx(1 / attention_inputs.CLUSTERS, rel=0.3)
    assert cosines[is_same].mean() == pytest.approx(cosine, abs=0.03)
    assert cosines[~is_same].mean() == pytest.approx(0, abs=0.02)
    assert cosines[~is_same].std() == pytest.approx(1 / root, rel=0.1)


@each_shape
def test_sink_takes_half_of_each_row(shape):
    of_all, keys = made("sink", shape), shape[2]
    of_sink = of_all.softmax(-1)[..., keys // 2]
    assert of_sink.mean() == pytest.approx(0.5, abs=0.02)
    assert of_sink.min() > 0.35 and of_sink.max() < 0.65
    assert of_all[..., torch.arange(keys) != keys // 2].std() == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_rising_scores_rise_by_the_same_step_up_to_the_longest_keys(head_dim):
    keys = 32760
    q, k, _ = attention_inputs.INPUTS["rising"]((1, 3, keys, 1, head_dim), CPU)
    assert (q[..., :2] == 1).all()
    raised = k[0, :, 0, :2].double().sum(-1)
    ends = [*range(attention_inputs.RISE_KEYS, keys, attention_inputs.RISE_KEYS), keys]
    tiles = [tile.unique() for tile in raised.tensor_split(ends[:-1])]
    assert all(len(tile) == 1 for tile in tiles) and raised[0] == 0
    (step,) = torch.cat(tiles).diff().unique()  # one step for all: nothing was rounded
    assert 20 <= step / head_dim**0.5 < 30
    rest = scores(q[..., 2:], k[..., 2:]) * ((head_dim - 2) / head_dim) ** 0.5
    assert rest.std() == pytest.approx(1, abs=0.15)


@each_shape
def test_scores_jump_once(shape):
    of_all, middle = made("jump", shape), shape[2] // 2
    jump = of_all[..., middle:].mean() - of_all[..., :middle].mean()
    assert jump == pytest.approx(attention_inputs.JUMP, rel=4e-3)
    for half in (of_all[..., :middle], of_all[..., middle:]):
        assert half.std() == pytest.approx(1, abs=0.03)


def test_kinds_are_typical_or_extreme():
    kinds = [*attention_inputs.TYPICAL, *attention_inputs.EXTREMES]
    assert sorted(kinds) == sorted(attention_inputs.INPUTS)
    assert attention_inputs.NORMAL in attention_inputs.TYPICAL
