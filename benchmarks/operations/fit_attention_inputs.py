"""Fits the inputs "trained" of reference/attention_inputs.py to the result of bench_trained_attention.py.

Prints the table of constants, and as comments each head's statistics as drawn over the measured ones, and
both numbers of rescales. --write replaces the table in reference/attention_inputs.py.

    python benchmarks/operations/fit_attention_inputs.py --write
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import click
import torch
from torch import Tensor

from benchmarks import models
from benchmarks.harness import history
from benchmarks.operations import attention_statistics
from benchmarks.operations.attention_statistics import Place

import attention_inputs
from attention_inputs import Head

NAME = "attention/trained"
FILE = models.CHECKOUT / "reference" / "attention_inputs.py"
BEGIN, END = "# Constants of fit_attention_inputs.py.\n", "# End of these constants.\n"
CPU = torch.device("cpu")
KEYS, HEAD_DIM, COPIES = 448, 64, 4  # each candidate is drawn as several heads
FITTED = ("std", "above_mean", "largest_share")

RUNS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 112, 224)
RISES = tuple(range(9))  # over the spread; 8 is the square root of the head dim
VARIATIONS = (0.0, 0.25, 0.5, 0.75)
CLOSE = 0.03  # relative error
FINE_RISES, FINE_VARIATIONS = (-0.5, -0.25, 0.0, 0.25, 0.5), (-0.12, 0.0, 0.12)


def draw(head: Head) -> Tensor:
    """Scores (COPIES, KEYS, KEYS), the same random numbers in each call."""
    torch.manual_seed(0)
    q, k, _ = attention_inputs.trained((1, KEYS, KEYS, COPIES, HEAD_DIM), CPU, [head])
    return attention_statistics.scores_of(q.float(), k.float())[0]


def means(scores: Tensor) -> dict[str, float]:
    rows = attention_statistics.row_statistics(scores)
    return {name: float(of_rows.mean()) for name, of_rows in rows.items()}


def candidate(runs: int, rise: float, variation: float) -> Head:
    """With a spread of 1, and without measured statistics."""
    return Head(math.nan, math.nan, math.nan, 1.0, rise, runs, variation)


def coarse() -> Iterator[Head]:
    for runs, rise, variation in itertools.product(RUNS, RISES, VARIATIONS):
        if (runs == 1) == (rise == 0):  # a rise of all scores changes nothing
            yield candidate(runs, rise, variation)


def fine(head: Head) -> Iterator[Head]:
    """Candidates near a fitted head."""
    for rise, variation in itertools.product(FINE_RISES, FINE_VARIATIONS):
        rise, variation = head.rise / head.spread + rise, head.variation + variation
        if head.runs > 1 and 0 < rise <= max(RISES) and variation >= 0:
            yield candidate(head.runs, rise, variation)


class Fit:
    """The best candidate for a head, scaled to its standard deviation; the first one that is close enough.

    Candidates with few runs and little variation come first.
    """

    def __init__(self, wanted: Mapping[str, float]) -> None:
        self.wanted = wanted
        self.error, self.head = math.inf, None

    def consider(self, candidate: Head, scores: Tensor, drawn: Mapping[str, float]) -> None:
        """The error is the worse one of the two other statistics."""
        if self.error < CLOSE:
            return
        scale = self.wanted["std"] / drawn["std"]
        error = abs(math.log(drawn["above_mean"] * scale / self.wanted["above_mean"]))
        if error >= self.error:
            return
        share = means(scores * scale)["largest_share"]
        error = max(error, abs(math.log(share / self.wanted["largest_share"])))
        if error < self.error:
            parameters = (scale, candidate.rise * scale, candidate.runs, candidate.variation)
            self.error, self.head = error, Head(*(self.wanted[n] for n in FITTED), *parameters)


def fit(wanted: Mapping[Place, Mapping[str, float]]) -> dict[Place, Head]:
    fits = {place: Fit(of_head) for place, of_head in wanted.items()}
    for candidate in coarse():
        scores = draw(candidate)
        drawn = means(scores)
        for each in fits.values():
            each.consider(candidate, scores, drawn)
    for each in fits.values():
        for candidate in fine(each.head):
            scores = draw(candidate)
            each.consider(candidate, scores, means(scores))
    return {place: each.head for place, each in fits.items()}


def table(result: Mapping, heads: Mapping[Place, Head]) -> str:
    """The constants as Python."""
    environment = result["environment"]
    lines = [
        BEGIN.rstrip(),
        f"# {result['size']}, weights {result['weights']}, measured {environment['date'].split()[0]}.",
        "TRAINED = (",
    ]
    for place in sorted(heads):
        numbers = (f"{n:.3g}" if isinstance(n, float) else str(n) for n in heads[place])
        lines.append(f"    Head({', '.join(numbers)}),")
    return "\n".join([*lines, ")", END])


@click.command()
@click.option("--write", is_flag=True, help="Replace the table in reference/attention_inputs.py.")
def main(write: bool) -> None:
    """Fit the inputs "trained" to the result that the documents show."""
    result = history.shown(NAME)
    if result is None:
        raise click.ClickException(f"there is no result: benchmarks/bench_{NAME}.py makes one.")
    wanted = attention_statistics.means_over_steps(result, "self")
    heads = fit(wanted)
    for place, head in sorted(heads.items()):
        scores = draw(head)
        drawn = means(scores)
        ratios = (f"{name} {drawn[name] / wanted[place][name]:.2f}" for name in FITTED)
        rescales = (
            f"{name} {float(function(scores).double().mean()):.2f}/{wanted[place][name]:.2f}"
            for name, function in (
                ("online_rescales", attention_statistics.online_rescales),
                ("lazy_rescales", attention_statistics.lazy_rescales),
            )
        )
        click.echo(f"# layer {place[0]}, head {place[1]}: {', '.join([*ratios, *rescales])}")
    text = table(result, heads)
    click.echo(text)
    if write:
        before, _, rest = FILE.read_text().partition(BEGIN)
        FILE.write_text(before + text + rest.partition(END)[2])


if __name__ == "__main__":
    main()
