"""Apply known faults to a copy of the checkout, one at a time, and check that the tests find each.

The faults are in seeded_faults.toml. Each is built and tested on the CPU. The checkout is not changed.

    python tools/quality/seeded_faults.py                       # all faults
    python tools/quality/seeded_faults.py mask_dropped          # one
    python tools/quality/seeded_faults.py --baseline            # all listed tests, without a fault
    python tools/quality/seeded_faults.py --draws 5 --jobs 16   # what `make test` draws with five seeds
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
import tomllib

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(CHECKOUT / "tools"))
from builder.package import hub_name  # noqa: E402

SOURCE = Path(__file__).with_suffix(".toml")
PACKAGE = "torch-ext/h100_diffusers_kernels/"
REPO_ID, _ = hub_name(CHECKOUT)
PASSED, FAILED = 0, 1  # pytest's exit codes


@dataclass(frozen=True)
class Replacement:
    """A change of one file, in which `old` occurs exactly once. `file` is relative to the package, or to the
    checkout if it begins with benchmarks/, kernel_src/, torch-ext/ or tools/."""

    file: str
    old: str
    new: str

    @property
    def path(self) -> str:
        """The file, relative to the checkout."""
        is_of_checkout = self.file.startswith(
            ("benchmarks/", "kernel_src/", "torch-ext/", "tools/")
        )
        return self.file if is_of_checkout else PACKAGE + self.file

    def apply(self, checkout: Path) -> None:
        """Change the file; ValueError if the replacement does not apply."""
        path = checkout / self.path
        text = path.read_text(encoding="utf-8")
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.file} has {count} occurrences of {self.old!r} instead of one")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


@dataclass(frozen=True)
class Fault:
    """A wrong behaviour, the replacements that cause it, and the tests (pytest node ids) that find it."""

    name: str
    behaviour: str
    tests: tuple[str, ...]
    replacements: tuple[Replacement, ...]


def read_faults(path: Path = SOURCE) -> list[Fault]:
    def read(name: str, behaviour: str, tests: list[str], replace: list[dict[str, str]]) -> Fault:
        return Fault(name, behaviour, tuple(tests), tuple(Replacement(**r) for r in replace))

    content = tomllib.loads(path.read_text(encoding="utf-8"))
    return [read(**entry) for entry in content["fault"]]


@contextmanager
def copied_checkout() -> Iterator[Path]:
    """A temporary copy without ignored files. Its builds are incremental."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True)
    with tempfile.TemporaryDirectory() as folder:
        for file in filter(None, listed.stdout.split("\0")):
            if (CHECKOUT / file).is_file():
                target = Path(folder) / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(CHECKOUT / file, target)
        yield Path(folder)


@contextmanager
def applied(fault: Fault, checkout: Path) -> Iterator[None]:
    paths = {checkout / replacement.path for replacement in fault.replacements}
    contents = {path: path.read_bytes() for path in paths}
    try:
        for replacement in fault.replacements:
            replacement.apply(checkout)
        yield
    finally:
        for path, content in contents.items():
            path.write_bytes(content)


def run(checkout: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the copy, with its build and without a GPU."""
    own = {"LOCAL_KERNELS": f"{REPO_ID}={checkout}", "CUDA_VISIBLE_DEVICES": ""}
    command = (sys.executable, *command)
    return subprocess.run(
        command, cwd=checkout, env={**os.environ, **own}, capture_output=True, text=True
    )


def run_tests(
    tests: Sequence[str], checkout: Path, seed: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Build the copy and run pytest, with a seed only on drawn cases; RuntimeError if it cannot be built."""
    done = run(checkout, "tools/build_variant.py", "--backend", "cpu")
    if done.returncode != 0:
        raise RuntimeError(f"the build failed:\n{done.stdout}{done.stderr}")
    drawn = () if seed is None else ("--draw=all", f"--seed={seed}")
    return run(checkout, "-m", "pytest", "-x", "-q", "--tb=short", *drawn, *tests)


def seek(fault: Fault, checkout: Path, seed: int | None = None) -> str | None:
    """The first test that finds the fault; RuntimeError if pytest neither passes nor fails in a test."""
    with applied(fault, checkout):
        done = run_tests(fault.tests, checkout, seed)
    if done.returncode == PASSED:
        return None
    # Errors outside tests, such as a failed import of the package, do not count.
    failure = re.search(r"^FAILED (.+?)(?: - |$)", done.stdout, re.MULTILINE)
    if done.returncode != FAILED or failure is None:
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return failure[1]


def seek_all(faults: Sequence[Fault], seeds: Sequence[int | None]) -> int:
    """The number of faults that are found with each seed. Prints the test that finds each."""
    found = 0
    long = set(json.loads((CHECKOUT / "tests" / "seconds.json").read_text()))
    with copied_checkout() as checkout:
        for fault in faults:
            begin = time.perf_counter()
            try:
                # Named cases and functions of less than a second run with each seed.
                are_drawn = not long.isdisjoint(fault.tests)
                tests = [seek(fault, checkout, s) for s in (seeds if are_drawn else seeds[:1])]
            except (OSError, ValueError, RuntimeError) as error:
                raise click.ClickException(f"{fault.name}: {error}") from error
            found += None not in tests
            missed = [seed for seed, test in zip(seeds, tests, strict=False) if test is None]
            where = f"found by {tests[0]}"
            if missed:
                where = "NOT FOUND" + (f" with the seeds {missed}" if missed != [None] else "")
            click.echo(f"{fault.name}: {where} ({time.perf_counter() - begin:.1f} s)")
    return found


def check_baseline(faults: Sequence[Fault], checkout: Path) -> None:
    """Run all tests of the faults on the unchanged copy."""
    tests = list({test: None for fault in faults for test in fault.tests})
    done = run_tests(tests, checkout)
    if done.returncode != PASSED:
        raise click.ClickException(f"the tests fail without a fault:\n{done.stdout}{done.stderr}")
    click.echo(done.stdout.splitlines()[-1])


@click.command(help=__doc__.split("\n\n")[0])
@click.argument("names", nargs=-1)
@click.option("--baseline", is_flag=True, help="Run all listed tests without a fault instead.")
@click.option("--draws", default=0, help="Number of seeds. Run only the cases that they draw.")
@click.option("--jobs", default=1, show_default=True, help="Number of processes.")
def main(names: tuple[str, ...], baseline: bool, draws: int, jobs: int) -> None:
    faults = read_faults()
    if unknown := set(names) - {fault.name for fault in faults}:
        raise click.ClickException(f"there is no fault {', '.join(sorted(unknown))}")
    faults = [fault for fault in faults if not names or fault.name in names]
    if baseline:
        with copied_checkout() as checkout:
            return check_baseline(faults, checkout)
    seeds = range(1, draws + 1) if draws else [None]
    with ThreadPoolExecutor(jobs) as pool:
        shares = [faults[i::jobs] for i in range(jobs)]
        found = sum(pool.map(lambda share: seek_all(share, seeds), shares))
    click.echo(f"{found} of {len(faults)} faults found")
    if found < len(faults):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
