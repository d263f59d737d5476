"""selection.py: what a seed draws."""

import itertools
import json
import re
from types import SimpleNamespace

import pytest

import selection
from conftest import CHECKOUT
from selection import PERIOD, draw

NAMES, KINDS, FLAGS = [f"n{i}" for i in range(8)], ["a", "b", {"c": 1}], [False, True]
SECONDS = {"f": 5.0, "long": 2.0, "several": 9.0}


def item(function, *values, marks=()):
    params = dict(zip(("name", "kind", "flag"), values, strict=False))
    one = SimpleNamespace(
        nodeid=f"{function}[{values}]" if values else function,
        get_closest_marker={mark.name: mark for mark in marks}.get,
    )
    if values:
        one.callspec = SimpleNamespace(params=params)
    return type("Item", (), {**vars(one), "__hash__": object.__hash__})()


def product(function="f", *marks):
    return [item(function, *v, marks=marks) for v in itertools.product(NAMES, KINDS, FLAGS)]


@pytest.fixture
def cases():
    return product()


def values(items, *names):
    return [tuple(str(one.callspec.params[name]) for name in names) for one in items]


def test_each_value_once(cases):
    drawn = draw(cases, 7, SECONDS, [])
    assert len(drawn) < len(cases) / 4
    for name in ("name", "kind", "flag"):
        assert {*values(drawn, name)} == {*values(cases, name)}


def test_a_seed_gives_a_draw_in_the_items_order(cases):
    assert draw(cases, 7, SECONDS, []) == draw(cases, 7, SECONDS, [])
    assert draw(cases, 7, SECONDS, []) != draw(cases, 8, SECONDS, [])
    drawn = draw(cases, 7, SECONDS, [])
    assert drawn == [case for case in cases if case in drawn]


@pytest.mark.parametrize("first", [0, 1132])
def test_consecutive_seeds_draw_each_case(cases, first):
    seeds = range(first, first + PERIOD)
    assert {case for seed in seeds for case in draw(cases, seed, SECONDS, [])} == {*cases}


def test_several_times():
    cases = product("f", pytest.mark.drawn(times=3).mark)
    drawn = values(draw(cases, 7, SECONDS, []), "name")
    assert all(drawn.count((name,)) >= 3 for name in NAMES)


def test_a_share():
    cases = product("f", pytest.mark.drawn(times=0, period=5).mark)
    drawn = [draw(cases, seed, SECONDS, []) for seed in range(5)]
    assert sorted(map(len, drawn)) == [9, 9, 10, 10, 10]
    assert {*itertools.chain(*drawn)} == {*cases}


def test_many_values():
    """A draw takes a half of 12 values, a sixth of 100, and consecutive draws take all."""
    for count, shares in ((12, 2), (100, 6)):
        cases = [item("f", f"n{i}") for i in range(count)]
        drawn = [{*draw(cases, seed, SECONDS, [])} for seed in range(shares)]
        assert all(count / shares - 1 < len(each) < count * 0.6 for each in drawn)
        assert set().union(*drawn) == {*cases}


def test_pairs():
    cases = product("f", pytest.mark.drawn(pairs=[("name", "flag")]).mark)
    drawn = draw(cases, 7, SECONDS, [])
    assert {*values(drawn, "name", "flag")} == {*values(cases, "name", "flag")}
    assert len(drawn) < len(cases) / 2


def test_what_runs_whole(cases):
    """Functions that take less than a second, those marked so, others than `is_drawn`, and named cases."""
    short, whole = product("short"), product("f", pytest.mark.whole.mark)
    assert draw(short, 7, SECONDS, []) == short
    assert draw(whole, 7, SECONDS, []) == whole
    assert draw(cases, 7, SECONDS, [], lambda one: False) == cases
    named = {case.nodeid for case in cases[::5]}
    assert named <= {case.nodeid for case in draw(cases, 7, SECONDS, named)}


def test_a_function_without_parameters():
    long = [item("long")]
    assert sorted(len(draw(long, seed, SECONDS, [])) for seed in range(5)) == [0, 0, 0, 0, 1]
    assert draw(long, 0, SECONDS, ["long"]) == draw(long, 1, SECONDS, ["long"]) == long


def test_long_cases_take_turns():
    cases = [item("several", f"n{i}") for i in range(6)]
    drawn = [draw(cases, seed, SECONDS, []) for seed in range(5)]
    assert sorted(map(len, drawn)) == [1, 1, 1, 1, 2]
    assert {*itertools.chain(*drawn)} == {*cases}


def test_recorded_functions_exist():
    """A function that was renamed runs whole."""
    recorded = json.loads(selection.SECONDS.read_text())
    functions = [
        f"tests/{path.name}::{function}"
        for path in (CHECKOUT / "tests").glob("test_*.py")
        for function in re.findall(r"^def (test_\w+)\(", path.read_text("utf-8"), re.MULTILINE)
    ]
    assert recorded.keys() <= {*functions}


DRAWN = re.compile(r"^@pytest\.mark\.drawn\(.*?^def (\w+)\(", re.DOTALL | re.MULTILINE)


def test_drawn_functions_are_recorded():
    """Without its seconds, a function runs whole in spite of the mark."""
    recorded = json.loads(selection.SECONDS.read_text())
    for path in (CHECKOUT / "tests").glob("test_*.py"):
        for function in DRAWN.findall(path.read_text("utf-8")):
            assert f"tests/{path.name}::{function}" in recorded
