"""The test suite's runs on GPUs."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from benchmarks.harness import history

from .common import markdown, table


def kind_of_suite(result: dict) -> str:
    """What a run of the test suite left out: by pytest's options, then files."""
    given = result["pytest_arguments"]
    left_out = [f'all but `{a} "{b}"`' for a, b in pairwise(given) if a in ("-m", "-k", "--draw")]
    left_out += [f"`{Path(name).name}`" for name in result["left_out"]]
    return ", ".join(left_out) or "nothing"


@table
def suite(results: Path) -> str:
    """The test suite's last run on each card."""
    of_card = {history.card(r["environment"]): r for r in history.kept("suite", results)}
    rows = [
        [
            result["environment"]["device"],
            result["environment"]["torch"],
            result["build"],
            result["environment"]["date"],
            *(str(result["counts"][key]) for key in ("passed", "skipped", "failed")),
            kind_of_suite(result),
        ]
        for result in of_card.values()
    ]
    headers = ["GPU", "torch", "build", "date", "passed", "skipped", "failed", "left out"]
    return markdown(rows, headers)
