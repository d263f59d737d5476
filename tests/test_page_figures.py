"""What the pages say was measured, read as a reader reads it: the text beside its table and the results."""

import re

import pytest

from benchmarks.harness import history

import render_docs
from conftest import CHECKOUT

PAGES = {
    str(path.relative_to(CHECKOUT)): path.read_text(encoding="utf-8")
    for pattern in ("*.md", "docs/upstream.md", "docs/benchmarks.md", "docs/benchmarks/*.md")
    for path in sorted(CHECKOUT.glob(pattern))
}
OVER = "over eager, over compiled"
# Conditions of a run, which prose states only by marks that are rendered from the results.
CONDITION = re.compile(
    r"at (?:its|the|the GPU's|the card's) power limit|\b(?:one|two|three|\d+) rounds?\b"
    r"|medians? of (?:two|three|five|\d+)"
    r"|\bon (?:an?|one|two|four) (?:NVIDIA )?H[12]00|\b\d+ (?:models|pipelines|captions|prompts)\b"
)


def rendered(page, name):
    """A table with what is said about its runs."""
    return next(found[0] for found in render_docs.TABLE.finditer(PAGES[page]) if found[2] == name)


def table(page, name):
    """The rows of a rendered table, each cell by its header."""
    lines = [line for line in rendered(page, name).splitlines() if line.startswith("|")]
    headers, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return [dict(zip(headers, row, strict=True)) for row in rows]


def figure(page, name):
    """What the page says between a figure's marks."""
    pattern = rf"<!-- figure: {name} -->(.*?)<!-- end figure -->"
    (text,) = set(re.findall(pattern, PAGES[page], re.DOTALL))
    return text


def numbers(text):
    return [float(number) for number in re.findall(r"\d+\.\d+|\d+", text)]


def speedups():
    """Rows of README's table whose ranges its first sentences state: of the named models."""
    names = tuple(re.split(r", | and ", figure("README.md", "pipelines_named")))
    rows = table("README.md", "summary_pipelines")
    return [row for row in rows if row["pipeline"].startswith(names)]


@pytest.mark.parametrize("page", ["README.md", "CARD.md", "docs/upstream.md"])
def test_ranges_are_those_of_the_named_rows(page):
    over = [numbers(row[OVER]) for row in speedups()]
    for name, values in zip(("eager", "compiled"), zip(*over, strict=True), strict=True):
        assert numbers(figure(page, f"pipelines_over_{name}")) == [min(values), max(values)]


def test_each_named_model_has_a_row():
    names = re.split(r", | and ", figure("README.md", "pipelines_named"))
    rows = [row["pipeline"] for row in speedups()]
    assert len(names) > 5 and all(any(row.startswith(name) for row in rows) for name in names)


def test_other_rows_are_named_beside_the_table():
    prose = render_docs.TABLE.sub("", PAGES["README.md"])
    others = [r for r in table("README.md", "summary_pipelines") if r not in speedups()]
    for word in ("Stable Diffusion XL", "HunyuanVideo 1.5"):
        assert word in prose and any(word in row["pipeline"] for row in others)
    assert all(re.search("XL|Hunyuan", row["pipeline"]) for row in others)


def test_ratios_follow_from_the_seconds_beside_them():
    for row in table("README.md", "summary_pipelines"):
        injected, eager = numbers(row["injected"])[0], numbers(row["eager"])[0]
        compiled = min(numbers(row["compiled"]) + numbers(row["compiled, FA3"]))
        expected = [eager / injected, compiled / injected]
        assert numbers(row[OVER]) == pytest.approx(expected, rel=0.02), row


def test_the_headline_is_of_three_rounds_on_one_card_with_one_build():
    (build,) = re.findall(r"; build (\w+);", rendered("README.md", "summary_pipelines"))
    runs = [r for r in history.kept("pipelines") if history.commit(r["environment"]) == build]
    assert {run["environment"]["device"] for run in runs} == {figure("README.md", "pipelines_card")}
    entries = [entry for run in runs for entry in run["pipelines"]]
    rows = [row["pipeline"] for row in table("README.md", "summary_pipelines")]
    assert all(row.startswith(tuple(entry["title"] for entry in entries)) for row in rows)
    for entry in entries:
        for mode, measured in entry["modes"].items():
            assert measured["seconds"]["samples"] >= 3, (entry["name"], mode)
            assert measured["memory_bytes"] > measured["weight_bytes"] > 0, (entry["name"], mode)


@pytest.mark.parametrize("page", PAGES)
def test_prose_states_no_condition_of_a_run(page):
    text = PAGES[page]
    for pattern in (render_docs.TABLE, render_docs.FIGURE):
        text = pattern.sub(" ", text)
    assert CONDITION.findall("at its power limit, median of three calls, on an H100")
    assert not CONDITION.findall(" ".join(text.split()))


def test_no_result_is_of_uncommitted_sources():
    for path in sorted((CHECKOUT / "benchmarks" / "results").glob("*.json")):
        for result in history.load(path):
            assert "dirty" not in (history.commit(result["environment"]) or ""), path.name
