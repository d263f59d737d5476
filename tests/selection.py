"""Draws the cases that `make test` runs: a seeded share of each function that takes long.

A function whose cases take less than a second in all runs whole. If each takes `LONG` second or more, a
case is in one of `TURNS` consecutive seeds. Of any other function a draw takes

- each value of each parameter once, or three times with `drawn(times=3)`; of a parameter with more than 8
  values, such as the families, a half to a sixth of them, which the next seeds complete,
- with `drawn(pairs=[("a", "b")])` each pair of values of these two parameters,
- each case once in `PERIOD` consecutive seeds, or a fifth of the cases alone with `drawn(times=0, period=5)`,
- all cases if the function is marked `whole`, and those that tools/quality/seeded_faults.toml names.

`seconds.json` has the seconds of the functions that take a second or more. `make test-full
PYTEST_ARGS=--record-seconds` writes it; with a draw, only larger ones.
"""

from __future__ import annotations

import collections
import json
import random
import subprocess
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[1]
SECONDS = Path(__file__).with_name("seconds.json")
PERIOD = 30
MANY_VALUES, MOST_SHARES = 8, 6
LONG, TURNS = 1, 5  # seconds a case, seeds


def commit_number():
    """The number of commits up to this one: consecutive commits have consecutive seeds. 0 without git."""
    command = ["git", "rev-list", "--count", "HEAD"]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    return int(done.stdout) if done.returncode == 0 else 0


def function_of(nodeid):
    return nodeid.partition("[")[0]


def is_short(name, seconds):
    return seconds.get(name, 0) < 1


def _value(value):
    """A key that is equal for equal values, and in each process for the same case."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value


def _marks(item, pairs):
    """What a draw must take of a case: its parameters' values, and its pairs of values."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    values = {name: _value(value) for name, value in params.items()}
    yield from ((name, value) for name, value in values.items())
    yield from ((pair, tuple(values.get(name) for name in pair)) for pair in pairs)


def _in_other_shares(marks, pairs, seed):
    """Of parameters with many values, those that other seeds take."""
    values = collections.defaultdict(list)
    for mark in marks:
        values[mark[0]].append(mark)
    for name, of_one in values.items():
        count = 1 if name in pairs else min(MOST_SHARES, -(-len(of_one) // MANY_VALUES))
        yield from (mark for i, mark in enumerate(of_one) if i % count != seed % count)


def draw_cases(cases, name, seed, times=1, pairs=(), period=PERIOD):
    """The cases of one function that a seed draws."""
    # In the same order for all seeds, so that each case is in one of `period` shares.
    order = random.Random(name)
    cases, first = order.sample(cases, len(cases)), order.randrange(period)
    share = [case for i, case in enumerate(cases, first) if i % period == seed % period]
    marks = {case: list(_marks(case, pairs)) for case in cases}
    left = collections.Counter(mark for of_case in marks.values() for mark in of_case)
    left = {mark: min(1 if mark[0] in pairs else times, n) for mark, n in left.items()}
    left.update(dict.fromkeys(_in_other_shares([*left], pairs, seed + first), 0))
    chosen = set()

    def take(case):
        chosen.add(case)
        for mark in marks[case]:
            left[mark] -= 1

    for case in share:
        take(case)
    rest = random.Random(f"{seed} {name}").sample(cases, len(cases))
    # First the cases of which the most values are missing.
    for missing in range(len(marks[cases[0]]), 0, -1):
        for case in rest:
            if case not in chosen and sum(left[mark] > 0 for mark in marks[case]) >= missing:
                take(case)
    return chosen


def draw(items, seed, seconds, named, is_drawn=lambda item: True):
    """The items that a seed draws, in their order.

    Args:
        items: pytest's items.
        seed: an integer.
        seconds: the seconds of each function that takes a second or more.
        named: node ids of cases that always run.
        is_drawn: whether an item is drawn. Others run.
    """
    functions = collections.defaultdict(list)
    for item in items:
        is_slow = item.get_closest_marker("slow") is not None
        functions[function_of(item.nodeid), is_slow].append(item)
    chosen = set()
    for (name, _), cases in functions.items():
        first = cases[0]
        if is_short(name, seconds) or first.get_closest_marker("whole") or not is_drawn(first):
            chosen.update(cases)
            continue
        marker = first.get_closest_marker("drawn")
        options = marker.kwargs if marker else {}
        if seconds[name] >= LONG * len(cases):
            options = {"times": 0, "period": TURNS}
        chosen.update(draw_cases(cases, name, seed, **options))
        chosen.update(case for case in cases if case.nodeid in named)
    return [item for item in items if item in chosen]


class Selection:
    """pytest plugin: --draw, --seed, --record-seconds and --slowest."""

    def pytest_configure(self, config):
        if config.option.draw and config.option.seed is None:
            config.option.seed = commit_number()  # xdist passes it on to its processes

    def pytest_report_header(self, config):
        if config.option.draw:
            return f"cases drawn with --seed={config.option.seed}"

    @pytest.hookimpl(trylast=True)  # after -m, so that a value's only case is not left out
    def pytest_collection_modifyitems(self, config, items):
        if not config.option.draw:
            return
        import seeded_faults

        def is_drawn(item):
            return config.option.draw == "all" or item.get_closest_marker("slow")

        named = {test for fault in seeded_faults.read_faults() for test in fault.tests}
        seconds = json.loads(SECONDS.read_text())
        kept = draw(items, config.option.seed, seconds, named, is_drawn)
        left_out = set(items) - set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = kept

    def pytest_terminal_summary(self, terminalreporter, config):
        """The functions that took longest. Not in the processes of xdist, which have no terminal."""
        seconds, cases = collections.Counter(), collections.Counter()
        for reports in terminalreporter.stats.values():
            for report in reports:
                if hasattr(report, "duration"):
                    seconds[function_of(report.nodeid)] += report.duration
                    cases[function_of(report.nodeid)] += report.when == "call"
        if config.option.slowest:
            terminalreporter.section(f"{config.option.slowest} slowest functions")
            for name, taken in seconds.most_common(config.option.slowest):
                terminalreporter.line(f"{taken:7.1f} s {cases[name]:5} cases  {name}")
        if config.option.record_seconds:
            if config.option.draw:  # it ran a part of the cases
                seconds |= collections.Counter(json.loads(SECONDS.read_text()))  # the larger ones
            long = {name: round(taken, 1) for name, taken in seconds.items() if taken >= 1}
            SECONDS.write_text(json.dumps(dict(sorted(long.items())), indent=1) + "\n")


def add_options(parser):
    group = parser.getgroup("selection", "cases of functions that take long")
    group.addoption(
        "--draw",
        choices=["all", "slow"],
        help="draw cases of all functions, or of those marked slow",
    )
    group.addoption("--seed", type=int, help="seed of --draw (default: the number of commits)")
    group.addoption("--slowest", type=int, default=0, help="number of slowest functions to show")
    group.addoption("--record-seconds", action="store_true", help=f"write {SECONDS.name}")
