"""The record of a test run: its counts, its build and its table."""

import shutil

import pytest
from click.testing import CliRunner

from benchmarks.harness import history

import record_suite
from benchmark_results import rows_of
from builder.package import Package
from conftest import CHECKOUT

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

def test_that_fails():
    assert False

def test_whose_teardown_fails(broken):
    pass
"""


@pytest.mark.usefixtures("kernel")
def test_counts_and_what_was_left_out(monkeypatch, tmp_path):
    monkeypatch.setattr(record_suite, "check_build", lambda *_: "commit and Python sources")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_made_up.py").write_text(TESTS)
    left_out = tmp_path / "test_left_out.py"
    left_out.write_text("def test_it():\n    assert False\n")
    output = tmp_path / "suite" / "only.json"
    arguments = ["--leave-out", left_out, "--output", output, "--", tmp_path]
    arguments = [*map(str, arguments), "-p", "no:cacheprovider"]
    assert CliRunner().invoke(record_suite.main, arguments).exit_code == 1, "two tests failed"
    (result,) = history.load(output)
    assert result["counts"] == {"passed": 1, "skipped": 2, "failed": 2}
    names = [name.rpartition("::")[2] for name in result["failures"]]
    assert names == ["test_that_fails", "test_whose_teardown_fails"]
    assert result["skipped_for"] == {"it needs two GPUs": 2}
    assert result["left_out"] == [str(left_out)] and result["build"]
    output.unlink()
    (tmp_path / "test_made_up.py").write_text("this is no Python\n")
    outcome = CliRunner().invoke(record_suite.main, arguments)
    assert outcome.exit_code == 1 and not output.exists(), "nothing is recorded"


@pytest.mark.parametrize(
    ("build", "commit", "message"),
    [
        ("0123abc", "0123abc", None),
        ("0123abc", None, None),  # a copy without Git
        ("0123abc", "4567def", "the build is of 0123abc, the checkout is at 4567def"),
        ("0123abc", "0123abc_dirty", "the checkout is at 0123abc_dirty"),
        ("local", None, "has no commit"),
        (None, "0123abc", "has no commit"),
    ],
)
def test_a_build_of_another_commit_or_of_other_sources_is_refused(tmp_path, build, commit, message):
    for name, source in Package.read(CHECKOUT, "cpu").python_files().items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, tmp_path / name)
    if message is None:
        assert "Python sources" in record_suite.check_build(tmp_path, build, CHECKOUT, commit)
        (tmp_path / "injection" / "parts" / "norms.py").write_text("\n")
        message = "injection/parts/norms.py of the build is not the checkout's"
    with pytest.raises(ValueError, match=message):
        record_suite.check_build(tmp_path, build, CHECKOUT, commit)


def test_table_shows_the_newest_run_of_each_card_and_torch(tmp_path):
    def add(device, date, torch="2.11.0", **changes):
        environment = {"device": device, "date": f"2026-01-{date}:00:00 UTC", "capability": "9.0"}
        environment |= {"torch": torch, "cuda": "13.0", "driver": "580.1", "command": "x"}
        counts = {"passed": 5000, "skipped": 40, "failed": 0}
        result = {"environment": environment, "build": "0123abc", "counts": counts, "left_out": []}
        result = {**result, "pytest_arguments": ["--numprocesses", "4"], **changes}
        history.store(f"suite/torch-{torch}", result, tmp_path)

    add("NVIDIA H200", "01 10", build="1111111")
    chosen = ["-m", "not slow", "--numprocesses", "4"]
    add("NVIDIA H200", "03 10", left_out=["tests/a.py"], pytest_arguments=chosen)
    add("NVIDIA H100 80GB HBM3", "01 09")
    add("NVIDIA H100 80GB HBM3", "04 09", torch="2.13.0")
    ran = ["5000", "40", "0"]
    assert [row[2:] for row in rows_of(tmp_path, "suite")] == [
        ["0123abc", "2026-01-01 09:00:00 UTC", *ran, "all"],
        [
            "0123abc",
            "2026-01-03 10:00:00 UTC",
            *ran,
            "`-m 'not slow'`, without 1 files that need no GPU",
        ],
        ["0123abc", "2026-01-04 09:00:00 UTC", *ran, "all"],
    ]


def test_records_that_are_kept_are_of_runs_that_passed():
    for result in history.load(history.path("suite")):
        assert result["counts"]["failed"] == 0 < result["counts"]["passed"], result["environment"]
