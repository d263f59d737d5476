"""compare_results.py: on results that are kept, and on made-up ones whose changes are known."""

import copy
import json
import sys

import pytest
from click.testing import CliRunner

from conftest import CHECKOUT

sys.path[:0] = [str(CHECKOUT / "benchmarks"), str(CHECKOUT / "tools")]

import history  # noqa: E402
import timing  # noqa: E402

import compare_results  # noqa: E402

LIMIT = 0.02
BENCHMARKS = sorted(path.name for path in history.RESULTS.iterdir() if path.name != "suite")
COLD, WARM = ("softmax 4x96, cold", "eager"), ("softmax 4x96, warm", "eager")


def environment(commit, minute=0, device="NVIDIA H100 80GB HBM3"):
    ids = [f"_h100_diffusers_kernels_cuda_{commit}"]
    date = f"2026-01-01 10:{minute:02}:00 UTC"
    return {"device": device, "date": date, "kernel_ids": ids, "command": "x"}


def made_up(commit="aaaaaaa", minute=0, *, over=2.0, warm=3.0, spread=0.0):
    """A family's result: one workload, so many times as fast as eager."""

    def measured(ratio):
        ours = {"median": 10.0, "spread": spread}
        times = {"ours": ours, "eager": {"median": 10.0 * ratio, "spread": 0.0}, "large_copy": ours}
        return {"microseconds": times, "over": {"eager": ratio}, "of_large_copy": 0.5}

    entry = {"operation": "softmax", "variant": "", "shape": [4, 96]}
    return {
        "environment": environment(commit, minute),
        "workloads": [{**entry, "cold": measured(over), "warm": measured(warm)}],
    }


def compared(*results, limit=LIMIT):
    """Label -> change, of what changed."""
    builds = compare_results.builds(results)
    return {change.label: change for change in compare_results.changes(builds, limit)}


def invoke(tmp_path, *results, options=()):
    paths = []
    for index, result in enumerate(results):
        paths.append(tmp_path / f"{index}.json")
        paths[-1].write_text(json.dumps(result))
    return CliRunner().invoke(compare_results.main, [*map(str, paths), *options])


# -- Results that are kept ---------------------------------------------------------------------


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_kept_result_is_read(name):
    for result in history.kept(name):
        rows = compare_results.read(result)
        assert rows and all(ratio.value > 0 for ratio in rows.values())
        assert all(0 <= ratio.spread < 2 for ratio in rows.values())


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_kept_result_against_itself_changes_nothing(name):
    result = history.kept(name)[-1]
    later = {**result, "environment": {**result["environment"], "date": "2099-01-01 00:00 UTC"}}
    assert not compared(result, later, limit=0.0)


def test_known_changes_of_kept_results():
    """benchmarks/NOTES.md: softmax's long rows went from 0.87 of QuACK to its rate; forwards stayed."""
    rows = compared(*history.kept("softmax"))
    long_rows = rows["softmax 1024x65536, cold", "quack"]
    assert long_rows.is_better and 0.13 < long_rows.relative < 0.16
    assert ("softmax 8192x8192, cold", "quack") not in rows, "it is at QuACK's rate as before"
    assert not compared(*history.kept("models"))
    # A later one has models that these have not.
    assert not compared(*history.kept("host_forward")[:3])


def test_kept_result_with_one_figure_changed():
    before = history.kept("models")[-1]
    after = copy.deepcopy(before)
    after["environment"] |= environment("bbbbbbb")
    size, weights = "161x512x768", "peaked"
    of_weights = after["sizes"][size]["weights"][weights]
    of_weights["modes"]["injected"]["ms"]["median"] *= 1.10
    medians = {mode: entry["ms"]["median"] for mode, entry in of_weights["modes"].items()}
    of_weights["speedups"] = timing.speedups(medians)
    after["environment"]["date"] = "2099-01-01 00:00 UTC"
    rows = compared(before, after)
    name = f"{size} {weights}, injected"
    assert set(rows) == {(name, "eager"), (name, "compiled")}
    for change in rows.values():
        assert change.relative == pytest.approx(1 / 1.10 - 1) and change.is_better is False


# -- Made-up results ---------------------------------------------------------------------------


def test_a_change_beyond_the_limit_is_found():
    rows = compared(made_up(), made_up("bbbbbbb", 1, over=2.05))
    assert set(rows) == {COLD}
    change = rows[COLD]
    assert change.values == [2.0, 2.05] and change.relative == pytest.approx(0.025)
    assert change.noise == LIMIT and change.is_better
    assert not compared(made_up(), made_up("bbbbbbb", 1, over=2.03))
    assert not compared(made_up(), made_up("bbbbbbb", 1, over=2.05), limit=0.03)


def test_the_order_is_that_of_time():
    (change,) = compared(made_up("bbbbbbb", 1, over=1.9), made_up()).values()
    assert change.relative == pytest.approx(-0.05) and change.is_better is False


def test_the_spread_of_the_samples_is_noise():
    """Of both results: 3% and 4% together are 5%."""
    before, after = made_up(spread=0.03), made_up("bbbbbbb", 1, over=2.09, spread=0.04)
    assert not compared(before, after)
    after = made_up("bbbbbbb", 1, over=2.11, spread=0.04)
    assert compared(before, after)[COLD].noise == pytest.approx(0.05)


def test_runs_of_one_build_tell_the_noise():
    """They are 10% apart: 2.0 and 2.2. Their median counts, too."""
    before = [made_up(), made_up(minute=1, over=2.2)]
    assert not compared(*before, made_up("bbbbbbb", 2, over=2.25))
    change = compared(*before, made_up("bbbbbbb", 2, over=2.4))[COLD]
    assert change.values == [pytest.approx(2.1), 2.4]
    assert change.noise == pytest.approx(0.2 / 2.1)


def test_two_runs_of_one_build_are_compared_with_each_other():
    rows = compared(made_up(), made_up(minute=1, over=2.2))
    assert rows[COLD].relative == pytest.approx(0.1)


def test_the_same_build_on_another_card_is_another():
    other = made_up(minute=1, over=2.2)
    other["environment"] = environment("aaaaaaa", 1, "NVIDIA H200")
    names = [build.name for build in compare_results.builds([made_up(), other])]
    assert names == ["aaaaaaa on h100", "aaaaaaa on h200"]


def test_less_is_better_of_times_over_a_yardstick():
    def host(commit, minute, over):
        summary = {"median": 10.0, "spread": 0.0}
        calls = [{"operation": "torch rms_norm", "microseconds": summary, "over_yardstick": 1.0}]
        calls += [{"operation": "silu", "microseconds": summary, "over_yardstick": over}]
        shown = {"yardstick": "torch rms_norm", "calls": calls}
        return {"environment": environment(commit, minute), **shown}

    (change,) = compared(host("aaaaaaa", 0, 1.0), host("bbbbbbb", 1, 0.9)).values()
    assert change.label == ("silu", "torch rms_norm") and change.is_better


def test_a_figure_that_only_one_result_has_is_shown(tmp_path):
    after = made_up("bbbbbbb", 1)
    del after["workloads"][0]["warm"]
    rows = compared(made_up(), after)
    assert set(rows) == {WARM, (WARM[0], "large copy")}
    assert rows[WARM].values == [3.0, None] and rows[WARM].relative is None
    assert "not in both" in invoke(tmp_path, made_up(), after).output


def test_command(tmp_path):
    same = invoke(tmp_path, made_up(), made_up("bbbbbbb", 1), options=["--fail"])
    assert same.exit_code == 0
    assert "0 of 4 figures changed beyond the noise" in same.output
    changed = [made_up(), made_up("bbbbbbb", 1, over=1.5, warm=3.3)]
    result = invoke(tmp_path, *changed)
    assert result.exit_code == 0
    assert "2 of 4 figures changed" in result.output
    *_, first, second = result.output.splitlines()
    assert first.split() == [*COLD[0].split(), "eager", "2.000", "1.500", "-25.0%", "2.0%", "worse"]
    assert second.split()[-5:] == ["3.000", "3.300", "+10.0%", "2.0%", "better"]
    assert invoke(tmp_path, *changed, options=["--fail"]).exit_code == 1
    assert invoke(tmp_path, *changed, options=["--fail", "--limit", "0.4"]).exit_code == 0


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([made_up()], "two results or more are compared, got one"),
        ([made_up(), {"environment": {}}], "1.json: it is no result of a benchmark with ratios"),
        ([made_up(), {**made_up(), "dtype": "float16"}], "different benchmarks, models or dtypes"),
        ([made_up(), {**made_up(), "workloads": []}], "no figure in common"),
        ([made_up(), [1, 2]], "1.json: it is no result"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path, results, message):
    result = invoke(tmp_path, *results)
    assert result.exit_code == 2 and message in result.output


def test_a_file_that_is_no_json_is_refused(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("no JSON")
    other = tmp_path / "y.json"
    other.write_text(json.dumps(made_up()))
    result = CliRunner().invoke(compare_results.main, [str(other), str(path)])
    assert result.exit_code == 2 and f"{path}: " in result.output
