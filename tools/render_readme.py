#!/usr/bin/env python3
"""Write the tables of README.md, and the plots, from the JSON in benchmarks/results.

A table stands between two lines, and is replaced as a whole:

    <!-- table: models -->
    <!-- end table -->

A plot is written to benchmarks/plots where the results that it draws are there.

    python tools/render_readme.py            # write
    python tools/render_readme.py --check    # exit with 1 if one is not what the JSON says
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import click
from tabulate import tabulate

import render_plots

CHECKOUT = Path(__file__).resolve().parents[1]
RESULTS = CHECKOUT / "benchmarks" / "results"
PLOTS = CHECKOUT / "benchmarks" / "plots"
README = CHECKOUT / "README.md"
sys.path.insert(0, str(CHECKOUT / "benchmarks"))
import targets as targets_  # noqa: E402

BLOCK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end table -->)", re.DOTALL)
MODE_NAMES = {
    "eager": "eager",
    "compiled": "torch.compile",
    "injected": "injected",
    "injected-no-attention": "injected with attention=False",
    "injected+compiled": "injected and torch.compile",
}

PEERS = ("eager", "compiled", "liger", "quack")
ATTENTION_PEERS = {"cudnn": "cuDNN", "flash": "Torch flash", "fa3": "FA3"}
SLOW_INPUTS = ("rising", "jump", "large range")  # of attention
TUNED_MODE = "max-autotune-no-cudagraphs"

# What writes a result, where it is not benchmarks/bench_<name>.py.
SCRIPTS = {
    "ceilings": "ceilings/run.py",
    "flux": "bench_models.py --model flux",
    "profile": "profile_kernels.py",
}

# What may set apart two measures of one ceiling: the size, and how it is read or launched.
CEILING_SIZE = re.compile(r", (\d+) ([KMG])iB$")
CEILING_MANNER = re.compile(r" \d+ B x \d+| of \w+ blocks?( a multiprocessor)?")
TIME_UNITS = ("us", "ns")

# Renders one table from the results folder.
TABLES: dict[str, Callable[[Path], str]] = {}


def table(function: Callable[[Path], str]) -> Callable[[Path], str]:
    TABLES[function.__name__] = function
    return function


def script(name: str) -> str:
    """What writes the results of that name."""
    return SCRIPTS.get(name, f"bench_{name}.py")


def load(results: Path, name: str) -> dict:
    path = results / f"{name}.json"
    if not path.exists():
        raise click.ClickException(f"{path} is missing: benchmarks/{script(name)} writes it.")
    return json.loads(path.read_text(encoding="utf-8"))


def markdown(rows: list[list[str]], headers: list[str]) -> str:
    align = ["left"] + ["right"] * (len(headers) - 1)
    return tabulate(rows, headers, tablefmt="github", colalign=align, disable_numparse=True)


def setup(*results: dict) -> str:
    """Where, with what and by which commands the figures of a table were measured."""
    runs: dict[str, list[str]] = {}
    for environment in (result["environment"] for result in results):
        parts = [environment["device"]]
        parts += [f"{name} {environment[name]}" for name in ("torch", "diffusers", "kernels")]
        run = f"{environment['date']}: `{environment['command']}`"
        runs.setdefault(", ".join(parts), []).append(run)
    return "\n\n" + "; ".join(f"{where}, {', '.join(run)}" for where, run in runs.items())


def footnote(rows: list[list[str]], text: str) -> str:
    """What the star means, if a cell ends with one."""
    is_marked = any(cell.endswith("*") for row in rows for cell in row)
    return f"\n\n\\* {text}" if is_marked else ""


def times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}×"


def video_name(key: str) -> str:
    """161x512x768 or 161x512x768:50 in words."""
    size, _, steps = key.partition(":")
    frames, height, width = size.split("x")
    return f"{frames} frames {height}×{width}" + (f", {steps} steps" if steps else "")


def image_name(key: str) -> str:
    return key.replace("x", "×")


def forwards(result: dict, label: Callable[[str, dict], str]) -> str:
    """One forward in each mode and with all weights, its size called what `label` makes of it."""
    rows = [
        [
            label(size, entry),
            weights,
            MODE_NAMES[mode],
            f"{measured['ms']['median']:.1f} ms",
            times(of_weights["speedups"][mode].get("eager")),
            times(of_weights["speedups"][mode].get("compiled")),
        ]
        for size, entry in result["sizes"].items()
        for weights, of_weights in entry["weights"].items()
        for mode, measured in of_weights["modes"].items()
    ]
    headers = ["input", "weights", "mode", "forward", "against eager", "against torch.compile"]
    return markdown(rows, headers) + setup(result)


@table
def models(results: Path) -> str:
    """One forward of LTX-Video's transformer in each mode."""

    def label(size: str, entry: dict) -> str:
        return f"{video_name(size)}, {entry['batch']}×{entry['tokens']} tokens"

    return forwards(load(results, "models"), label)


@table
def flux(results: Path) -> str:
    """One forward of FLUX.1's transformer in each mode."""
    if not (results / "flux.json").exists():
        return unmeasured("flux")

    def label(size: str, entry: dict) -> str:
        return f"{image_name(size)}, {entry['tokens']} + {entry['text_tokens']} tokens"

    return forwards(load(results, "flux"), label)


@table
def breakdown(results: Path) -> str:
    """The forward's GPU time by kernel class."""
    result = load(results, "models")
    rows = []
    for size, entry in result["sizes"].items():
        for weights, of_weights in entry["weights"].items():
            for mode, measured in of_weights["modes"].items():
                kernels = measured["kernels"]
                rows.append(
                    [video_name(size), weights, MODE_NAMES[mode]]
                    + [
                        f"{kernels['classes'][key]['ms']:.1f} ms"
                        for key in ("gemm", "attention", "other")
                    ]
                    + [f"{kernels['idle_ms']:.1f} ms", f"{kernels['total']['launches']:.0f}"]
                )
    classes = ["matrix products", "attention", "everything else", "between kernels"]
    headers = ["input", "weights", "mode", *classes, "launches"]
    return markdown(rows, headers) + setup(result)


@table
def injection(results: Path) -> str:
    """What injecting the kernels takes."""
    result = load(results, "models")
    rows = [
        [
            video_name(size),
            f"{took['change_s'] * 1e3:.0f} ms",
            f"{took['full_speed_s']:.2f} s",
            f"{took['allocated_growth_bytes'] / took['weights_bytes']:.2%}",
        ]
        for size, took in ((size, entry["injection"]) for size, entry in result["sizes"].items())
    ]
    headers = ["input", "inject_kernels", "full speed after", "memory growth"]
    return markdown(rows, headers) + setup(result)


@table
def pipeline(results: Path) -> str:
    """The whole pipeline but the text encoder."""
    result = load(results, "pipeline")
    rows = [
        [
            video_name(video),
            MODE_NAMES[mode],
            f"{measured['seconds']['median']:.2f} s",
            times(entry["speedups"][mode].get("eager")),
        ]
        for video, entry in result["videos"].items()
        for mode, measured in entry["modes"].items()
    ]
    return markdown(rows, ["video", "mode", "time", "against eager"]) + setup(result)


def over_peer(entry: dict, measured: dict, peer: str) -> str:
    """Times as fast as a peer, or that the peer failed; nothing where it has no such operation."""
    if peer in measured["over"]:
        is_tuned = peer == "compiled" and measured["compiled_mode"] == TUNED_MODE
        return times(measured["over"][peer]) + "*" * is_tuned
    return "failed" if any(name.split()[0] == peer for name in entry["failed"]) else ""


def operations(results: Path, family: str) -> str:
    """Each operation's time and rate, beside the large copy's rate and the peers' times."""
    result = load(results, family)
    rows = []
    for entry in result["workloads"]:
        for cache in ("cold", "warm"):
            if cache not in entry:
                continue
            measured = entry[cache]
            rows.append(
                [
                    ", ".join(filter(None, [entry["operation"], entry["variant"]])),
                    "×".join(map(str, entry["shape"])) + (" (warm)" if cache == "warm" else ""),
                    f"{measured['microseconds']['ours']['median']:.1f} µs",
                    f"{measured['terabytes_per_second']['ours']:.2f} TB/s",
                    f"{measured['of_large_copy']:.0%}",
                    *(over_peer(entry, measured, name) for name in PEERS),
                ]
            )
    headers = ["operation", "shape", "time", "rate", "of a large copy's", "against eager"]
    headers += ["torch.compile", "Liger", "QuACK"]
    note = footnote(rows, f"in mode {TUNED_MODE}, the faster one here.")
    versions = "; ".join(f"{name} {what}" for name, what in result["peers"].items())
    return markdown(rows, headers) + note + setup(result) + f". {versions}"


for name in targets_.FAMILIES:
    TABLES[name] = functools.partial(operations, family=name)


def unmeasured(name: str) -> str:
    return f"Not measured yet: `python benchmarks/{script(name)}` does."


def attention_cell(entry: dict, kind: str, peer: str, value: float | None, digits: int) -> str:
    """A ratio, or why there is none."""
    if value is not None:
        return f"{value:.{digits}f}" + "×" * (digits == 2)
    if peer in entry["inputs"][kind]["failed"]:
        return "failed"
    return "takes no mask" if peer in entry["declined"] else "not there"


def attention_label(entry: dict) -> str:
    size = "×".join(map(str, entry["shape"]))
    return ", ".join(filter(None, [size, entry["variant"]]))


def worst_inputs(entry: dict, ratios: Callable[[dict], dict], choose: Callable) -> str | None:
    """The kind of typical inputs with the worst ratio over FA3, or where it is not there over cuDNN.

    None where fewer than two were compared.
    """
    typical = {kind: ratios(of_kind) for kind, of_kind in entry["inputs"].items()}
    for kind in targets_.EXTREMES:
        typical.pop(kind, None)
    for peer in ("fa3", "cudnn"):
        known = {kind: over[peer] for kind, over in typical.items() if peer in over}
        if len(known) > 1:
            return choose(known, key=known.get)
    return None


def shown_inputs(entry: dict, worst: str | None, extremes: tuple[str, ...]) -> dict[str, str]:
    """Kinds of inputs that a table shows of a shape, and how each is called there."""
    shown = dict.fromkeys([targets_.NORMAL, *filter(None, [worst]), *extremes])
    return {
        kind: f"{kind}, the worst" if kind == worst else kind
        for kind in shown
        if kind in entry["inputs"]
    }


@table
def attention(results: Path) -> str:
    """Attention's rate beside its peers' times, the ceilings, and a copy of its bytes."""
    if not (results / "attention.json").exists():
        return unmeasured("attention")
    result = load(results, "attention")
    rows = []
    for entry in result["workloads"]:
        worst = worst_inputs(entry, lambda of_kind: of_kind["cold"]["over"], min)
        for kind, title in shown_inputs(entry, worst, SLOW_INPUTS).items():
            measured = entry["inputs"][kind]["cold"]
            ours, copy = (measured["microseconds"][name]["median"] for name in ("ours", "copy"))
            rows.append(
                [
                    attention_label(entry),
                    title,
                    f"{ours:.1f} µs",
                    f"{measured['teraflops_per_second']['ours']:.0f} TFLOP/s",
                    *(
                        attention_cell(entry, kind, peer, measured["over"].get(peer), 2)
                        for peer in ATTENTION_PEERS
                    ),
                    *(
                        f"{measured['of_bounds'][bound]:.0%} of {allowed:.0f}"
                        if (allowed := measured["bounds_teraflops_per_second"].get(bound))
                        else ""
                        for bound in ("wgmma", "exp2")
                    ),
                    f"{measured['terabytes_per_second']['ours']:.2f} TB/s",
                    f"{copy:.1f} µs",
                ]
            )
    headers = ["(B, Sq, Sk, H, d)", "inputs", "time", "rate"]
    headers += [f"against {name}" for name in ATTENTION_PEERS.values()]
    headers += ["of wgmma's ceiling", "of exp2's", "bytes moved", "a copy of them"]
    versions = "; ".join(
        f"{ATTENTION_PEERS[name]} {what}" for name, what in result["peers"].items()
    )
    ceilings = result["ceilings"]
    if "left_out" in ceilings:
        note = f"no ceilings: {ceilings['left_out']}"
    else:
        note = f"ceilings of {ceilings['date']}: `{ceilings['command']}`"
    return markdown(rows, headers) + setup(result) + f". {versions}; {note}"


@table
def attention_inputs(results: Path) -> str:
    """Attention's time beside FA3's and cuDNN's on each kind of inputs, and how far its rate varies."""
    if not (results / "attention.json").exists():
        return unmeasured("attention")
    result = load(results, "attention")
    entries = result["workloads"]
    kinds = dict.fromkeys(kind for entry in entries for kind in entry["inputs"])

    def cell(entry: dict, kind: str) -> str:
        if kind not in entry["inputs"]:
            return ""
        over = entry["inputs"][kind]["cold"]["over"]
        return " / ".join(
            attention_cell(entry, kind, peer, over.get(peer), 2) for peer in ("fa3", "cudnn")
        )

    rows = [[kind, *(cell(entry, kind) for entry in entries)] for kind in kinds]
    spans = (entry["slowest_over_fastest"] for entry in entries)
    rows.append(["slowest over fastest", *("" if s is None else f"{s:.2f}" for s in spans)])
    headers = ["against FA3 / cuDNN", *(attention_label(entry) for entry in entries)]
    return markdown(rows, headers) + setup(result)


@table
def attention_accuracy(results: Path) -> str:
    """Attention's error, and over the peers'."""
    if not (results / "attention.json").exists():
        return unmeasured("attention")
    result = load(results, "attention")
    rows = []
    for entry in result["workloads"]:
        worst = worst_inputs(entry, lambda of_kind: of_kind["error_over"], max)
        for kind, title in shown_inputs(entry, worst, targets_.EXTREMES).items():
            measured = entry["inputs"][kind]
            rows.append(
                [
                    attention_label(entry),
                    title,
                    f"{measured['errors']['ours']:.2e}",
                    *(
                        attention_cell(entry, kind, peer, measured["error_over"].get(peer), 3)
                        for peer in ATTENTION_PEERS
                    ),
                ]
            )
    headers = ["(B, Sq, Sk, H, d)", "inputs", "error"]
    headers += [f"over {name}'s" for name in ATTENTION_PEERS.values()]
    return markdown(rows, headers) + setup(result)


@table
def host(results: Path) -> str:
    """The host's time for a call."""
    result = load(results, "host")
    rows = [
        [
            call["operation"].replace("torch ", "torch.nn.functional."),
            f"{call['microseconds']['median']:.1f} µs",
            times(call["over_yardstick"]),
        ]
        for call in result["calls"]
    ]
    headers = ["call", "host time", "of torch.nn.functional.rms_norm's"]
    return markdown(rows, headers) + setup(result) + f", on {result['processor']}"


@table
def host_forward(results: Path) -> str:
    """The host's time for a whole forward."""
    if not (results / "host_forward.json").exists():
        return unmeasured("host_forward")
    result = load(results, "host_forward")
    rows = []
    for entry in result["forwards"]:
        kernels = entry.get("kernels")
        rows.append(
            [
                f"{entry['model']}: {entry['batch']}×({entry['tokens']} + {entry['text_tokens']}) tokens",
                f"torch.{entry['context']}",
                MODE_NAMES[entry["mode"]],
                f"{entry['ms']['median']:.2f} ms",
                times(entry.get("over_eager")),
                f"{kernels['ms']:.2f} ms" if kernels else "",
                f"{kernels['launches']:.0f}" if kernels else "",
            ]
        )
    headers = ["model", "under", "mode", "host time", "of eager's", "GPU's time", "launches"]
    return markdown(rows, headers) + setup(result) + f", on {result['processor']}"


@table
def targets(results: Path) -> str:
    """What the operations should reach, and whether they do."""
    later = [n for n in targets_.MEASURED_LATER if (results / f"{n}.json").exists()]
    loaded = {name: load(results, name) for name in (*targets_.FAMILIES, "host", *later)}
    rows = [
        [
            target.what,
            target.of,
            f"at {'most' if target.is_upper_bound else 'least'} {target.aim:.2f}{target.unit}",
            "" if target.measured is None else f"{target.measured:.2f}{target.unit}",
            target.verdict,
        ]
        for target in targets_.evaluate(loaded)
    ]
    return markdown(rows, ["what", "of", "aim", "measured", ""]) + setup(*loaded.values())


def ceiling_group(measure: dict) -> tuple[str, str]:
    """What the measures of one ceiling have in common."""
    name = CEILING_SIZE.sub("", measure["name"])
    return measure["program"], CEILING_MANNER.sub("", name)


def ceiling_rank(measure: dict) -> tuple[int, float]:
    """Higher for a larger size, then for a higher rate or a shorter time."""
    size = CEILING_SIZE.search(measure["name"])
    kibibytes = int(size[1]) << 10 * "KMG".index(size[2]) if size else 0
    sign = -1 if measure["unit"] in TIME_UNITS else 1
    return kibibytes, sign * measure["measured"]


def quantity(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    digits = 2 if value < 100 else 0
    return f"{value:.{digits}f} {unit.replace('us', 'µs')}"


@table
def ceilings(results: Path) -> str:
    """The GPU's own limits: of a ceiling's measures the largest size, and of those the best.

    Figures a clock are the same measures in another unit, and stay in the JSON.
    """
    result = load(results, "ceilings")
    shown: dict[tuple[str, str], dict] = {}
    for measure in result["measures"]:
        if "clock" not in measure["unit"]:
            group = ceiling_group(measure)
            shown[group] = max(shown.get(group, measure), measure, key=ceiling_rank)
    rows = []
    for measure in shown.values():
        unit, ratio = measure["unit"], measure["ratio"]
        mark = "*" if ratio is not None and ratio > targets_.HIGHEST_CEILING_RATIO else ""
        rows.append(
            [
                measure["program"].replace("_", " "),
                measure["name"],
                quantity(measure["measured"], unit),
                quantity(measure["theoretical"], unit),
                "" if ratio is None else f"{ratio:.0%}{mark}",
            ]
        )
    note = footnote(rows, "above the limit, which cannot be: the program measured something else.")
    headers = ["program", "measure", "measured", "theoretical", "ratio"]
    return markdown(rows, headers) + note + setup(result)


def kernel_labels(kernels: list[dict]) -> list[str]:
    """Each kernel's workload; where that has several kernels, the function too."""
    launches = Counter(kernel["workload"] for kernel in kernels)
    labels = []
    for kernel in kernels:
        label = re.sub(r"(?<=\d)x(?=\d)", "×", kernel["workload"])
        if launches[kernel["workload"]] > 1:
            label += ", " + re.findall(r"\w+(?=[<(])", kernel["kernel"])[0]
        labels.append(label)
    return labels


@table
def profile(results: Path) -> str:
    """Counters of each kernel, and which aims it misses."""
    result = load(results, "profile")
    rows = [
        [
            label,
            *(f"{kernel[f'{name}_percent']:.1f}%" for name in ("dram", "occupancy", "l2_hit")),
            str(kernel["registers"]),
            f"{kernel['local_bytes']} B",
            f"{kernel['largest_stall']} {kernel['stalls'][kernel['largest_stall']]:.1f}",
            "; ".join(kernel["misses"]).replace("<=", "≤") or "none",
        ]
        for label, kernel in zip(kernel_labels(result["kernels"]), result["kernels"], strict=True)
    ]
    headers = ["kernel of", "DRAM throughput", "occupancy", "L2 hits", "registers"]
    headers += ["spills", "largest stall", "missed aims"]
    aims = result["targets"]
    note = (
        f"\n\nAims: DRAM throughput above {aims['dram_percent']:.0f}% of its peak, achieved "
        f"occupancy above {aims['occupancy_percent']:.0f}%, no spills; of attention the last alone."
    )
    return markdown(rows, headers) + note + setup(result)


@table
def accuracy_operations(results: Path) -> str:
    """Each operation's error over eager's; of several outputs the worst."""
    result = load(results, "accuracy")
    dtypes = list(dict.fromkeys(entry["dtype"] for entry in result["operations"]))
    worst: dict[str, dict[str, float]] = {}
    for entry in result["operations"]:
        row = worst.setdefault(entry["operation"], {})
        row[entry["dtype"]] = max(entry["ratio"], row.get(entry["dtype"], 0.0))
    rows = [
        [name, *(f"{row[dtype]:.3f}" if dtype in row else "" for dtype in dtypes)]
        for name, row in worst.items()
    ]
    return markdown(rows, ["error over eager's", *dtypes]) + setup(result)


@table
def accuracy_models(results: Path) -> str:
    """The injected and the eager model's distance from the float32 model."""
    result = load(results, "accuracy")
    rows = [
        [
            f"{video_name(entry['size'])}, {entry['dtype']}",
            f"{entry['kernel']:.5f}",
            f"{entry['eager']:.5f}",
            f"{entry['ratio']:.3f}",
        ]
        for entry in result["models"]
    ]
    return markdown(rows, ["distance from float32", "injected", "eager", "ratio"]) + setup(result)


def render(text: str, results: Path = RESULTS) -> str:
    """The text with every table replaced by what the results say."""

    def replace(match: re.Match) -> str:
        begin, name, end = match.groups()
        if name not in TABLES:
            known = ", ".join(TABLES)
            raise click.ClickException(f"there is no table {name}: the tables are {known}.")
        return f"{begin}\n{TABLES[name](results)}\n\n{end}"

    return BLOCK.sub(replace, text)


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if one is stale.")
@click.option("--results", type=click.Path(file_okay=False, path_type=Path), default=RESULTS)
@click.option("--plots", type=click.Path(file_okay=False, path_type=Path), default=PLOTS)
@click.argument("files", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(check: bool, results: Path, plots: Path, files: tuple[Path, ...]) -> None:
    """Write the plots, and the tables of FILES (default README.md), from benchmarks/results."""
    wanted = {
        path: render(path.read_text(encoding="utf-8"), results) for path in files or (README,)
    }
    wanted |= {plots / name: svg for name, svg in render_plots.render(results).items()}
    for path, text in wanted.items():
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        if check:
            raise click.ClickException(f"{path} is stale: run tools/render_readme.py.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        click.echo(f"Wrote {path}")


if __name__ == "__main__":
    main()
