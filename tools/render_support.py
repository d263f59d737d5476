#!/usr/bin/env python3
"""Write docs/support.md, what works with what, from docs/support.toml.

python tools/render_support.py            # write
python tools/render_support.py --check    # exit with 1 if it is not what the TOML says
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import click
from tabulate import tabulate

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CHECKOUT = Path(__file__).resolve().parents[1]
SOURCE = CHECKOUT / "docs" / "support.toml"
PAGE = CHECKOUT / "docs" / "support.md"
TESTS = "../tests"  # as seen from the page

# What a row may be about, and its name on the page. A family goes by its name in tests/families.py.
SUBJECTS = {
    "operations": "operations",
    "layers": "layers",
    "models": "injected models",
    "ltx": "injected LTX-Video",
    "flux": "injected FLUX.1",
    "flux2": "injected FLUX.2",
    "qwenimage": "injected Qwen-Image",
    "sd3": "injected Stable Diffusion 3",
    "wan": "injected Wan",
    "others": "other models, injected in part",
}
UNTRIED = ("not tried", "not built")

HEAD = """\
# What works with what

The operations, the layers for `kernels.kernelize`, and the models into which
`inject_kernels` has put the kernels: what runs on the kernels, what falls back, what raises, and the test
that shows it. A row on injected models holds for every family, unless a row of the same feature names one.
Rows on other models hold for those of diffusers that have no family.

Written by `tools/render_support.py` from `support.toml`.
"""


@dataclass(frozen=True)
class Row:
    """What happens where a feature meets a subject; the fields are explained in docs/support.toml."""

    section: str
    feature: str
    on: str
    behaviour: str
    note: str = ""
    id: str | None = None
    tests: tuple[str, ...] = ()


@dataclass(frozen=True)
class Table:
    """The whole of docs/support.toml."""

    behaviours: dict[str, str]
    sections: dict[str, str]
    rows: tuple[Row, ...]

    def behaviour(self, feature_id: str, family: str) -> str:
        """What happens where an injected model of a family meets the feature of an id."""
        found = {row.on: row.behaviour for row in self.rows if row.id == feature_id}
        for subject in (family, "models"):
            if subject in found:
                return found[subject]
        raise KeyError(f"no row on {family} has the id {feature_id!r}")


def load(path: Path = SOURCE) -> Table:
    """The table, after a look at what a slip of the pen would leave out of it."""
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    rows = tuple(_row(number, fields, data) for number, fields in enumerate(data["rows"], 1))
    seen = set()
    for row in rows:
        for key in {(row.feature, row.on), (row.id or row.feature, row.on)}:
            if key in seen:
                raise click.ClickException(f"{path.name}: two rows on {key[1]} are of {key[0]!r}.")
        seen.update({(row.feature, row.on), (row.id or row.feature, row.on)})
    return Table(data["behaviours"], data["sections"], rows)


def _row(number: int, fields: dict, data: dict) -> Row:
    def refuse(what: str) -> None:
        feature = fields.get("feature", "no feature")
        raise click.ClickException(f"support.toml: row {number} ({feature}): {what}.")

    known = Row.__dataclass_fields__
    unknown, missing = fields.keys() - known.keys(), {"section", "feature", "on", "behaviour"}
    if unknown or not missing <= fields.keys():
        refuse(f"its keys must be among {', '.join(known)}, got {', '.join(fields)}")
    for key, allowed in (
        ("section", data["sections"]),
        ("on", SUBJECTS),
        ("behaviour", data["behaviours"]),
    ):
        if fields[key] not in allowed:
            refuse(f"{key} must be one of {', '.join(allowed)}, got {fields[key]!r}")
    row = Row(**{**fields, "tests": tuple(fields.get("tests", ()))})
    if bool(row.tests) == (row.behaviour in UNTRIED):
        refuse("it must name a test, unless it is not tried or not built")
    return row


def _link(test: str) -> str:
    file, _, name = test.partition("::")
    return f"[`{name.partition('[')[0] or file}`]({TESTS}/{file})"


def render(table: Table) -> str:
    legend = "\n".join(f"- **{name}**: {text}" for name, text in table.behaviours.items())
    parts = [HEAD, legend]
    for section, title in table.sections.items():
        lines = [
            [
                row.feature,
                SUBJECTS[row.on],
                f"**{row.behaviour}**" + (f"; {row.note}" if row.note else ""),
                ", ".join(dict.fromkeys(map(_link, row.tests))),
            ]
            for row in table.rows
            if row.section == section
        ]
        headers = ("feature", "of", "what happens", "test")
        parts.append(f"## {title}")
        parts.append(tabulate(lines, headers, tablefmt="github", disable_numparse=True))
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--check", is_flag=True, help="Compare, and write nothing.")
def main(check: bool) -> None:
    page = render(load())
    is_current = PAGE.exists() and PAGE.read_text(encoding="utf-8") == page
    if check:
        if not is_current:
            raise click.ClickException(f"{PAGE.name} is stale: run tools/render_support.py.")
    elif not is_current:
        PAGE.write_text(page, encoding="utf-8")
        click.echo(f"Wrote {PAGE}")


if __name__ == "__main__":
    main()
