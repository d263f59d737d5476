"""record_suite.py: what it counts, what it says of the run, and which builds it refuses."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from builder.package import Package
from conftest import CHECKOUT
from processes import run

sys.path[:0] = [str(CHECKOUT / "benchmarks"), str(CHECKOUT / "tools")]

import history  # noqa: E402

import record_suite  # noqa: E402
import render_docs  # noqa: E402

TESTS = """
import pytest

@pytest.fixture
def broken():
    yield
    raise RuntimeError

def test_that_passes():
    pass

@pytest.mark.parametrize("x", [1, 2])
@pytest.mark.skip(reason="it needs two GPUs")
def test_that_is_skipped(x):
    pass

@pytest.mark.xfail
def test_that_is_known_to_fail():
    assert False

def test_that_fails():
    assert False

def test_whose_teardown_fails(broken):
    pass
"""


@pytest.fixture
def recorded(kernel, monkeypatch, tmp_path):
    """Runs the command on a file of tests, as if the build were of this commit; its result, if any."""
    monkeypatch.setattr(record_suite, "check_build", lambda *_: "commit and Python sources")

    def record(tests, *options):
        path = tmp_path / "test_made_up.py"
        path.write_text(tests)
        (tmp_path / "pytest.ini").write_text("[pytest]\n")
        output = tmp_path / "suite" / "only.json"
        arguments = [
            *options,
            "--output",
            str(output),
            "--",
            str(tmp_path),
            "-p",
            "no:cacheprovider",
        ]
        outcome = CliRunner().invoke(record_suite.main, arguments)
        return outcome, history.load(output) if output.exists() else None

    return record


def test_counts_and_what_was_left_out(recorded, tmp_path, device):
    (tmp_path / "test_left_out.py").write_text("def test_it():\n    assert False\n")
    left_out = str(tmp_path / "test_left_out.py")
    outcome, result = recorded(TESTS, "--leave-out", left_out)
    assert outcome.exit_code == 1, "two tests failed"
    assert result["counts"] == {"passed": 1, "skipped": 3, "failed": 2}
    assert [name.rpartition("::")[2] for name in result["failures"]] == [
        "test_that_fails",
        "test_whose_teardown_fails",
    ]
    assert result["skipped_for"]["it needs two GPUs"] == 2
    assert result["left_out"] == [left_out]
    assert result["pytest_arguments"][0] == str(tmp_path)
    assert result["build"] and result["environment"]["torch"] and result["seconds"] > 0
    if device == "cuda":
        assert result["environment"]["capability"] == "9.0" and result["environment"]["driver"]


def test_a_run_that_passes(recorded):
    outcome, result = recorded("def test_it():\n    pass\n")
    assert outcome.exit_code == 0 and "1 passed, 0 skipped, 0 failed on" in outcome.output
    assert result["counts"] == {"passed": 1, "skipped": 0, "failed": 0} and not result["failures"]


@pytest.mark.parametrize("tests", ["", "this is no Python\n"], ids=["none", "broken"])
def test_a_run_without_tests_is_not_recorded(recorded, tests):
    outcome, result = recorded(tests)
    assert outcome.exit_code == 1 and result is None
    assert "nothing is recorded" in outcome.output


@pytest.fixture
def variant(tmp_path):
    """The Python files of this checkout, as a build has them."""
    for name, source in Package.read(CHECKOUT, "cpu").python_files().items():
        target = tmp_path / "variant" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    return tmp_path / "variant"


def test_a_build_of_this_checkout_is_accepted(variant):
    check = record_suite.check_build
    assert check(variant, "0123abc", CHECKOUT, "0123abc") == "commit and Python sources"
    assert check(variant, "0123abc", CHECKOUT, None) == "Python sources", "a copy without Git"


@pytest.mark.parametrize(
    ("build", "commit", "message"),
    [
        ("0123abc", "4567def", "the build is of 0123abc, the checkout is at 4567def"),
        ("0123abc", "0123abc_dirty", "the checkout is at 0123abc_dirty"),
        ("local", None, "does not say its commit"),
        (None, "0123abc", "does not say its commit"),
    ],
)
def test_a_build_of_another_commit_is_refused(variant, build, commit, message):
    with pytest.raises(ValueError, match=message):
        record_suite.check_build(variant, build, CHECKOUT, commit)


@pytest.mark.parametrize("commit", ["0123abc", None], ids=["with Git", "without Git"])
@pytest.mark.parametrize("is_missing", [False, True], ids=["changed", "missing"])
def test_a_build_of_other_sources_is_refused(variant, commit, is_missing):
    changed = variant / "injection" / "norms.py"
    if is_missing:
        changed.unlink()
    else:
        changed.write_text(changed.read_text() + "\n")
    with pytest.raises(ValueError, match="injection/norms.py of the build is not the checkout's"):
        record_suite.check_build(variant, "0123abc", CHECKOUT, commit)


def test_table_of_the_suites_runs(tmp_path):
    def add(device, date, **changes):
        environment = {"device": device, "date": date, "capability": "9.0", "driver": "580.1"}
        environment |= {"torch": "2.11.0", "cuda": "13.0"}
        counts = {"passed": 5000, "skipped": 40, "failed": 0}
        result = {"environment": environment, "build": "0123abc", "counts": counts, "left_out": []}
        path = history.path("suite", environment, tmp_path)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({**result, **changes}))

    def rows():
        text = render_docs.render("<!-- table: suite -->\n<!-- end table -->\n", tmp_path)
        lines = [line for line in text.splitlines() if line.startswith("|")]
        return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]

    assert rows() == []
    add("NVIDIA H200", "2026-01-01 10:00:00 UTC", build="1111111")
    add("NVIDIA H200", "2026-01-02 10:00:00 UTC", left_out=["tests/a.py", "tests/b.py"])
    add("NVIDIA H100 80GB HBM3", "2026-01-01 09:00:00 UTC")
    assert rows() == [
        ["NVIDIA H100 80GB HBM3", "9.0", "580.1", "2.11.0", "13.0", "0123abc"]
        + ["2026-01-01 09:00:00 UTC", "5000", "40", "0", "nothing"],
        ["NVIDIA H200", "9.0", "580.1", "2.11.0", "13.0", "0123abc"]
        + ["2026-01-02 10:00:00 UTC", "5000", "40", "0", "`tests/a.py`, `tests/b.py`"],
    ]


def test_gpu_check_runs_the_suite_but_for_what_is_left_out(tmp_path):
    environment = {**os.environ, "PYTHON": "echo", "OUT": str(tmp_path), "PROCESSES": "3"}
    environment["LEFT_OUT"] = "tests/a.py tests/b.py"
    script = CHECKOUT / "tools" / "gpu_check.sh"
    process = run("bash", script, "test", env=environment)
    assert process.returncode == 0, process.stderr
    assert (tmp_path / "test.log").read_text().split() == [
        *("tools/record_suite.py", "--leave-out", "tests/a.py", "--leave-out", "tests/b.py"),
        *("--", "--durations=10", "--numprocesses", "3", "--dist", "worksteal"),
    ]


def test_records_that_are_kept_are_of_runs_that_passed():
    for path in (Path(history.RESULTS) / "suite").glob("*.json"):
        result = history.load(path)
        assert result["counts"]["failed"] == 0 < result["counts"]["passed"], path.name
