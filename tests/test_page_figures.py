"""What the pages say was measured, read as a reader reads it: the text beside its table and the results."""

import re

import pytest

from benchmarks.harness import history

import render_docs
from conftest import CHECKOUT

PAGES = {
    str(path.relative_to(CHECKOUT)): path.read_text(encoding="utf-8")
    for pattern in ("README.md", "CARD.md", "docs/benchmarks.md", "docs/benchmarks/*.md")
    for path in sorted(CHECKOUT.glob(pattern))
}
MOST_BUILDS = 1
# Conditions of a run, which prose states only by marks that are rendered from the results.
CONDITION = re.compile(
    r"power limit|\b(?:one|two|three|\d+) rounds?\b|medians? of (?:\w+ ){0,2}(?:calls|rounds|samples)"
    r"|\bon (?:an?|one|two|four) (?:NVIDIA )?H[12]00|\b\d+ (?:models|pipelines|captions|prompts)\b"
)
RUN = re.compile(r"^NVIDIA .*; builds? ([\w, ]+);", re.MULTILINE)


def table(page, name):
    """The rows of a rendered table, each cell by its header."""
    text = next(found[0] for found in render_docs.TABLE.finditer(PAGES[page]) if found[2] == name)
    lines = [line for line in text.splitlines() if line.startswith("|")]
    headers, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return [dict(zip(headers, row, strict=True)) for row in rows]


def figure(page, name):
    """What the page says between a figure's marks."""
    pattern = rf"<!-- figure: {name} -->(.*?)<!-- end figure -->"
    (text,) = set(re.findall(pattern, PAGES[page], re.DOTALL))
    return text


def numbers(text):
    return [float(number) for number in re.findall(r"\d+\.\d+|\d+", text)]


def column(rows, header):
    return [value for row in rows for value in numbers(row[header])]


def speedups():
    """Rows of README's table whose ranges its first sentences state."""
    rows = table("README.md", "summary_pipelines")
    return [row for row in rows if not re.search("Hunyuan|LoRA", row["pipeline"])]


@pytest.mark.parametrize("page", ["README.md", "CARD.md"])
@pytest.mark.parametrize(
    ("name", "header"),
    [("pipelines_over_eager", "over eager"), ("pipelines_over_compiled", "over compiled")],
)
def test_ranges_are_those_of_the_named_rows(page, name, header):
    values = column(speedups(), header)
    assert numbers(figure(page, name)) == [min(values), max(values)]


def test_each_named_model_has_a_row():
    rows = [row["pipeline"] for row in speedups()]
    names = re.split(r", | and ", figure("README.md", "pipelines_named"))
    assert all(any(row.startswith(name) for row in rows) for name in names)
    assert all(any(row.startswith(name) for name in names) for row in rows)


def test_ratios_follow_from_the_seconds_beside_them():
    for row in table("README.md", "summary_pipelines"):
        (injected,) = numbers(row["injected"])
        compiled = column([row], "compiled") + column([row], "compiled, FA3")
        for header, seconds in (("over eager", numbers(row["eager"])), ("over compiled", compiled)):
            assert column([row], header) == pytest.approx([min(seconds) / injected], rel=0.02), row


def test_the_headline_is_one_run_of_three_rounds_on_one_card():
    (run,) = {
        run["environment"]["date"]: run
        for run in history.kept("pipelines")
        if run["environment"]["date"].split()[0] in PAGES["README.md"]
        and len(run["pipelines"]) == max(len(r["pipelines"]) for r in history.kept("pipelines"))
    }.values()
    assert run["environment"]["device"] == figure("README.md", "pipelines_card")
    for entry in run["pipelines"]:
        for mode, measured in entry["modes"].items():
            assert measured["seconds"]["samples"] >= 3, (entry["name"], mode)
            assert measured["memory_bytes"] > measured["weight_bytes"] > 0, (entry["name"], mode)


@pytest.mark.parametrize("page", PAGES)
def test_prose_states_no_condition_of_a_run(page):
    text = PAGES[page]
    for pattern in (render_docs.TABLE, render_docs.FIGURE):
        text = pattern.sub(" ", text)
    assert CONDITION.findall(
        "at its power limit, medians of three rounds, on an H100, 11 pipelines"
    )
    assert not CONDITION.findall(" ".join(text.split()))


def test_no_result_is_of_uncommitted_sources():
    for path in sorted((CHECKOUT / "benchmarks" / "results").glob("*.json")):
        for result in history.load(path):
            assert "dirty" not in (history.commit(result["environment"]) or ""), path.name
