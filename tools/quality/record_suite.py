"""Runs the test suite and records commit, GPU, versions, date and counts of outcomes.

The record goes to benchmarks/results/suite.json, even if tests fail. The tested build
must be this checkout's: it has the same Python sources and, if Git knows the commit, the same commit.

    python tools/quality/record_suite.py -- --numprocesses 15 --dist worksteal
    python tools/quality/record_suite.py --leave-out tests/test_examples.py
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import torch

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(CHECKOUT))
from benchmarks import models  # noqa: E402
from benchmarks.harness import history, record  # noqa: E402

from builder.package import Package, Revision  # noqa: E402

OUTCOMES = ("passed", "skipped", "failed")
TESTS_RAN = (0, 1)  # pytest's exit status if all tests passed, and if some failed


def check_build(variant: Path, build: str | None, checkout: Path, commit: str | None) -> str:
    """The checks that the build passed; ValueError if it is not this checkout's.

    `build` is the commit stored in the build; `commit` is the checkout's, or None if Git does not know it.
    """
    if build in (None, "local"):
        raise ValueError(f"the build in {variant} has no commit: rebuild it in a Git checkout")
    if commit is not None and commit != build:
        raise ValueError(f"the build is of {build}, the checkout is at {commit}: rebuild it")
    package = Package.read(checkout, "cpu")  # all backends have the same Python files
    for name, source in package.python_files().items():
        built = variant / name
        if not built.exists() or built.read_bytes() != source.read_bytes():
            raise ValueError(f"{name} of the build is not the checkout's: rebuild it")
    return "Python sources" if commit is None else "commit and Python sources"


def outcome(case: ElementTree.Element) -> str:
    """The outcome of a test in a JUnit report. A failed setup or teardown counts as a failure."""
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "passed" if case.find("skipped") is None else "skipped"


def read_report(path: Path) -> dict[str, Any]:
    """From a JUnit report: the number of tests by outcome, the failed tests, and reasons for skips."""
    by_outcome: dict[str, list[ElementTree.Element]] = {name: [] for name in OUTCOMES}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        by_outcome[outcome(case)].append(case)
    skipped = (case.find("skipped") for case in by_outcome["skipped"])
    reasons = Counter(reason.get("message", "") for reason in skipped if reason is not None)
    return {
        "counts": {name: len(cases) for name, cases in by_outcome.items()},
        "failures": [f"{c.get('classname')}::{c.get('name')}" for c in by_outcome["failed"]],
        "skipped_for": dict(reasons.most_common()),
    }


def run_tests(arguments: Sequence[str], left_out: Sequence[str]) -> dict[str, object]:
    """Summary of the tests' report, and their time."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *arguments]
        command += [f"--ignore={name}" for name in left_out]
        begin = time.perf_counter()
        status = subprocess.run(command, cwd=CHECKOUT).returncode
        seconds = time.perf_counter() - begin
        if status not in TESTS_RAN or not report.exists():
            raise click.ClickException(f"pytest ended with status {status}: nothing is recorded")
        return {**read_report(report), "seconds": round(seconds, 1)}


@click.command(help=__doc__.split("\n\n")[0])
@click.option(
    "--leave-out",
    "left_out",
    multiple=True,
    type=click.Path(exists=True),
    help="A test file to leave out; may be given several times.",
)
@record.output_option("suite")
@click.argument("pytest_arguments", nargs=-1)
def main(left_out: tuple[str, ...], output: Path | None, pytest_arguments: tuple[str, ...]) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kernel, _ = models.load_kernel()
    assert kernel.__file__ is not None
    environment = record.environment(device)
    revision = Revision.read(CHECKOUT)
    commit = revision.suffix if revision.commit else None
    build = history.commit({"kernel_ids": environment["kernel_ids"]})
    try:
        checked = check_build(Path(kernel.__file__).parent, build, CHECKOUT, commit)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    result: dict[str, Any] = {
        "environment": environment,
        "build": build,
        "build_agrees_with_checkout_in": checked,
        "left_out": sorted(left_out),
        "pytest_arguments": list(pytest_arguments),
        **run_tests(pytest_arguments, left_out),
    }
    name = f"suite/torch-{environment['torch']}"
    path = record.destination(output, name, ("left_out", "pytest_arguments"))
    assert path is not None  # a suite's record is kept even if files were left out
    record.write(path, result)
    counts = ", ".join(f"{count} {name}" for name, count in result["counts"].items())
    click.echo(f"{counts} on {environment['device']}, {build}\nWrote {path}")
    if result["counts"]["failed"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
