#!/usr/bin/env python3
"""Write the measured figures of the documents, and the plots, from the JSON in benchmarks/results.

A table stands between two lines, and a figure within a sentence between two marks; each is replaced
as a whole:

    <!-- table: summary_models -->
    <!-- end table -->

    It is <!-- figure: ltx_over_eager --><!-- end figure --> times as fast.

A plot is written to benchmarks/plots where the results that it draws are there.

    python tools/render_docs.py            # write
    python tools/render_docs.py --check    # exit with 1 if one is not what the JSON says
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import click

import render_plots

# The modules fill TABLES and FIGURES.
from documents import (  # noqa: F401
    CHECKOUT,
    decoders,
    few_steps,
    fp8,
    lora,
    operations,
    pipelines,
    whole_models,
)
from documents.common import FIGURES, TABLES

RESULTS = CHECKOUT / "benchmarks" / "results"
PLOTS = CHECKOUT / "benchmarks" / "plots"
# CARD.md is a template of Jinja's, which leaves these marks as they are.
DOCUMENTS = tuple(
    path
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/NOTES.md", "benchmarks/notes/*.md")
    for path in sorted(CHECKOUT.glob(pattern))
)
TABLE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end table -->)", re.DOTALL)
FIGURE = re.compile(r"(<!-- figure: (\S+) -->).*?(<!-- end figure -->)", re.DOTALL)


def render(text: str, results: Path = RESULTS) -> str:
    """The text with every table and every figure replaced by what the results say."""

    def known(kind: str, name: str, all_: dict[str, Callable[[Path], str]]) -> str:
        if name not in all_:
            raise click.ClickException(
                f"there is no {kind} {name}: the {kind}s are {', '.join(all_)}."
            )
        return all_[name](results)

    text = TABLE.sub(lambda m: f"{m[1]}\n{known('table', m[2], TABLES)}\n\n{m[3]}", text)
    return FIGURE.sub(lambda m: f"{m[1]}{known('figure', m[2], FIGURES)}{m[3]}", text)


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if one is stale.")
@click.option("--results", type=click.Path(file_okay=False, path_type=Path), default=RESULTS)
@click.option("--plots", type=click.Path(file_okay=False, path_type=Path), default=PLOTS)
@click.argument("files", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(check: bool, results: Path, plots: Path, files: tuple[Path, ...]) -> None:
    """Write the plots, and the measured figures of FILES (all pages if none are given)."""
    wanted = {
        path: render(path.read_text(encoding="utf-8"), results) for path in files or DOCUMENTS
    }
    wanted |= {plots / name: svg for name, svg in render_plots.render(results).items()}
    for path, text in wanted.items():
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        if check:
            raise click.ClickException(f"{path} is stale: run tools/render_docs.py.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        click.echo(f"Wrote {path}")


if __name__ == "__main__":
    main()
