"""Apply known faults to a copy of the checkout, one at a time, and check that the tests find each.

The faults are in tools/seeded_faults.toml. The copy is .build/seeded_faults, which is built and tested with
each fault. It is kept, so that only what changes is compiled. The checkout itself is not changed.

    python tools/seeded_faults.py                       # all faults
    python tools/seeded_faults.py mask_dropped          # one
    python tools/seeded_faults.py --baseline            # all listed tests, without a fault
"""

from __future__ import annotations

import filecmp
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CHECKOUT = Path(__file__).resolve().parents[1]
SOURCE = CHECKOUT / "tools" / "seeded_faults.toml"
COPY = CHECKOUT / ".build" / "seeded_faults"
PACKAGE = "torch-ext/h100_diffusers_kernels"
REPO_ID = "org/h100-diffusers-kernels"
PASSED, FAILED = 0, 1  # pytest's exit codes


@dataclass(frozen=True)
class Replacement:
    """A change of one file. `old` occurs in it exactly once. `file` is relative to the package, or to the
    checkout if it begins with kernel_src, torch-ext or tools."""

    file: str
    old: str
    new: str

    @property
    def path(self) -> str:
        """The file, relative to the checkout."""
        of_checkout = self.file.startswith(("kernel_src/", "torch-ext/", "tools/"))
        return self.file if of_checkout else f"{PACKAGE}/{self.file}"

    def apply(self, checkout: Path) -> None:
        """Change the file; ValueError if the replacement does not apply."""
        path = checkout / self.path
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.file} holds {self.old!r} {count} times")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


@dataclass(frozen=True)
class Fault:
    """A wrong behaviour, how to cause it, and the tests (pytest node ids) that find it."""

    name: str
    behaviour: str
    tests: tuple[str, ...]
    replacements: tuple[Replacement, ...]


@dataclass(frozen=True)
class Result:
    """`failed` is the test that found the fault. The first failure ends a run."""

    name: str
    found: bool
    failed: str | None
    seconds: float


def read_faults(path: Path = SOURCE) -> list[Fault]:
    def read(name: str, behaviour: str, tests: list[str], replace: list[dict[str, str]]) -> Fault:
        return Fault(name, behaviour, tuple(tests), tuple(Replacement(**r) for r in replace))

    content = tomllib.loads(path.read_text(encoding="utf-8"))
    return [read(**entry) for entry in content["fault"]]


def synchronize(copy: Path) -> None:
    """Make the files of the copy those of the checkout. What is the same keeps its time of change."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True)
    files = {file for file in done.stdout.split("\0") if (CHECKOUT / file).is_file()}
    for path in [path for path in copy.rglob("*") if path.is_file()]:
        inside = path.relative_to(copy)
        if inside.parts[0] not in ("build", ".build") and inside.as_posix() not in files:
            path.unlink()
    for file in files:
        target = copy / file
        if not target.is_file() or not filecmp.cmp(CHECKOUT / file, target, shallow=False):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(CHECKOUT / file, target)


def build(copy: Path) -> None:
    """RuntimeError if the copy cannot be built."""
    command = [sys.executable, str(copy / "tools" / "build_variant.py")]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"the build failed:\n{done.stdout}{done.stderr}")


def prepare(fault: Fault | None) -> None:
    """Build the copy with the fault. A fault of a tool comes after the build, which is by the same tools."""
    synchronize(COPY)
    replacements = () if fault is None else fault.replacements
    of_tools = [r for r in replacements if r.path.startswith("tools/")]
    for replacement in replacements:
        if replacement not in of_tools:
            replacement.apply(COPY)
    build(COPY)
    for replacement in of_tools:
        replacement.apply(COPY)


def run_tests(tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run pytest in the copy, with its build."""
    environment = {**os.environ, "LOCAL_KERNELS": f"{REPO_ID}={COPY}"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=short", *tests]
    return subprocess.run(command, cwd=COPY, env=environment, capture_output=True, text=True)


def seek(fault: Fault) -> Result:
    """Run the fault's tests; RuntimeError if pytest neither passes nor fails in a test."""
    if not fault.tests:
        return Result(fault.name, False, None, 0.0)
    begin = time.perf_counter()
    prepare(fault)
    done = run_tests(fault.tests)
    seconds = round(time.perf_counter() - begin, 1)
    if done.returncode == PASSED:
        return Result(fault.name, False, None, seconds)
    # An error outside of a test, such as a failed import of the package, finds nothing.
    failure = re.search(r"^FAILED (.+?)(?: - |$)", done.stdout, re.MULTILINE)
    if done.returncode != FAILED or failure is None:
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return Result(fault.name, True, failure[1], seconds)


def check_baseline(faults: Sequence[Fault]) -> None:
    """Run all tests of the faults without a fault."""
    prepare(None)
    done = run_tests(list({test: None for fault in faults for test in fault.tests}))
    if done.returncode != PASSED:
        raise click.ClickException(f"the tests fail without a fault:\n{done.stdout}{done.stderr}")
    click.echo(done.stdout.splitlines()[-1])


@click.command(help=__doc__.split("\n\n")[0])
@click.argument("names", nargs=-1)
@click.option("--baseline", is_flag=True, help="Run all listed tests without a fault instead.")
@click.option("--json", "output", type=click.Path(path_type=Path), help="Write the results here.")
def main(names: tuple[str, ...], baseline: bool, output: Path | None) -> None:
    faults = read_faults()
    if unknown := set(names) - {fault.name for fault in faults}:
        raise click.ClickException(f"there is no fault {', '.join(sorted(unknown))}")
    faults = [fault for fault in faults if not names or fault.name in names]
    if baseline:
        return check_baseline(faults)
    results = []
    for fault in faults:
        try:
            result = seek(fault)
        except (ValueError, RuntimeError) as error:
            raise click.ClickException(f"{fault.name}: {error}") from error
        results.append(result)
        where = f"found by {result.failed}" if result.found else "NOT FOUND"
        click.echo(f"{fault.name}: {where} ({result.seconds} s)")
        if output is not None:  # after each, for a run that is interrupted
            content = [asdict(result) for result in results]
            output.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    found = sum(result.found for result in results)
    click.echo(f"{found} of {len(results)} faults found")
    if found < len(results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
