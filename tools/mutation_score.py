"""Measures the mutation score of the package: the share of random small code changes that the tests detect.

Mutants: cosmic-ray lists all mutations of torch-ext/h100_diffusers_kernels. The tool draws a source
position, then one of its mutations; each position gives at most one mutant. Excluded are annotations, code
under `if TYPE_CHECKING`, the `*` and `/` of parameter lists, and mutants that do not compile.

Line map: a random sample of tests runs on the unchanged package to record the lines and the time of each
test. Tests marked slow and tests without the `kernel` fixture are excluded, as are tests that fail, skip or
take over 3 s, and with `--drawn SEED` those that `make test` does not draw with this seed. The map takes up
to 12 minutes. It is cached, and made again when the package or the tests change.

Runs: each mutant runs up to 40 tests, at most 15 s together, spread over test files. They execute the
mutated statement. If no test does, they execute the enclosing block. The first failure, crash or import
error kills the mutant, and so does the limit of 45 s. Control runs on the unchanged package come first and
remove unstable tests.

The package is read from build/: run `make build` first. To install the requirements into a separate folder:
pip install --target FOLDER --no-deps cosmic-ray==8.7.0 parso==0.8.7 stevedore==5.10.0 attrs==26.1.0

    PYTHONPATH=FOLDER python tools/mutation_score.py --seed 1 --drawn 1 --jobs 2 --output score.json
"""

from __future__ import annotations

import compileall
import contextlib
import functools
import gc
import hashlib
import importlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import Any

import click

from mutation.mutants import draw_mutants, line_ranges
from mutation.runs import MAP_LIMIT, Fork, LineMap, Tests, in_turns, shuffled

CHECKOUT = Path(__file__).resolve().parents[1]
SOURCES = CHECKOUT / "torch-ext" / "h100_diffusers_kernels"
TESTS_OF_MUTANT, SECONDS_OF_TESTS = 40, 15.0


def choose(
    tests: dict[str, Any], source: str, file: str, line: int, rng: random.Random
) -> tuple[list[str], bool]:
    """Draws the tests of a mutant. Also returns whether they execute its statement."""
    names: list[str] = []
    is_executed = True
    for first, last in line_ranges(source, line):
        lines = set(range(first, last + 1))
        names = [
            n for n, test in tests.items() if not lines.isdisjoint(test["lines"].get(file, ()))
        ]
        if names:
            break
        is_executed = False
    chosen: list[str] = []
    seconds = 0.0
    by_file = in_turns(shuffled(names or tests, rng), lambda name: name.split("::")[0])
    for name in by_file:
        seconds_with = seconds + tests[name]["seconds"]
        if len(chosen) < TESTS_OF_MUTANT and seconds_with < SECONDS_OF_TESTS:
            chosen.append(name)
            seconds = seconds_with
    return sorted(chosen, key=lambda name: tests[name]["seconds"]), is_executed


def copy_build(folder: Path, sources: dict[str, str]) -> None:
    """Copies build/ to the folder. The copy's bytecode follows changes of its files."""
    shutil.copytree(CHECKOUT / "build", folder / "build")
    compileall.compile_dir(folder, quiet=1, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
    for variant in (folder / "build").iterdir():
        if any((variant / f).read_text() != source for f, source in sources.items()):
            raise click.ClickException(f"{variant.name} differs from the sources: run make build")


def read_map(
    path: Path, folders: list[Path], count: int, seed: int, options: list[str]
) -> dict[str, Any]:
    """Reads the line map. Makes it if it is missing or if the sources changed."""
    files = sorted([*SOURCES.rglob("*.py"), *(CHECKOUT / "tests").glob("*.py")])
    content = b"".join(file.read_bytes() for file in files) + f"{count} {seed} {options}".encode()
    digest = hashlib.sha256(content).hexdigest()
    if not path.exists() or json.loads(path.read_text())["digest"] != digest:
        maps = [
            LineMap(folder, count, seed, (i, len(folders)), options)
            for i, folder in enumerate(folders)
        ]
        for fork in [one.start() for one in maps]:
            fork.wait(MAP_LIMIT + 120)
        if not all(one.output.exists() for one in maps):
            raise click.ClickException("the line map failed: run pytest on tests to see why")
        made = [json.loads(one.output.read_text()) for one in maps]
        merged = {
            "digest": digest,
            "drawn": sum(one["drawn"] for one in made),
            "tests": {name: test for one in made for name, test in one["tests"].items()},
            "modules": made[0]["modules"],
        }
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(merged))
    return json.loads(path.read_text())


def run_all(
    entries: list[tuple[str, str, list[str]]], folders: list[Path], sources: dict[str, str]
) -> list[dict[str, Any]]:
    """Runs each entry's tests on the package with one file replaced, in as many processes as folders.

    An entry is the file, its text and the names of tests.
    """

    def run_share(first: int) -> int:
        folder, results = folders[first], []
        variants = list((folder / "build").iterdir())
        for file, text, names in entries[first :: len(folders)]:
            for variant in variants:
                (variant / file).write_text(text)
            results.append(Tests(folder, names).run())
            for variant in variants:
                (variant / file).write_text(sources[file])
        (folder / "results").write_text(json.dumps(results))
        return 0

    forks = [Fork(functools.partial(run_share, first)) for first in range(len(folders))]
    if any(fork.wait(float("inf")) != 0 for fork in forks):
        raise click.ClickException("a process failed")
    shares = [iter(json.loads((folder / "results").read_text())) for folder in folders]
    return [next(shares[i % len(folders)]) for i in range(len(entries))]


def score(mutants: list[dict[str, Any]]) -> dict[str, str]:
    """Returns killed / all mutants, by folder and in total."""
    killed: Counter[str] = Counter()
    drawn: Counter[str] = Counter()
    for mutant in mutants:
        folder = "injection" if mutant["file"].startswith("injection/") else "rest"
        for name in (folder, "total"):
            drawn[name] += 1
            killed[name] += mutant["outcome"] != "survived"
    return {name: f"{killed[name]} / {drawn[name]}" for name in ("injection", "rest", "total")}


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--count", default=300, show_default=True, help="Number of mutants.")
@click.option("--seed", default=1, show_default=True)
@click.option("--drawn", type=int, help="Seed of the draw of `make test`. Default: all tests.")
@click.option("--tests", "test_count", default=2500, show_default=True, help="Tests in the map.")
@click.option("--controls", default=10, show_default=True, help="Runs of the unchanged package.")
@click.option("--jobs", default=1, show_default=True, help="Number of processes.")
@click.option(
    "--map",
    "map_file",
    type=click.Path(path_type=Path),
    default=CHECKOUT / ".build/mutation_map.json",
)
@click.option("--output", required=True, type=click.Path(path_type=Path))
def main(
    count: int,
    seed: int,
    drawn: int | None,
    test_count: int,
    controls: int,
    jobs: int,
    map_file: Path,
    output: Path,
) -> None:
    begin = time.monotonic()
    map_file, output = map_file.resolve(), output.resolve()
    os.chdir(CHECKOUT)
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
    sys.dont_write_bytecode = True
    sources = {p.relative_to(SOURCES).as_posix(): p.read_text() for p in SOURCES.rglob("*.py")}
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name, str(i)) for i in range(jobs)]
        for folder in folders:
            copy_build(folder, sources)
        options = [] if drawn is None else ["--draw=all", f"--seed={drawn}"]
        line_map = read_map(map_file, folders, test_count, seed, options)
        tests = line_map["tests"]
        click.echo(
            f"{line_map['drawn']} tests drawn, {len(tests)} used, {time.monotonic() - begin:.0f} s"
        )
        # Forks inherit the libraries that the tests import.
        for module in line_map["modules"]:
            with contextlib.suppress(Exception):
                importlib.import_module(module)
        sys.modules["torch"].set_num_threads(1)
        gc.collect()
        gc.freeze()
        rng = random.Random(seed)
        mutants = list(draw_mutants(sources, count, rng))

        def chosen(mutant: dict[str, Any]) -> tuple[list[str], bool]:
            return choose(tests, sources[mutant["file"]], mutant["file"], mutant["line"], rng)

        of_controls = [(m["file"], sources[m["file"]], chosen(m)[0]) for m in mutants[:controls]]
        results = run_all(of_controls, folders, sources)
        unstable = [r["test"] for r in results if r["outcome"] != "survived"]
        for test in unstable:
            tests.pop(test, None)
        click.echo(f"{controls} controls, failed: {unstable}")
        entries = []
        for mutant in mutants:
            names, mutant["executed"] = chosen(mutant)
            mutant["tests"] = len(names)
            entries.append((mutant["file"], mutant.pop("mutated"), names))
        for mutant, result in zip(mutants, run_all(entries, folders, sources), strict=True):
            mutant.update(result)
            click.echo(
                f"{mutant['outcome']} {mutant['file']}:{mutant['line']} {mutant['operator']}"
            )
    report: dict[str, Any] = {
        "seed": seed,
        "drawn": drawn,
        "count": len(mutants),
        "score": score(mutants),
        "map": {"drawn": line_map["drawn"], "used": len(tests)},
        "unstable": unstable,
        "seconds": round(time.monotonic() - begin),
        "mutants": mutants,
    }
    output.write_text(json.dumps(report, indent=1) + "\n")
    click.echo(", ".join(f"{name}: {share}" for name, share in report["score"].items()))


if __name__ == "__main__":
    main()
