"""compare_results.py on stored and made-up results, and compare_operations.py on small tensors."""

import json

import pytest
from click.testing import CliRunner

from benchmarks.harness import history

import compare_results

LIMIT = 0.02
BENCHMARKS = sorted(path for path in history.RESULTS.iterdir() if path.stem != "suite")
COLD = ("softmax 4x96, cold", "eager")


def environment(commit, minute=0, device="NVIDIA H100 80GB HBM3"):
    ids = [f"_h100_diffusers_kernels_cuda_{commit}"]
    date = f"2026-01-01 10:{minute:02}:00 UTC"
    return {"device": device, "date": date, "kernel_ids": ids, "command": "x"}


def made_up(commit="aaaaaaa", minute=0, *, over=2.0, warm=3.0, spread=0.0):
    """A family's result with one workload. `over` and `warm` are its speeds over eager's."""

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
    """{label: change} of the changed figures."""
    builds = compare_results.builds(results)
    return {change.label: change for change in compare_results.changes(builds, limit)}


def invoke(tmp_path, *results, options=()):
    paths = [tmp_path / f"{index}.json" for index in range(len(results))]
    for path, result in zip(paths, results, strict=True):
        path.write_text(json.dumps(result))
    return CliRunner().invoke(compare_results.main, [*map(str, paths), *options])


def test_a_block_is_compared_from_its_first_kernel_to_its_last_one():
    def kernels(*ends):
        return [{"name": "a", "class": "ours", "start_us": end - 1, "end_us": end} for end in ends]

    modes = {"eager": kernels(4.0, 30.0, 29.0), "injected": kernels(20.0)}
    result = {"environment": environment("a"), "model": "LTX", "size": "9x64x96", "modes": modes}
    rows = compare_results.read(result)
    assert rows == {("a block of LTX 9x64x96, injected", "eager"): compare_results.Ratio(1.5)}


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_kept_results_are_read(path):
    for result in history.load(path):
        rows = compare_results.read(result)
        assert rows and all(ratio.value > 0 for ratio in rows.values())
        assert all(0 <= ratio.spread < 2 for ratio in rows.values())
    later = {**result, "environment": {**result["environment"], "date": "2099-01-01 00:00 UTC"}}
    assert not compared(result, later, limit=0.0)


def test_a_change_beyond_the_limit_is_found():
    change = compared(made_up(), made_up("bbbbbbb", 1, over=2.05))[COLD]
    assert change.values == [2.0, 2.05] and change.relative == pytest.approx(0.025)
    assert change.noise == LIMIT and change.is_better
    assert not compared(made_up(), made_up("bbbbbbb", 1, over=2.03))
    # In the order of time.
    (change,) = compared(made_up("bbbbbbb", 1, over=1.9), made_up()).values()
    assert change.relative == pytest.approx(-0.05) and change.is_better is False


def test_less_of_an_error_is_better():
    entry = {"operation": "softmax", "output": 0, "dtype": "float16"}
    larger, smaller = (
        {
            "environment": environment(*build),
            "operations": [{**entry, "ratio": ratio}],
            "models": [],
        }
        for build, ratio in ((("aaaaaaa", 0), 1.2), (("bbbbbbb", 1), 1.1))
    )
    (change,) = compared(larger, smaller).values()
    assert change.values == [1.2, 1.1] and change.is_better


def test_spread_of_samples_and_of_runs_is_noise():
    """Spreads of 3% and 4% together are 5%. Two runs of a build at 2.0 and 2.2 have a median of 2.1."""
    before, after = made_up(spread=0.03), made_up("bbbbbbb", 1, over=2.09, spread=0.04)
    assert not compared(before, after)
    after = made_up("bbbbbbb", 1, over=2.11, spread=0.04)
    assert compared(before, after)[COLD].noise == pytest.approx(0.05)
    before = [made_up(), made_up(minute=1, over=2.2)]
    assert not compared(*before, made_up("bbbbbbb", 2, over=2.25))
    change = compared(*before, made_up("bbbbbbb", 2, over=2.4))[COLD]
    assert change.values == [pytest.approx(2.1), 2.4] and change.noise == pytest.approx(0.2 / 2.1)
    assert compared(*before)[COLD].relative == pytest.approx(0.1), "two runs of one build"


def test_command(tmp_path):
    changed = [made_up(), made_up("bbbbbbb", 1, over=1.5, warm=3.3)]
    result = invoke(tmp_path, *changed)
    assert result.exit_code == 0 and "2 of 4 figures changed" in result.output
    assert invoke(tmp_path, *changed, options=["--fail"]).exit_code == 1
    assert invoke(tmp_path, *changed, options=["--fail", "--limit", "0.4"]).exit_code == 0
    del changed[1]["workloads"][0]["warm"]
    assert "not in both" in invoke(tmp_path, *changed).output
    for other in ({"dtype": "float16"}, {"workloads": []}):
        assert invoke(tmp_path, made_up(), {**made_up(), **other}).exit_code == 2


def test_files_of_several_models_and_cards(tmp_path):
    """The one's results are in Git's version of the file and in today's."""
    other_card = made_up()
    other_card["environment"]["device"] = "NVIDIA H200"
    other_model = {**made_up(over=9.0), "name": "flux"}
    before, after = made_up(), made_up("bbbbbbb", 1, over=1.5)
    files = [[other_model, other_card, {**one, "name": "ltx"}] for one in (before, after)]
    result = invoke(tmp_path, *files, options=["--name", "ltx"])
    assert result.exit_code == 0 and "1 of 4 figures changed" in result.output
    assert invoke(tmp_path, files[0], files[0], options=["--name", "ltx"]).exit_code == 2
