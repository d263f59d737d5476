"""The kinds of attention inputs have the scores in their names."""

import pytest
import torch

import attention_inputs

CPU = torch.device("cpu")
SHAPE = (1, 192, 1024, 2, 128)


def scores(q, k):
    """Scores in nats, (B, H, Sq, Sk)."""
    q, k = (t.double().transpose(1, 2) for t in (q, k))
    return q @ k.mT / q.shape[-1] ** 0.5


def made(kind):
    q, k, _ = attention_inputs.INPUTS[kind](SHAPE, CPU)
    return scores(q, k)


@pytest.mark.parametrize(
    ("kind", "std"), [("std 1", 1), ("std 3", 3), ("std 6", 6), ("large range", 30)]
)
def test_standard_deviation_of_the_scores(kind, std):
    assert made(kind).std(-1).square().mean().sqrt() == pytest.approx(std, rel=0.04)


@pytest.mark.parametrize("cosine", [0.5, 0.8])
@pytest.mark.parametrize("weight", [1, 4])
def test_clusters(cosine, weight):
    """Cosines within and between clusters, and the norms that scale them to scores."""
    batch, queries, keys, _, head_dim = SHAPE
    shape, root = (batch, queries, keys, 16, head_dim), head_dim**0.5
    q, k, _ = attention_inputs.INPUTS[f"clusters {cosine}, {weight}"](shape, CPU)
    for t in (q, k):
        norms = t.double().norm(dim=-1)
        expected = torch.full_like(norms, (weight * head_dim) ** 0.5)
        torch.testing.assert_close(norms, expected, rtol=4e-3, atol=0)
    cosines = scores(q, k) / (weight * root)
    is_same = (cosines.mean(1, keepdim=True) > cosine / 2).expand_as(cosines)  # of any head
    assert is_same.double().mean() == pytest.approx(1 / attention_inputs.CLUSTERS, rel=0.3)
    assert cosines[is_same].mean() == pytest.approx(cosine, abs=0.03)
    assert cosines[~is_same].mean() == pytest.approx(0, abs=0.02)


def test_sink_takes_half_of_each_row():
    of_sink = made("sink").softmax(-1)[..., SHAPE[2] // 2]
    assert of_sink.mean() == pytest.approx(0.5, abs=0.02)
    assert of_sink.min() > 0.35 and of_sink.max() < 0.65


def test_rising_scores_rise_by_the_same_step_up_to_the_longest_keys():
    q, k, _ = attention_inputs.INPUTS["rising"]((1, 3, 32760, 1, 64), CPU)
    assert (q[..., :2] == 1).all()
    tiles = k[0, :, 0, :2].double().sum(-1).split(attention_inputs.RISE_KEYS)
    raised = torch.cat([tile.unique() for tile in tiles])
    assert len(raised) == len(tiles) and raised[0] == 0
    (step,) = raised.diff().unique()  # one step for all: nothing was rounded
    assert 20 <= step / 64**0.5 < 30


def test_scores_jump_once():
    of_all, middle = made("jump"), SHAPE[2] // 2
    jump = of_all[..., middle:].mean() - of_all[..., :middle].mean()
    assert jump == pytest.approx(attention_inputs.JUMP, rel=4e-3)
    assert of_all[..., :middle].std() == pytest.approx(1, abs=0.03)
