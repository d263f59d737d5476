"""Runs of tests in forks: on one mutant, and on the unchanged package to map tests to lines."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import coverage
import pytest

MUTANT_LIMIT, TEST_LIMIT, MAP_LIMIT = 45.0, 3.0, 720.0


def in_turns(names: Iterable[str], group: Callable[[str], str]) -> list[str]:
    """Orders the names in rounds: one of each group, then the next of each group."""
    taken: Counter[str] = Counter()
    rounds = []
    for name in names:
        rounds.append((taken[group(name)], name))
        taken[group(name)] += 1
    return [name for _, name in sorted(rounds, key=lambda entry: entry[0])]


def shuffled(names: Iterable[str], rng: random.Random) -> list[str]:
    """Tests in random order. One test of each function comes first."""
    names = sorted(names)
    rng.shuffle(names)
    return in_turns(names, lambda name: name.split("[")[0])


class Fork:
    """A forked process with its own process group. It exits with the result of `work`."""

    def __init__(self, work: Callable[[], int]) -> None:
        self.begin = time.monotonic()
        self.process = os.fork()
        if self.process == 0:
            status = 70
            try:
                os.setsid()
                null = os.open(os.devnull, os.O_RDWR)
                for stream in (0, 1, 2):
                    os.dup2(null, stream)
                status = int(work())
            finally:
                os._exit(status)

    def wait(self, limit: float) -> int | None:
        """Returns the exit status, -signal or, after `limit` seconds, None. Kills the process group."""
        while (ended := os.waitpid(self.process, os.WNOHANG)) == (0, 0):
            if time.monotonic() - self.begin > limit:
                break
            time.sleep(0.01)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process, signal.SIGKILL)
        self.seconds = round(time.monotonic() - self.begin, 2)
        if ended != (0, 0):
            return os.waitstatus_to_exitcode(ended[1])
        os.waitpid(self.process, 0)
        return None


class Tests:
    """pytest plugin: runs the tests `names` on the package in `folder`."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        self.folder, self.names, self.started = folder, names, folder / "started"
        files = sorted({name.split("::")[0] for name in names}) or ["tests"]
        self.options = ["-x", "-q", "-p", "no:cacheprovider", "-W", "ignore", *files]
        self.options.append(f"--basetemp={folder / 'tmp'}")

    def pytest_sessionstart(self) -> None:
        name = importlib.import_module("conftest").REPO_ID
        os.environ["LOCAL_KERNELS"] = f"{name}={self.folder}"

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        by_name = {item.nodeid: item for item in items}
        items[:] = [by_name[name] for name in self.names if name in by_name]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.started.write_text(nodeid)

    def run(self) -> dict[str, Any]:
        self.started.write_text("import")
        fork = Fork(lambda: pytest.main(self.options, plugins=[self]))
        status = fork.wait(MUTANT_LIMIT)
        # Status 5: the mutant has none of these parametrizations.
        outcome = "timeout" if status is None else "survived" if status in (0, 5) else "killed"
        test = self.started.read_text() if outcome != "survived" else None
        return {"outcome": outcome, "status": status, "test": test, "seconds": fork.seconds}


class LineMap(Tests):
    """pytest plugin: draws `count` tests. Runs a share of them, each in a fork that records executed lines.

    Args:
        folder: the copy of the package.
        count: the number of tests.
        seed: the seed of their choice.
        share: (i, n): the i-th of n shares.
        options: further options of pytest.
    """

    def __init__(
        self, folder: Path, count: int, seed: int, share: tuple[int, int], options: list[str]
    ) -> None:
        super().__init__(folder, [])
        self.count, self.seed, self.share = count, seed, share
        self.options += options
        self.output = folder / "map"
        self.is_skipped = False

    def start(self) -> Fork:
        return Fork(lambda: pytest.main(self.options, plugins=[self]))

    @pytest.hookimpl(wrapper=True)  # after the draw
    def pytest_collection_modifyitems(  # type: ignore[override]
        self, items: list[pytest.Item]
    ) -> Iterator[None]:
        yield
        by_name = {
            item.nodeid: item
            for item in items
            if "kernel" in getattr(item, "fixturenames", ()) and not item.get_closest_marker("slow")
        }
        names = shuffled(by_name, random.Random(self.seed))[: self.count]
        first, step = self.share
        items[:] = [by_name[name] for name in names[first::step]]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.is_skipped |= report.skipped

    def record(self, item: pytest.Item) -> int:
        measured = coverage.Coverage(data_file=None, config_file=False, include=f"{self.folder}/*")
        measured.start()
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        measured.stop()
        data = measured.get_data()
        depth = len((self.folder / "build" / "variant").parts)
        lines = {
            Path(*Path(f).parts[depth:]).as_posix(): data.lines(f) for f in data.measured_files()
        }
        self.started.write_text(json.dumps(lines))
        return item.session.testsfailed or self.is_skipped or not lines

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        importlib.import_module("conftest").load_kernel()
        files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
        modules = [name for name, file in files.items() if "site-packages" in (file or "")]
        begin, tests, drawn = time.monotonic(), {}, 0
        for item in session.items:
            if time.monotonic() - begin > MAP_LIMIT:
                break
            drawn += 1
            fork = Fork(functools.partial(self.record, item))
            if fork.wait(TEST_LIMIT) == 0:
                lines = json.loads(self.started.read_text())
                tests[item.nodeid] = {"seconds": fork.seconds, "lines": lines}
        self.output.write_text(json.dumps({"drawn": drawn, "tests": tests, "modules": modules}))
        return True
