#!/usr/bin/env python3
"""Write docs/support.md, what works with what, from docs/support.toml, or list the tests of each feature.

python tools/render_support.py            # write docs/support.md
python tools/render_support.py --check    # exit with 1 if the page differs from what the TOML says
python tools/render_support.py --tests    # write the tests of each feature to outputs/support_tests.md
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import tomllib

CHECKOUT = Path(__file__).resolve().parents[1]
SOURCE = CHECKOUT / "docs" / "support.toml"
PAGE = CHECKOUT / "docs" / "support.md"
TESTS_PAGE = CHECKOUT / "outputs" / "support_tests.md"  # not stored in Git
TESTS = "../tests"  # relative to that page

# A column of the page each.
COLUMNS = {
    "operations": "operations",
    "layers": "layers",
    "models": "models in full",
    "others": "models in part",
}
UNTRIED = {"not tried", "not built", "not supported"}
# How much of a model runs on the kernels, as reports say, and what that means on the page.
LEVELS = {
    "in full": "Its blocks are replaced as a whole.",
    "in part": "Its norms, activations and attentions are replaced one by one.",
    "not at all": "No kernel replaces any of its modules. With `cuda_graphs=True`: only in CUDA graphs.",
    "no forward": "Other models take its layers.",
}

HEAD = """\
# What works with what

Columns: operations called as functions; layers for `kernels.kernelize`; models in full, whose blocks are
replaced as a whole; models in part, in which single modules are replaced ([which is which](models.md)). An
empty cell: the feature does not apply there, or was not tested. "kernels; SD3: in part" means `kernels` for
all families except SD3.

[Every model of diffusers](#every-model-of-diffusers) lists the classes by level.
`python tools/render_support.py --tests` lists the tests of each feature.

Written by `tools/render_support.py` from `support.toml`.
"""
LEVELS_HEAD = """\
## Every model of diffusers

The classes of diffusers' transformers, UNets and ControlNets, with the report's level in 16 bits.
In float32, attention is the model's own. [test_every_model.py](../tests/test_every_model.py) injects a small
model of each and checks its outputs, signatures, ejection, and graph breaks under `torch.compile`.
"""
TESTS_HEAD = """\
# Tests of each feature

The tests that show what [support.md](../docs/support.md) says, by feature.

Written by `tools/render_support.py --tests` from `docs/support.toml`.
"""


@dataclass(frozen=True)
class Feature:
    """What a user does or has, and what happens then. The fields are explained in docs/support.toml.

    Attributes:
        on: the behaviour by subject.
    """

    section: str
    feature: str
    on: dict[str, str]
    note: str = ""
    id: str | None = None
    tests: tuple[str, ...] = ()


@dataclass(frozen=True)
class Table:
    """The whole of docs/support.toml.

    Attributes:
        families: the names of the models in full, by their names in tests/families.py.
        level: how much of each class of diffusers runs on the kernels, by its name.
    """

    behaviours: dict[str, str]
    families: dict[str, str]
    sections: dict[str, str]
    features: tuple[Feature, ...]
    level: dict[str, str]

    def behaviour(self, name: str, family: str) -> str:
        """The behaviour of an injected model of a family with a feature, given by its id or its text."""
        found = [feature for feature in self.features if name in (feature.id, feature.feature)]
        if len(found) != 1:
            raise KeyError(f"{len(found)} features are called {name!r}")
        on = found[0].on
        return on[family] if family in on else on["models"]


def load(path: Path = SOURCE) -> Table:
    """The table, checked for keys and values that the pages would leave out."""
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    features = tuple(_feature(fields, data) for fields in data["features"])
    names = collections.Counter((feature.section, feature.feature) for feature in features)
    for (section, name), count in names.items():
        if count > 1:
            raise click.ClickException(f"{path.name}: {section} has {count} features {name!r}.")
    parts = (data["behaviours"], data["families"], data["sections"])
    return Table(*parts, features, _levels(data["levels"]))


def _levels(data: dict[str, list[str]]) -> dict[str, str]:
    if data.keys() != LEVELS.keys():
        raise click.ClickException(f"support.toml: levels must be {', '.join(LEVELS)}.")
    level = {name: level for level, names in data.items() for name in names}
    if len(level) != sum(map(len, data.values())):
        raise click.ClickException("support.toml: a class has two levels.")
    return level


def _feature(fields: dict, data: dict) -> Feature:
    subjects = (*COLUMNS, *data["families"])
    on = {key: value for key, value in fields.items() if key in subjects}
    others = {key: value for key, value in fields.items() if key not in subjects}

    def refuse(what: str) -> None:
        raise click.ClickException(f"support.toml: {fields.get('feature', fields)}: {what}.")

    known = {"section", "feature", "note", "id", "tests"}
    if not {"section", "feature"} <= others.keys() <= known:
        refuse(f"its keys must be among {', '.join((*known, *subjects))}, got {', '.join(fields)}")
    if others["section"] not in data["sections"]:
        refuse(f"section must be one of {', '.join(data['sections'])}, got {others['section']!r}")
    if not on or not set(on.values()) <= data["behaviours"].keys():
        refuse(f"behaviours must be among {', '.join(data['behaviours'])}, got {on}")
    feature = Feature(on=on, **{**others, "tests": tuple(others.get("tests", ()))})
    if bool(feature.tests) == (set(on.values()) <= UNTRIED):
        refuse("it must name a test, unless it was not tried or not built")
    return feature


def _cell(feature: Feature, column: str, names: dict[str, str]) -> str:
    word = feature.on.get(column, "")
    if column != "models":
        return word
    families: dict[str, list[str]] = {}
    for family, name in names.items():
        if family in feature.on:
            families.setdefault(feature.on[family], []).append(name)
    named = "; ".join(f"{', '.join(names)}: {word}" for word, names in families.items())
    return f"{word}; {named}" if word and named else word or named


def _table(features: list[Feature], names: dict[str, str]) -> str:
    """The features of a section, without columns that would be empty."""
    columns = ["feature", *COLUMNS.values(), "note"]
    rows = [
        [feature.feature, *(_cell(feature, column, names) for column in COLUMNS), feature.note]
        for feature in features
    ]
    used = [any(row[i] for row in rows) for i in range(len(columns))]
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(
        f"| {' | '.join(cell for cell, is_used in zip(line, used, strict=True) if is_used)} |"
        for line in lines
    )


def _level_table(levels: dict[str, str]) -> str:
    """A row for each level with the classes that have it."""
    lines = ["| level | what it means | classes |", "| --- | --- | --- |"]
    for level, meaning in LEVELS.items():
        names = ", ".join(f"`{name}`" for name in sorted(levels) if levels[name] == level)
        lines.append(f"| {level} | {meaning} | {names} |")
    return "\n".join(lines)


def _links(tests: tuple[str, ...]) -> str:
    """The tests by file, without their cases. A file without names stands for all of its tests."""
    files: dict[str, dict[str, None]] = {}
    for test in tests:
        file, _, case = test.partition("::")
        names = files.setdefault(file, {})
        if case:
            names[f"`{case.partition('[')[0]}`"] = None
    return "; ".join(
        f"[{file}]({TESTS}/{file}) {', '.join(names)}".strip() for file, names in files.items()
    )


def render(table: Table) -> str:
    """docs/support.md."""
    legend = "\n".join(f"- **{name}**: {text}" for name, text in table.behaviours.items())
    parts = [HEAD, legend]
    for title, features in _sections(table):
        parts += [f"## {title}", _table(features, table.families)]
    return _page([*parts, LEVELS_HEAD, _level_table(table.level)])


def render_tests(table: Table) -> str:
    """The page of the tests of each feature."""
    parts = [TESTS_HEAD]
    for title, features in _sections(table):
        lines = [f"- {f.feature}: {_links(f.tests)}" for f in features if f.tests]
        parts += [f"## {title}", "\n".join(lines)]
    return _page(parts)


def _sections(table: Table) -> Iterator[tuple[str, list[Feature]]]:
    for section, title in table.sections.items():
        yield title, [feature for feature in table.features if feature.section == section]


def _page(parts: list[str]) -> str:
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--check", is_flag=True, help="Compare the page, and write nothing.")
@click.option("--tests", is_flag=True, help="Write the tests of each feature instead.")
def main(check: bool, tests: bool) -> None:
    table = load()
    path, text = (TESTS_PAGE, render_tests(table)) if tests else (PAGE, render(table))
    if check:
        if path.read_text(encoding="utf-8") != text:
            raise click.ClickException(f"{path.name} is stale: run tools/render_support.py.")
        return
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    click.echo(f"Wrote {path}")


if __name__ == "__main__":
    main()
