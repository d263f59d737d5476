"""Compares results of one benchmark: changes beyond the noise between runs.

Results of one build on one card are repeated runs, represented by their median. The oldest build is compared
with the newest, both on the newest result's card. A ratio to a peer counts as changed if its change exceeds
all of

- the spread of its samples, in both builds and of the peer;
- the range between runs of one build, if several are given;
- --limit, for noise between runs that no spread contains.

    git show HEAD:benchmarks/results/operations.json > /tmp/before.json
    python tools/compare_results.py /tmp/before.json benchmarks/results/operations.json --name norm
    python tools/compare_results.py BEFORE.json AFTER.json --fail
"""

from __future__ import annotations

import math
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from tabulate import tabulate

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CHECKOUT))
from benchmarks.harness import history  # noqa: E402

Label = tuple[str, ...]  # the row, then the ratio's denominator


@dataclass(frozen=True)
class Ratio:
    """A figure that does not depend on the clocks, so that runs can be compared."""

    value: float
    spread: float = 0.0  # relative quartile spread of its samples; 0 if there are none
    is_higher_better: bool = True


Rows = dict[Label, Ratio]


def combined(*spreads: float) -> float:
    """Relative spread of a quotient of figures with these relative spreads."""
    return math.hypot(*spreads)


def shape_name(entry: Mapping) -> str:
    size = "x".join(map(str, entry["shape"]))
    return " ".join(filter(None, [entry["operation"], entry["variant"], size]))


def rates(name: str, measured: Mapping) -> Iterator[tuple[Label, Ratio]]:
    """Ratios of implementations that took turns: ours over each other."""
    times = measured["microseconds"]
    for peer, over in measured["over"].items():
        timed = f"compiled {measured['compiled_mode']}" if peer == "compiled" else peer
        spread = combined(times["ours"]["spread"], times[timed]["spread"])
        yield (name, peer), Ratio(over, spread)
    if "of_large_copy" in measured:
        spread = combined(times["ours"]["spread"], times["large_copy"]["spread"])
        yield (name, "large copy"), Ratio(measured["of_large_copy"], spread)


def of_workloads(result: Mapping) -> Iterator[tuple[Label, Ratio]]:
    """Figures of the families, and of attention on each kind of inputs."""
    for entry in result["workloads"]:
        name = shape_name(entry)
        for cache in ("cold", "warm"):
            if cache in entry:
                yield from rates(f"{name}, {cache}", entry[cache])
        for kind, of_kind in entry.get("inputs", {}).items():
            yield from rates(f"{name}, {kind}", of_kind["cold"])
            for peer, over in of_kind["error_over"].items():
                label = (f"error of {name}, {kind}", peer)
                yield label, Ratio(over, is_higher_better=False)


def of_modes(name: str, entry: Mapping, times: str) -> Iterator[tuple[Label, Ratio]]:
    """Ratios of a model's modes that took turns: over eager and torch.compile, or over injected."""
    compiled = ("compiled", "compiled-regional", "compiled-reduce-overhead")
    others = ("eager", *compiled, "compiled-regional+decoder")
    for mode, over in entry["speedups"].items():
        for other in others if "eager" in entry["modes"] else ("injected",):
            if other in over:
                spreads = [entry["modes"][m][times]["spread"] for m in (mode, other)]
                yield (f"{name}, {mode}", other), Ratio(over[other], combined(*spreads))


def of_sizes(result: Mapping) -> Iterator[tuple[Label, Ratio]]:
    """Figures of a model's modes, or of two builds of the package (benchmarks/models/compare_builds.py)."""
    for size, entry in result["sizes"].items():
        for weights, of_weights in entry.get("weights", entry).items():
            name = f"{size} {weights}"
            if "modes" in of_weights:
                yield from of_modes(name, of_weights, "ms")
                continue
            before, after = of_weights["ms"]["before"], of_weights["ms"]["after"]
            spread = combined(before["spread"], after["spread"])
            ratio = Ratio(after["median"] / before["median"], spread, is_higher_better=False)
            yield (name, "the build before"), ratio


def of_graph_forwards(result: Mapping) -> Iterator[tuple[Label, Ratio]]:
    for forward in result["graph_forwards"]:
        for weights, of_weights in forward["weights"].items():
            name = f"{forward['model']} {forward['size']} {weights}"
            yield from of_modes(name, of_weights, "wall_ms")
            for mode, measured in of_weights["modes"].items():
                if "wall_over_busy" in measured:
                    ratio = Ratio(measured["wall_over_busy"], measured["wall_ms"]["spread"], False)
                    yield (f"{name}, {mode}", "its kernels"), ratio


def of_memory(result: Mapping) -> Iterator[tuple[Label, Ratio]]:
    for when in ("peak_first", "peak", "end"):
        ratio = Ratio(result["with"][when] / result["explained"], is_higher_better=False)
        yield (f"memory with CUDA graphs, {when}", "what the limit explains"), ratio


def of_pipelines(result: Mapping) -> Iterator[tuple[Label, Ratio]]:
    for entry in result["pipelines"]:
        yield from of_modes(f"{entry['name']} {entry['size']}", entry, "seconds")


def of_decoders(result: Mapping) -> Iterator[tuple[Label, Ratio]]:
    for entry in result["decoders"]:
        yield from of_modes(f"decoder of {entry['title']} {entry['frames']}", entry, "seconds")


def of_conv3d(result: Mapping) -> Iterator[tuple[Label, Ratio]]:
    """Convolutions over PyTorch's."""
    for entry in result["conv3d"]:
        times = dict(entry["microseconds"])
        ours = times.pop("ours")
        for mode, other in times.items():
            spread = combined(ours["spread"], other["spread"])
            yield (entry["title"], mode), Ratio(other["median"] / ours["median"], spread)


def of_videos(result: Mapping) -> Iterator[tuple[Label, Ratio]]:
    """Shares of generated videos that show their captions, and PSNR in dB over 100."""
    for mode, entry in result["videos"].items():
        for name, share in entry["right"].items():
            yield (f"{name} of videos, {mode}", "all"), Ratio(share)
        if entry["psnr_db"] is not None:
            ratio = Ratio(entry["psnr_db"]["median"] / 100)
            yield (f"PSNR of videos, {mode}", "100 dB"), ratio


def of_runs(speedups: Sequence[float]) -> Ratio:
    median = statistics.median(speedups)
    return Ratio(median, (max(speedups) - min(speedups)) / median)


def of_in_part(result: Mapping) -> Iterator[tuple[Label, Ratio]]:
    for entry in result["in_part"]:
        for mode, runs in entry["speedups"].items():
            yield (f"{entry['model']}, in part, {mode}", "compiled"), of_runs(runs)


def of_block_masks(result: Mapping) -> Iterator[tuple[Label, Ratio]]:
    for entry in result["block_masks"]:
        for ours, of_peers in entry["speedups"].items():
            for peer, runs in of_peers.items():
                yield (f"{entry['model']}, {ours}", peer), of_runs(runs)


def of_attention_blocks(result: Mapping) -> Iterator[tuple[Label, Ratio]]:
    for entry in result["attention_blocks"]:
        name = f"attention, {entry['mask']} {'x'.join(map(str, entry['shape']))}"
        times = entry["microseconds"]
        for peer in (name for name in times if name != "ours"):
            spread = combined(times[peer]["spread"], times["ours"]["spread"])
            yield (name, peer), Ratio(times[peer]["median"] / times["ours"]["median"], spread)


def of_every_model(result: Mapping) -> Iterator[tuple[Label, Ratio]]:
    for entry in result["every_model"]:
        for kind in ("wall", "gpu"):
            if entry[f"{kind}_speedup"] is not None:
                name = " ".join(entry[key] for key in ("group", "model", "forward"))
                yield (f"{name}, {kind} time", "eager"), Ratio(entry[f"{kind}_speedup"])


def of_loops(result: Mapping) -> Iterator[tuple[Label, Ratio]]:
    """Times of this package's operations and of the others' on the same inputs."""
    ours: dict[tuple[str, ...], float] = {}
    for entry in result["loops"]:
        key = entry["model"], entry["operation"], entry["shape"]
        if entry["by"] == "this package":
            ours[key] = entry["microseconds"]
        elif key in ours:
            yield (" ".join(key), entry["by"]), Ratio(entry["microseconds"] / ours[key])


def of_calls(result: Mapping) -> Iterator[tuple[Label, Ratio]]:
    times = {call["operation"]: call["microseconds"] for call in result["calls"]}
    yardstick = result["yardstick"]
    for call in result["calls"]:
        if call["operation"] != yardstick:
            spread = combined(call["microseconds"]["spread"], times[yardstick]["spread"])
            label = (call["operation"], yardstick)
            yield label, Ratio(call["over_yardstick"], spread, is_higher_better=False)


def of_forwards(result: Mapping) -> Iterator[tuple[Label, Ratio]]:
    def group(entry: Mapping) -> tuple[str, ...]:
        condition = (entry.get("condition", "as published"), entry.get("weights", "random"))
        return entry["model"], *condition, entry["context"]

    eager = {group(e): e["ms"]["spread"] for e in result["forwards"] if e["mode"] == "eager"}
    for entry in result["forwards"]:
        if "over_eager" in entry and entry["mode"] != "eager":
            spread = combined(entry["ms"]["spread"], eager[group(entry)])
            label = (", ".join((*group(entry), entry["mode"])), "eager")
            yield label, Ratio(entry["over_eager"], spread, is_higher_better=False)


def of_errors(result: Mapping) -> Iterator[tuple[Label, Ratio]]:
    for entry in result["operations"]:
        name = f"{entry['operation']} [{entry['output']}], {entry['dtype']}"
        yield (name, "eager's error"), Ratio(entry["ratio"], is_higher_better=False)
    for entry in result["models"]:
        name = f"model {entry['size']}, {entry['dtype']}"
        yield (name, "eager's error"), Ratio(entry["ratio"], is_higher_better=False)


def of_measures(result: Mapping) -> Iterator[tuple[Label, Ratio]]:
    for measure in result["measures"]:
        if measure["ratio"] is not None:
            name = f"{measure['program']}: {measure['name']}"
            yield (name, "its limit"), Ratio(measure["ratio"])


def of_counters(result: Mapping) -> Iterator[tuple[Label, Ratio]]:
    for kernel in result["kernels"]:
        function = re.findall(r"\w+(?=[<(])", kernel["kernel"])[0]
        name = f"{kernel['workload']}, {function}"
        for counter in ("dram", "occupancy"):
            yield (name, f"{counter}'s peak"), Ratio(kernel[f"{counter}_percent"] / 100)
        yield (name, "registers"), Ratio(kernel["registers"], is_higher_better=False)


def of_training(result: Mapping) -> Iterator[tuple[Label, Ratio]]:
    blocks = result["blocks"]
    for name, ratio in blocks["ratios"].items():
        yield (blocks["model"], name), Ratio(ratio, is_higher_better="eager over" in name)
    for entry in result["gradients"]:
        what = "gradients' error over eager's"
        yield (entry["model"], what), Ratio(entry["error_over_eager"], is_higher_better=False)


def of_timeline(result: Mapping) -> Iterator[tuple[Label, Ratio]]:
    """Of one block's kernels: from the first one's start to the last one's end."""
    ends = {mode: max(k["end_us"] for k in kernels) for mode, kernels in result["modes"].items()}
    for mode, end in ends.items():
        if mode != "eager":
            label = (f"a block of {result['model']} {result['size']}, {mode}", "eager")
            yield label, Ratio(ends["eager"] / end)


def of_heads(result: Mapping) -> Iterator[tuple[Label, Ratio]]:
    """How peaked a trained model's scores are: none is better, but a change means other inputs."""
    for entry in result["attention_heads"]:
        place = f"{entry['attention']}-attention, step {entry['step']}, layer {entry['layer']}"
        for name in ("std", "above_mean", "largest_share"):
            yield (f"{place}, head {entry['head']}", name), Ratio(entry[name])


def of_fp8(result: Mapping) -> Iterator[tuple[Label, Ratio]]:
    for entry in result["fp8"]["products"]:
        name = f"linear_fp8 {'x'.join(map(str, entry['size']))}"
        for kind in ("microseconds", "sustained_microseconds"):
            yield from over_each(f"{name}{', sustained' * (kind != 'microseconds')}", entry[kind])
    for entry in result["fp8"]["rows"]:
        name = f"{entry['operation']} {'x'.join(map(str, entry['shape']))}"
        yield from over_each(name, entry["microseconds"])


def of_fp8_layers(result: Mapping) -> Iterator[tuple[Label, Ratio]]:
    for entry in result["fp8_layers"]:
        for row in entry["kinds"]:
            name = f"{entry['model']} {entry['size']}, {entry['weights']}, FP8: {row['kind']}"
            ratio = Ratio(row["distance_from_float32"], is_higher_better=False)
            yield (name, "the float32 model"), ratio


def of_parallel(result: Mapping) -> Iterator[tuple[Label, Ratio]]:
    """Each mode over the eager one of as many GPUs, and over the fastest one of one GPU."""
    for entry in result["parallel"]:
        modes = {mode: measured for mode, measured in entry["modes"].items() if "ms" in measured}
        details = (entry.get("part"), entry["model"], entry["size"], entry.get("precision"))
        for mode, measured in modes.items():
            gpus = history.degree_of(measured)
            eager = "eager" if gpus == 1 else f"eager+ulysses{gpus}"
            one_gpu = measured.get("one_gpu", "injected")
            others = (eager, eager, "over_eager"), ("one GPU", one_gpu, "speedup")
            for label, other, key in others:
                if key in measured and other != mode:
                    spreads = [modes[m]["ms"]["spread"] for m in (mode, other)]
                    name = f"{' '.join(filter(None, details))}, {mode}"
                    yield (name, label), Ratio(measured[key], combined(*spreads))


def of_attention_lse(result: Mapping) -> Iterator[tuple[Label, Ratio]]:
    for entry in result["attention_lse"]:
        spreads = [times["spread"] for times in entry["microseconds"].values()]
        name = "x".join(map(str, entry["shape"]))
        yield (
            (f"attention {name}, return_lse", "without"),
            Ratio(entry["without_over_with"], combined(*spreads)),
        )


def of_int8_attention(result: Mapping) -> Iterator[tuple[Label, Ratio]]:
    for entry in result["attention_int8"]:
        name = "x".join(map(str, entry["shape"]))
        for measure, speedups in entry["speedups"].items():
            times = entry["microseconds"][measure]
            for other, speedup in speedups.items():
                label = f"attention_int8 {name}, {entry['inputs']}, {measure}", other
                spread = combined(times["int8"]["spread"], times[other]["spread"])
                yield label, Ratio(speedup, spread)


def of_8bit_attention(result: Mapping) -> Iterator[tuple[Label, Ratio]]:
    for inputs, errors in result["attention_8bit"].items():
        for step in set(errors) - {"bfloat16"}:
            ratio = Ratio(errors[step], is_higher_better=False)
            yield (f"attention, {inputs}, 8 bits: {step}", "bfloat16"), ratio


def over_each(name: str, measured: Mapping) -> Iterator[tuple[Label, Ratio]]:
    """Ours over each other mode."""
    ours = measured["ours"]
    for mode, other in measured.items():
        if mode != "ours":
            spread = combined(ours["spread"], other["spread"])
            yield (name, mode), Ratio(other["median"] / ours["median"], spread)


def of_adapters(result: Mapping) -> Iterator[tuple[Label, Ratio]]:
    """Steps with adapters, over those of the model that never had one."""
    for entry in result["models"]:
        for variant, states in entry["variants"].items():
            for name, state in states.items():
                if name == "never loaded" or "step_ms" not in state:
                    continue
                base = state.get("never_loaded_ms", states["never loaded"]["step_ms"])
                spread = combined(base["spread"], state["step_ms"]["spread"])
                over = base["median"] / state["step_ms"]["median"]
                yield (f"{entry['name']}, {variant}, {name}", "never loaded"), Ratio(over, spread)


def of_lora(result: Mapping) -> Iterator[tuple[Label, Ratio]]:
    """Layers with adapters, over the layers alone."""
    for entry in result["lora"]:
        times = entry["sustained_microseconds"]
        for mode, alone in (("ours", "none"), ("fp8 ours", "fp8 none")):
            spread = combined(times[mode]["spread"], times[alone]["spread"])
            over = times[alone]["median"] / times[mode]["median"]
            yield (f"{entry['group']}, rank {entry['rank']}, {mode}", alone), Ratio(over, spread)


# By what holds the figures in a result: how they are read.
READERS: dict[str, Callable[[Mapping], Iterator[tuple[Label, Ratio]]]] = {
    "workloads": of_workloads,
    "sizes": of_sizes,
    "pipelines": of_pipelines,
    "decoders": of_decoders,
    "conv3d": of_conv3d,
    "loops": of_loops,
    "videos": of_videos,
    "in_part": of_in_part,
    "block_masks": of_block_masks,
    "attention_blocks": of_attention_blocks,
    "every_model": of_every_model,
    "calls": of_calls,
    "forwards": of_forwards,
    "graph_forwards": of_graph_forwards,
    "explained": of_memory,
    "operations": of_errors,
    "measures": of_measures,
    "kernels": of_counters,
    "blocks": of_training,
    "modes": of_timeline,
    "attention_heads": of_heads,
    "fp8": of_fp8,
    "lora": of_lora,
    "models": of_adapters,
    "fp8_layers": of_fp8_layers,
    "attention_8bit": of_8bit_attention,
    "parallel": of_parallel,
    "attention_lse": of_attention_lse,
    "attention_int8": of_int8_attention,
}


def kind(result: Mapping) -> str:
    """The key of READERS for a result; ValueError if there is none."""
    found = [key for key in READERS if key in result]
    if not found or "environment" not in result:
        raise ValueError("it is not a benchmark result with ratios")
    return found[0]


def read(result: Mapping) -> Rows:
    return dict(READERS[kind(result)](result))


@dataclass(frozen=True)
class Build:
    """Results of one build on one card, ordered by time."""

    name: str
    results: Sequence[Mapping]

    def rows(self) -> dict[Label, tuple[Ratio, float]]:
        """Each figure's median over the runs, and the runs' range relative to it."""
        runs = [read(result) for result in self.results]
        rows = {}
        for label in dict.fromkeys(label for run in runs for label in run):
            ratios = [run[label] for run in runs if label in run]
            values = [ratio.value for ratio in ratios]
            value = statistics.median(values)
            apart = (max(values) - min(values)) / abs(value) if value else 0.0
            spread = statistics.median(ratio.spread for ratio in ratios)
            rows[label] = Ratio(value, spread, ratios[0].is_higher_better), apart
        return rows


def builds(results: Sequence[Mapping]) -> list[Build]:
    """The results grouped by commit and card, oldest first; one group per result if there is only one."""
    in_time = sorted(results, key=lambda result: result["environment"]["date"])
    groups: dict[str, list[Mapping]] = {}
    for result in in_time:
        environment = result["environment"]
        name = f"{history.commit(environment) or 'no commit'} on {history.card(environment)}"
        groups.setdefault(name, []).append(result)
    if len(groups) > 1:
        return [Build(name, group) for name, group in groups.items()]
    (name,) = groups
    return [Build(f"{name}, run {i}", [result]) for i, result in enumerate(in_time, 1)]


@dataclass(frozen=True)
class Change:
    """A changed figure: the change, and the noise."""

    label: Label
    values: Sequence[float | None]  # one per build, None if not measured
    noise: float | None = None
    is_better: bool | None = None

    @property
    def relative(self) -> float | None:
        first, *_, last = self.values
        return None if first is None or last is None else last / first - 1


def changes(compared: Sequence[Build], limit: float) -> list[Change]:
    """The newest build's changes beyond the noise, and figures that only one of the builds has."""
    of_builds = [build.rows() for build in compared]
    first, last = of_builds[0], of_builds[-1]
    found = []
    for label in dict.fromkeys(label for rows in of_builds for label in rows):
        values = [rows[label][0].value if label in rows else None for rows in of_builds]
        if label not in first or label not in last:
            found.append(Change(label, values))
            continue
        (before, _), (after, _) = first[label], last[label]
        apart = max(rows[label][1] for rows in of_builds if label in rows)
        noise = max(combined(before.spread, after.spread), apart, limit)
        if before.value == after.value:
            continue
        relative = abs(after.value / before.value - 1) if before.value else math.inf
        if relative > noise:
            is_better = (after.value > before.value) == after.is_higher_better
            found.append(Change(label, values, noise, is_better))
    return found


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:+.1%}"


def table(compared: Sequence[Build], found: Sequence[Change]) -> str:
    """The changes, largest first, then figures that only one of the builds has."""
    ordered = sorted(found, key=lambda change: -abs(change.relative or 0.0))
    verdicts = {True: "better", False: "worse", None: "not in both"}
    rows = [
        [
            *change.label,
            *("" if value is None else f"{value:.3f}" for value in change.values),
            percent(change.relative),
            "" if change.noise is None else f"{change.noise:.1%}",
            verdicts[change.is_better],
        ]
        for change in ordered
    ]
    headers = ["", "against", *(build.name for build in compared), "change", "noise", ""]
    return tabulate(rows, headers, disable_numparse=True)


def load(path: Path, name: str | None) -> list[dict]:
    """The results of a file, of several benchmarks only those with this name."""
    try:
        stored = history.load(path)
        results = [one for one in stored if one.get("name") == name or len(stored) == 1]
        for result in results:
            kind(result)
    except ValueError as error:  # which includes JSON errors
        raise click.UsageError(f"{path}: {error}") from None
    return results


def unique(results: Sequence[dict]) -> list[dict]:
    """Without copies, and only those on the card of the newest one."""
    newest = max(results, key=history.date)
    of_card = [r for r in results if r["environment"]["device"] == newest["environment"]["device"]]
    return [r for index, r in enumerate(of_card) if r not in of_card[:index]]


@click.command(help=__doc__.split("\n\n")[0])
@click.option(
    "--limit",
    type=click.FloatRange(min=0),
    default=0.02,
    show_default=True,
    help="Minimum change to report.",
)
@click.option("--fail", is_flag=True, help="Exit with 1 if anything changed.")
@click.option("--name", help="Of a file with several benchmarks: which one.")
@click.argument(
    "paths",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="RESULTS...",
)
def main(paths: Sequence[Path], limit: float, fail: bool, name: str | None) -> None:
    results = [result for path in paths for result in load(path, name)]
    results = unique(results) if results else []
    if len(results) < 2:
        raise click.UsageError(f"at least two results of a card are needed, got {len(results)}")
    what = {(kind(result), result.get("model"), result.get("dtype")) for result in results}
    if len(what) > 1:
        raise click.UsageError("the results are of different benchmarks, models or dtypes")
    compared = builds(results)
    for build in compared:
        dates = ", ".join(result["environment"]["date"] for result in build.results)
        click.echo(f"{build.name}: {dates}")
    if not set(compared[0].rows()) & set(compared[-1].rows()):
        raise click.UsageError("the results have no common figure")
    found = changes(compared, limit)
    count = len(set(compared[0].rows()) | set(compared[-1].rows()))
    click.echo(f"{len(found)} of {count} figures changed beyond the noise")
    if found:
        click.echo(table(compared, found))
    if fail and found:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
