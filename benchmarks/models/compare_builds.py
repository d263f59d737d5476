"""Single forwards of a model injected by two builds, another checkout's and this one's, in one process.

The builds take turns, each with its own modules over one set of weights. The other build has two copies;
their difference is the noise. Two processes would differ by more than most changes do.

    git worktree add ../before <commit> && (cd ../before && python tools/build_variant.py --backend cuda)
    python benchmarks/models/compare_builds.py ../before
    python benchmarks/models/compare_builds.py ../before --sizes 49x512x768 --pause-s 0.03

After a pause the GPU clocks higher, and the CPU may be slower.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import click
import torch
from tabulate import tabulate

from benchmarks import models
from benchmarks.harness import record, timing
from benchmarks.harness.options import DEVICE, DTYPE, MODEL, PAUSE, SIZES, TINY

from accuracy import finite_distance

WARM_UP_ROUNDS = 3
CONTROL = "before, again"


def load_builds(before: Path) -> dict[str, ModuleType]:
    """The build of the checkout `before`, a second copy of it as control, and this checkout's build."""
    shared = ids(before) & ids(models.CHECKOUT)
    if shared and before.resolve() != models.CHECKOUT:
        # Python would mix up their modules.
        raise click.UsageError(f"both builds are {min(shared)}: commit and rebuild")
    try:
        one, other = map(models.load_local_kernel, (before, models.CHECKOUT))
    except FileNotFoundError as error:
        raise click.UsageError(str(error)) from None
    return {"before": one, CONTROL: one, "after": other}


@click.command()
@click.argument("before", type=click.Path(exists=True, file_okay=False, path_type=Path))
@MODEL
@SIZES
@DEVICE
@DTYPE
@TINY
@click.option("--rounds", type=click.IntRange(min=1), default=100, show_default=True)
@PAUSE
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), help="JSON file to write."
)
@torch.no_grad()
def main(before, model, sizes, device, dtype, tiny, rounds, pause_s, output) -> None:
    """Time single forwards injected by the build of the checkout BEFORE and by this checkout's build."""
    published = model
    kernels = load_builds(before)
    model = published.transformer(device, dtype, tiny)
    instances = {}
    for name, kernel in kernels.items():
        instances[name] = models.twin(model)
        kernel.inject_kernels(instances[name])

    result = {
        "environment": record.environment(device),
        "model": published.name_of(tiny),
        "dtype": record.dtype_name(dtype),
        "pause_s": pause_s,
        "sizes": {},
    }
    for size in sizes or (published.tiny_sizes if tiny else published.sizes):
        arguments = published.inputs(model, size, device, dtype)
        forwards = {name: functools.partial(m, **arguments) for name, m in instances.items()}
        weights = result["sizes"][str(size)] = {}
        for name in models.WEIGHTS:
            with models.weights(model, name):
                one, other = (models.output_of(forwards[name]()) for name in ("after", "before"))
                distance = finite_distance(one, other)
                timing.interleave(forwards, WARM_UP_ROUNDS, device)
                samples = timing.interleave(forwards, rounds, device, pause_s=pause_s)
            weights[name] = {
                "distance": distance,
                "ms": {build: timing.summarize(values) for build, values in samples.items()},
            }
            show(f"{size}, {name}", samples, distance)
    record.finish(output, result)


def ids(checkout: Path) -> set[str]:
    """The kernels of a checkout's build."""
    return {json.loads(f.read_text())["id"] for f in checkout.glob("build/*/metadata.json")}


def show(title: str, samples: dict[str, list[float]], distance: float) -> None:
    before = samples["before"]
    rows = []
    for name, values in samples.items():
        quartiles = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
        ratio = statistics.median(values) / statistics.median(before)
        ratio_of_means = statistics.fmean(values) / statistics.fmean(before)
        rows.append([name, min(values), *quartiles, ratio, ratio_of_means])
    headers = ["build", "min ms", "quartile", "median", "quartile", "of before's", "of the mean"]
    click.echo(f"\n{title}; the outputs differ by {distance:.2g} of their norm")
    click.echo(tabulate(rows, headers, floatfmt=("", *[".2f"] * 4, ".4f", ".4f")))


if __name__ == "__main__":
    main()
