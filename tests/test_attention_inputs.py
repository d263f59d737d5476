"""The kinds of attention inputs have the scores in their names."""

import itertools
import json
import math

import pytest
import torch
from click.testing import CliRunner

from benchmarks.harness import history
from benchmarks.operations import (
    attention_statistics,
    bench_trained_attention,
    fit_attention_inputs,
)
from benchmarks.operations.attention_statistics import (
    lazy_rescales,
    online_rescales,
    row_statistics,
    scores_of,
)

import attention_inputs
import compare_results
import render_plots
from benchmark_results import ENVIRONMENT, store

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


# ------------------------------------------------------------------------------------------------
# Statistics of attention scores, from scores whose statistics are known, and of the small LTX-Video.


KEYS, HEAD_DIM = 448, 64
FITTED = fit_attention_inputs.FITTED


def attention_scores(heights, queries=16, keys=KEYS):
    """Equal rows: 0, with these scores at these keys, from query and key."""
    q, k = torch.zeros(1, queries, 1, HEAD_DIM), torch.zeros(1, keys, 1, HEAD_DIM)
    q[..., 0] = HEAD_DIM**0.5
    for key, height in heights.items():
        k[:, key, :, 0] = height
    return scores_of(q, k)[0]


def test_equal_scores():
    equal = attention_scores({})
    rows = row_statistics(equal)
    assert (rows["std"] == 0).all() and (rows["above_mean"] == 0).all()
    torch.testing.assert_close(rows["largest_share"], torch.full((1, 16), 1 / KEYS))
    assert not online_rescales(equal).any() and not lazy_rescales(equal).any()


@pytest.mark.parametrize(("key", "rescales"), [(5, 0), (130, 1), (447, 1)])
def test_one_large_score(key, rescales):
    """It is rescaled for, unless it is in the first tile."""
    one = attention_scores({key: 30.0})
    rows = row_statistics(one)
    share = 1 / KEYS
    assert rows["std"][0, 0] == pytest.approx(30 * math.sqrt(share * (1 - share)), rel=1e-4)
    assert rows["above_mean"][0, 0] == pytest.approx(30 * (1 - share), rel=1e-4)
    assert (rows["largest_share"] > 0.999).all()
    assert (online_rescales(one) == rescales).all() and (lazy_rescales(one) == rescales).all()


@pytest.mark.parametrize(
    ("heights", "online", "lazy"),
    [
        ({0: 1.0, 130: 2.0, 260: 3.0, 390: 4.0}, 3, 0),
        ({0: 1.0, 130: 2.0, 260: 1.5, 390: 4.0}, 2, 0),
        # The reference exponent of 448 keys is -3, so 16 + 3 powers of 2 fit: 13.17 nats.
        ({130: 13.1}, 1, 0),
        ({130: 13.3}, 1, 1),
        ({130: 20.0, 390: 31.0}, 2, 1),
        ({130: 20.0, 390: 34.0}, 2, 2),
        ({130: 100.0, 260: 90.0, 390: 200.0}, 2, 2),  # computed again
        ({130: 100.0, 260: 200.0, 390: 201.0}, 3, 3),  # from then on m follows the maximum
    ],
)
def test_rescales(heights, online, lazy):
    of_rows = attention_scores(heights)
    assert (online_rescales(of_rows) == online).all()
    assert (lazy_rescales(of_rows) == lazy).all()


def test_rows_of_a_warp_are_rescaled_together():
    """If their sums have grown to the next power of 2; a row that stays is not counted."""
    of_rows = torch.zeros(1, 20, KEYS)
    of_rows[0, 3, 200] = 20.0  # rescales rows 0 to 15
    of_rows[0, 7, 200] = 10.0  # not by itself
    counts = lazy_rescales(of_rows)[0]
    assert counts[3] == counts[7] == 1
    assert counts[[0, 15]].tolist() == [1, 1], "128 equal keys each have a probability of 2^-3"
    assert not counts[16:].any()


# ------------------------------------------------------------------------------------------------
# The benchmark


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    path = tmp_path_factory.mktemp("trained") / "result.json"
    arguments = ["--device", "cpu", "--tiny", "--output", str(path)]
    run = CliRunner().invoke(bench_trained_attention.main, arguments, catch_exceptions=False)
    assert run.exit_code == 0, run.output
    return json.loads(path.read_text())


def test_benchmark(result):
    places = {(e["attention"], e["layer"], e["step"], e["head"]) for e in result["attention_heads"]}
    assert len(places) == 2 * 6 * 3 * 4 == len(result["attention_heads"])
    for entry in result["attention_heads"]:
        assert entry["std"] > 0 and entry["above_mean"] > 0 and 0 < entry["largest_share"] < 1
        assert entry["online_rescales"] == entry["lazy_rescales"] == 0, "one tile"
    assert len(compare_results.read(result)) == 3 * len(places)


def test_plot(result, tmp_path):
    store(tmp_path, "attention/trained", {**result, "environment": ENVIRONMENT})
    assert "largest less mean" in render_plots.render(tmp_path)["trained_attention.svg"]


# ------------------------------------------------------------------------------------------------
# Inputs like those of the trained model


@pytest.mark.parametrize("head", dict.fromkeys(attention_inputs.TRAINED), ids=str)
def test_inputs_have_the_measured_statistics(head):
    q, k, _ = attention_inputs.trained((1, KEYS, KEYS, 8, HEAD_DIM), torch.device("cpu"), [head])
    rows = row_statistics(scores_of(q.float(), k.float()))
    for name in FITTED:
        assert rows[name].mean() == pytest.approx(getattr(head, name), rel=0.15), name


def test_heads_take_turns():
    heads, device = len(attention_inputs.TRAINED) + 2, torch.device("cpu")
    q, k, _ = attention_inputs.INPUTS["trained"]((2, 320, KEYS, heads, 128), device)
    std = row_statistics(scores_of(q.float(), k.float()))["std"].mean((0, 2))
    expected = [
        head.std for head, _ in zip(itertools.cycle(attention_inputs.TRAINED), std, strict=False)
    ]
    torch.testing.assert_close(std, torch.tensor(expected), rtol=0.25, atol=0)
    assert "trained" in attention_inputs.TYPICAL


def test_constants_are_those_of_the_result():
    shown = history.shown("attention/trained")
    if shown is None:
        pytest.skip("not measured yet")
    measured = attention_statistics.means_over_steps(shown, "self").values()
    assert len(measured) == len(attention_inputs.TRAINED)
    for head, means in zip(attention_inputs.TRAINED, measured, strict=True):
        assert [getattr(head, n) for n in FITTED] == pytest.approx(
            [means[n] for n in FITTED], rel=0.03
        )
    text = fit_attention_inputs.FILE.read_text()
    assert f"weights {shown['weights']}" in text, (
        "run benchmarks/operations/fit_attention_inputs.py --write"
    )
