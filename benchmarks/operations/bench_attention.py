"""Attention as in LTX-Video, FLUX and Wan, compared with cuDNN, Torch's flash attention and FlashAttention-3.

Times and errors are measured on each kind of inputs in reference/attention_inputs.py. Cross-attention uses
four of the kinds, because its few keys make little difference. Head dims other than 64 and 128 use two. At
each shape, all implementations and kinds of inputs take turns in balanced orders, and each call starts with a
cold L2 cache. Query, key and value are contiguous (B, S, H, d), as three projections return them.

Two ceilings of the same kind of GPU, measured by benchmarks/ceilings/run.py, are shown for comparison: tensor
cores, and special functions with one exponential per score. So is a copy of the bytes of query, key, value
and output.

Errors are relative L2 distances from float64, over the same sample in each run: the whole batch, the first,
middle and last head, and queries spread evenly from the first to the last. A peer that fails or is wrong on
a kind of inputs is left out there.

Writes to benchmarks/results/attention:

    python benchmarks/operations/bench_attention.py
    python benchmarks/operations/bench_attention.py --shapes 2x8064x8064x32x64 --inputs "std 3" --inputs sink
    python benchmarks/operations/bench_attention.py --device cpu --tiny --output /tmp/attention.json
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import click
import torch
from tabulate import tabulate
from torch import Tensor

from benchmarks import models
from benchmarks.harness import clocks, history, peers, record, timing
from benchmarks.harness.comparison import (
    WARM_UP_ROUNDS,
    Case,
    Family,
    Names,
    Workload,
    copy_of,
    explain,
    moved_bytes,
    select,
)
from benchmarks.harness.options import DEVICE

import references
from accuracy import finite_distance
from attention_inputs import DTYPE, EXTREMES, INPUTS, NORMAL

# (batch, queries, keys, heads, head dim)
SHAPES = (
    (2, 2688, 2688, 32, 64),  # LTX-Video, 49 frames 512x768, with guidance
    (2, 8064, 8064, 32, 64),  # LTX-Video, 161 frames
    (2, 8064, 128, 32, 64),  # its cross-attention to the text
    (2, 8064, 256, 32, 64),
    (1, 4608, 4608, 24, 128),  # FLUX, 1024x1024
    (1, 32760, 32760, 12, 128),  # Wan 1.3B, 81 frames 480x832
)
# Head dims of UNets and other models, at one size.
OTHER_HEAD_DIMS = tuple((2, 4096, 4096, 16, head_dim) for head_dim in (72, 80, 96, 112))
TINY_SHAPES = ((2, 24, 24, 2, 64), (2, 24, 16, 2, 64), (1, 20, 20, 1, 128), (1, 20, 20, 2, 72))
TEXT_MASK = "text mask"
WORKLOADS = [
    *(Workload("attention", shape) for shape in SHAPES),
    Workload("attention", SHAPES[2], TEXT_MASK),
    *(Workload("attention", shape) for shape in OTHER_HEAD_DIMS),
]
TINY_WORKLOADS = [
    *(Workload("attention", shape) for shape in TINY_SHAPES),
    Workload("attention", TINY_SHAPES[1], TEXT_MASK),
]
TEXT_TOKENS = (20, 90)  # of 128, in the negative prompt and in the prompt

CROSS_ATTENTION_INPUTS = (NORMAL, "std 3", "large range", "constant")
OTHER_HEAD_DIM_INPUTS = (NORMAL, "std 3")
SAMPLED_QUERIES = 256
TOLERANCE = 0.01  # relative L2 distance from float64: three roundings to bfloat16
# Far below one rounding to bfloat16. Smaller errors count as this one, to avoid division by zero.
ERROR_FLOOR = 2.0**-14

# Measures of benchmarks/ceilings: program and name.
CEILINGS = {
    "wgmma": ("tensor_core", "wgmma bf16, first 2 ms"),  # the highest rate, before the clock drops
    "exp2": ("arithmetic", "exp2 f32"),
}


# --------------------------------------------------------------------------------------------------
# Inputs and results


def text_bias(batch: int, keys: int, device: torch.device) -> Tensor:
    """(B, Sk): the mask of a padded prompt as diffusers adds it to the scores."""
    lengths = [keys * TEXT_TOKENS[entry % 2] // 128 for entry in range(batch)]
    positions = torch.arange(keys, device=device)
    mask = torch.stack([positions < length for length in lengths])
    return (1 - mask.to(DTYPE)) * -10000.0


def make(workload: Workload, kind: str, device: torch.device) -> Case:
    """Arguments with values of a kind in INPUTS, the same in each run."""
    torch.manual_seed(0)
    arguments = INPUTS[kind](workload.shape, device)
    batch, _, keys, *_ = workload.shape
    bias = {"key_bias": text_bias(batch, keys, device)} if workload.variant == TEXT_MASK else {}
    return Case(arguments, bias)


def build(workload: Workload, kernel: ModuleType, device: torch.device) -> Case:
    return make(workload, NORMAL, device)


def kinds_of(workload: Workload, chosen: Sequence[str] = ()) -> list[str]:
    """The chosen kinds of INPUTS that apply to a workload."""
    _, queries, keys, _, head_dim = workload.shape
    kinds: Iterable[str] = INPUTS if queries == keys else CROSS_ATTENTION_INPUTS
    if head_dim not in (64, 128):
        kinds = OTHER_HEAD_DIM_INPUTS
    return [kind for kind in kinds if not chosen or kind in chosen]


FAMILY = Family("attention", WORKLOADS, TINY_WORKLOADS, build)


def flops(shape: Sequence[int]) -> int:
    """FLOP of both matrix products: two per multiply-add."""
    batch, queries, keys, heads, head_dim = shape
    return 4 * batch * queries * keys * heads * head_dim


class Sample:
    """The sample of an output that is compared with float64."""

    def __init__(self, shape: Sequence[int], device: torch.device) -> None:
        _, queries, _, heads, _ = shape
        self.heads = sorted({0, heads // 2, heads - 1})
        count = min(queries, SAMPLED_QUERIES)
        self.queries = torch.linspace(0, queries - 1, count, dtype=torch.float64).round().long()
        self.queries = self.queries.to(device)

    def of(self, output: Tensor) -> Tensor:
        """(B, sampled queries, sampled heads, d)"""
        return output[:, self.queries][:, :, self.heads]

    def exact(self, q: Tensor, k: Tensor, v: Tensor, key_bias: Tensor | None = None) -> Tensor:
        """The same sample of the result in float64."""
        key, value = (t[:, :, self.heads] for t in (k, v))
        return references.attention(self.of(q), key, value, key_bias=key_bias)


# --------------------------------------------------------------------------------------------------
# One workload


@dataclass(frozen=True)
class Settings:
    """Settings shared by all workloads."""

    kernel: ModuleType
    libraries: Mapping[str, object]
    stopwatch: timing.Stopwatch
    ceilings: Mapping[str, float]
    rounds: int
    device: torch.device


@dataclass
class Calls:
    """The calls of all implementations on one kind of inputs, ours first, and reasons for missing ones."""

    where: str
    case: Case
    by_name: dict[str, peers.Call]
    declined: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    @classmethod
    def prepare(cls, workload: Workload, kind: str, settings: Settings) -> Calls:
        case = make(workload, kind, settings.device)
        ours = functools.partial(settings.kernel.attention, *case.arguments, **case.options)
        calls = cls(f"{workload}, {kind}", case, {"ours": peers.Call(ours)})
        for name, library in settings.libraries.items():
            call = library.attention(*case.arguments, **case.options)
            if call is None:
                calls.declined.append(name)
            else:
                calls.by_name[name] = call
        return calls

    def fail(self, name: str, why: str) -> None:
        """Leave out a failed implementation. If ours fails, the run ends."""
        if name == "ours":
            raise click.ClickException(f"{self.where}: {why}")
        del self.by_name[name]
        self.failed[name] = why
        click.echo(f"{self.where}: {name} failed: {why}")

    def errors(self, sample: Sample) -> dict[str, float]:
        """The error of each implementation that neither fails nor is wrong."""
        exact = sample.exact(*self.case.arguments, **self.case.options)
        errors = {}
        for name, call in list(self.by_name.items()):
            try:
                (out,) = call.outputs(call.run())
                error = finite_distance(sample.of(out), exact)
            except Exception as error_:  # third-party code may raise anything
                if name == "ours":
                    raise
                self.fail(name, explain(error_))
                continue
            if error <= TOLERANCE:
                errors[name] = error
            else:
                self.fail(name, f"the result is {error:.3g} from float64")
        return errors


def error_ratio(ours: float, theirs: float) -> float:
    return max(ours, ERROR_FLOOR) / max(theirs, ERROR_FLOOR)


def bounds(shape: Sequence[int], ceilings: Mapping[str, float]) -> dict[str, float]:
    """TFLOP/s that each ceiling alone would allow: wgmma's own rate, and one exponential per score."""
    if not ceilings:
        return {}
    batch, queries, keys, heads, _ = shape
    scores = batch * queries * keys * heads
    return {"wgmma": ceilings["wgmma"], "exp2": ceilings["exp2"] * flops(shape) / scores}


def rates(
    samples: Mapping[str, list[float]],
    shape: Sequence[int],
    moved: int,
    ceilings: Mapping[str, float],
) -> dict[str, object]:
    """Times, rates and ratios of the functions that took turns."""
    times = {name: timing.summarize(values) for name, values in samples.items()}
    medians = {name: summary["median"] for name, summary in times.items()}
    teraflops = {
        name: flops(shape) / median * 1e-6 for name, median in medians.items() if name != "copy"
    }
    allowed = bounds(shape, ceilings)
    return {
        "microseconds": times,
        "teraflops_per_second": teraflops,
        "over": {name: medians[name] / medians["ours"] for name in teraflops if name != "ours"},
        "terabytes_per_second": {name: moved / medians[name] * 1e-6 for name in ("ours", "copy")},
        "bounds_teraflops_per_second": allowed,
        "of_bounds": {name: teraflops["ours"] / bound for name, bound in allowed.items()},
    }


def slowest_over_fastest(of_kinds: Mapping[str, Mapping]) -> float | None:
    """Our lowest rate over our highest, without extreme inputs; None for fewer than two kinds."""
    ours = [
        of_kind["cold"]["teraflops_per_second"]["ours"]
        for kind, of_kind in of_kinds.items()
        if kind not in EXTREMES
    ]
    return min(ours) / max(ours) if len(ours) > 1 else None


def measure(workload: Workload, kinds: Sequence[str], settings: Settings) -> dict[str, object]:
    """Compare errors, then times, of all implementations of a workload on each kind of inputs."""
    device, cold = settings.device, settings.stopwatch.cold
    sample = Sample(workload.shape, device)
    calls = {kind: Calls.prepare(workload, kind, settings) for kind in kinds}
    errors = {kind: of_kind.errors(sample) for kind, of_kind in calls.items()}
    functions = {
        (kind, name): call.run
        for kind, of_kind in calls.items()
        for name, call in of_kind.by_name.items()
    }
    first = calls[kinds[0]]
    moved = moved_bytes(first.case, [first.by_name["ours"].run()])
    functions["copy"] = copy_of(moved, device)
    timing.interleave(functions, WARM_UP_ROUNDS, device, cold)
    samples = timing.interleave(functions, settings.rounds, device, cold)

    of_kinds = {}
    for kind, of_kind in calls.items():
        taken = {name: samples[kind, name] for name in of_kind.by_name}
        taken["copy"] = samples["copy"]
        of_kinds[kind] = {
            "failed": of_kind.failed,
            "cold": rates(taken, workload.shape, moved, settings.ceilings),
            "errors": errors[kind],
            "error_over": {
                name: error_ratio(errors[kind]["ours"], error)
                for name, error in errors[kind].items()
                if name != "ours"
            },
        }
    return {
        "operation": workload.operation,
        "variant": workload.variant,
        "shape": list(workload.shape),
        "flops": flops(workload.shape),
        "bytes": moved,
        "sampled_heads": sample.heads,
        "sampled_queries": len(sample.queries),
        "declined": first.declined,
        "slowest_over_fastest": slowest_over_fastest(of_kinds),
        "inputs": of_kinds,
    }


# --------------------------------------------------------------------------------------------------
# Ceilings


def read_ceilings(
    path: Path | None, device: torch.device
) -> tuple[dict[str, float], dict[str, object]]:
    """The measures of CEILINGS by name, if they are of this kind of GPU, and a note for the record."""
    here = record.environment(device)["device"]
    result = history.newest("ceilings", here) if path is None else history.load(path)[-1]
    if result is None:
        return {}, {"left_out": f"there are none for {here}: run benchmarks/ceilings/run.py"}
    measured_on = result["environment"]["device"]
    if measured_on != here:
        return {}, {"left_out": f"they were measured on {measured_on}, not on {here}"}
    measures = {(m["program"], m["name"]): m for m in result["measures"]}
    if absent := [name for key, name in CEILINGS.values() if (key, name) not in measures]:
        return {}, {"left_out": f"the result has no {', '.join(absent)}"}
    chosen = {name: measures[key] for name, key in CEILINGS.items()}
    note = {key: result["environment"][key] for key in ("device", "date", "command")}
    return {name: m["measured"] for name, m in chosen.items()}, {**note, "measures": chosen}


# --------------------------------------------------------------------------------------------------
# The command


def show(entries: Sequence[dict]) -> None:
    """Print the figures, then the rates' dependence on the values."""
    names = ["ours", *peers.ATTENTION_LIBRARIES]
    rows, ranges = [], []
    for entry in entries:
        label = " ".join(filter(None, ["x".join(map(str, entry["shape"])), entry["variant"]]))
        if entry["slowest_over_fastest"] is not None:
            ranges.append([label, entry["slowest_over_fastest"]])
        for kind, of_kind in entry["inputs"].items():
            got = of_kind["cold"]
            ours, copy = (got["microseconds"][name] for name in ("ours", "copy"))
            bounds_ = (got["of_bounds"].get(name) for name in CEILINGS)
            rows.append(
                [
                    *(label, kind, ours["median"], 100 * ours["spread"]),
                    *(got["teraflops_per_second"].get(name) for name in names),
                    *(got["over"].get(name) for name in names[1:]),
                    *(None if share is None else 100 * share for share in bounds_),
                    *(got["terabytes_per_second"]["ours"], copy["median"]),
                    of_kind["errors"]["ours"],
                    *(of_kind["error_over"].get(name) for name in names[1:]),
                ]
            )
    headers = ["", "inputs", "us", "spread %", *(f"TFLOP/s {name}" for name in names)]
    headers += [f"x {name}" for name in names[1:]] + [f"% of {name}'s bound" for name in CEILINGS]
    headers += ["TB/s", "copy us", "error", *(f"error over {name}'s" for name in names[1:])]
    formats = [".3e" if header == "error" else ".3f" for header in headers]
    click.echo(tabulate(rows, headers, floatfmt=formats))
    click.echo(tabulate(ranges, ["", "slowest over fastest"], floatfmt=".3f"))


@click.command(help="Measure times and errors of attention and its peers.")
@DEVICE
@click.option("--tiny", is_flag=True, help="Tiny shapes, to try the benchmark.")
@click.option("--shapes", type=Names(), help="Comma-separated: 2x8064x128x32x64,... Default: all.")
@click.option(
    "--inputs",
    "chosen",
    multiple=True,
    type=click.Choice(list(INPUTS)),
    help="A kind of inputs; may be given several times. Default: all.",
)
@click.option("--rounds", type=click.IntRange(min=1), default=25, show_default=True)
@click.option(
    "--ceilings",
    "ceilings_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Result of benchmarks/ceilings/run.py. Default: the newest stored one of this GPU.",
)
@record.output_option("attention")
@torch.no_grad()
def main(device, tiny, shapes, chosen, rounds, ceilings_path, output) -> None:
    workloads = select(FAMILY.tiny if tiny else FAMILY.workloads, None, shapes)
    kinds = {workload: kinds_of(workload, chosen) for workload in workloads}
    if not any(kinds.values()):
        raise click.UsageError(f"the inputs {', '.join(chosen)} apply to none of these shapes")
    kernel, _ = models.load_kernel()
    libraries, notes = peers.load(device, peers.ATTENTION_LIBRARIES)
    for name, note in notes.items():
        click.echo(f"{name}: {note}")
    ceilings, ceilings_note = read_ceilings(ceilings_path, device)
    if "left_out" in ceilings_note:
        click.echo(f"no ceilings: {ceilings_note['left_out']}")
    stopwatch = timing.Stopwatch(device)
    settings = Settings(kernel, libraries, stopwatch, ceilings, rounds, device)
    result = {
        "environment": record.environment(device),
        "peers": notes,
        "ceilings": ceilings_note,
        "dtype": record.dtype_name(DTYPE),
        "rounds": rounds,
        "flush_bytes": timing.FLUSH_BYTES if device.type == "cuda" else 0,
        "error": "relative L2 distance from float64 over all of the batch, the sampled heads and "
        "sampled queries spread evenly from the first to the last",
    }
    entries = result["workloads"] = []
    with clocks.watch(device) as result["clocks"]:
        entries += [measure(w, kinds[w], settings) for w in workloads if kinds[w]]
    show(entries)
    clocks.show(result["clocks"])
    output = record.destination(output, "attention")
    record.finish(output, result)


if __name__ == "__main__":
    main()
