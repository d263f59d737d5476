"""Profiles each kernel at its main shape with Nsight Compute, and compares counters with targets.

The script runs itself under `ncu`, which replays each kernel of this package with flushed caches and reads
the GPU's counters. DRAM throughput excludes writes that are still in L2 at a kernel's end, which matters for
small outputs.

    python benchmarks/operations/profile_kernels.py
"""

from __future__ import annotations

import csv
import glob
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import click
import torch
from tabulate import tabulate

from benchmarks import models
from benchmarks.harness import kernel_times, record
from benchmarks.harness.comparison import Family, Workload
from benchmarks.operations import (
    bench_activation,
    bench_attention,
    bench_gated_residual,
    bench_group_norm,
    bench_norm,
    bench_rope,
    bench_softmax,
)

ROWS = (2, 8064, 2048)  # LTX-Video, 161 frames 512x768, with guidance
WIDE = (2, 8064, 8192)
IMAGE = (2, 960, 128, 128)  # SDXL's last blocks at 1024x1024, with guidance
MAIN_SHAPES: tuple[tuple[Family, Workload], ...] = (
    (bench_norm.FAMILY, Workload("rms_norm", ROWS)),
    (bench_norm.FAMILY, Workload("layer_norm", ROWS)),
    (bench_norm.FAMILY, Workload("rms_norm_modulate", ROWS)),
    (bench_norm.FAMILY, Workload("layer_norm_modulate", ROWS)),
    (
        bench_norm.FAMILY,
        Workload("layer_norm_modulate", bench_norm.WAN_SHAPES[-1], bench_norm.FLOAT32),
    ),
    (bench_norm.FAMILY, Workload("layer_norm_modulate_pair", bench_norm.PAIR_SHAPE)),
    (bench_group_norm.FAMILY, Workload("group_norm", IMAGE, bench_group_norm.SILU)),
    (bench_group_norm.FAMILY, Workload("group_norm", IMAGE, bench_group_norm.CHANNELS_LAST)),
    (
        bench_group_norm.FAMILY,
        Workload("channel_rms_norm", bench_group_norm.DECODER_SHAPES[0], bench_group_norm.SILU),
    ),
    (bench_gated_residual.FAMILY, Workload("gated_residual", ROWS)),
    (bench_gated_residual.FAMILY, Workload("gated_residual_rms_norm_modulate", ROWS)),
    (bench_gated_residual.FAMILY, Workload("gated_residual_layer_norm_modulate_pair", ROWS)),
    (bench_rope.FAMILY, Workload("qk_norm_rope", ROWS, bench_rope.COORDINATES)),
    (bench_rope.FAMILY, Workload("qk_norm_rope", ROWS, bench_rope.TABLES)),
    (bench_rope.FAMILY, Workload("rope", (2, 8064, 32, 64), "interleaved")),
    (bench_rope.FAMILY, Workload("rope_3d", (1, 32760, 12, 128), "interleaved")),
    (bench_activation.FAMILY, Workload("gelu", WIDE, "tanh")),
    (bench_activation.FAMILY, Workload("geglu", WIDE, "none")),
    (bench_activation.FAMILY, Workload("swiglu", WIDE)),
    (bench_activation.FAMILY, Workload("silu", WIDE)),
    (bench_softmax.FAMILY, Workload("softmax", (8192, 8192))),
    (bench_attention.FAMILY, Workload("attention", (2, 8064, 8064, 32, 64))),
    (bench_attention.FAMILY, Workload("attention", (2, 8064, 128, 32, 64))),
    (bench_attention.FAMILY, Workload("attention_int8", (2, 8064, 8064, 32, 64))),
)
NOT_BOUND_BY_MEMORY = ("attention", "attention_int8")

DRAM = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
OCCUPANCY = "sm__warps_active.avg.pct_of_peak_sustained_active"
L2_HITS = "lts__t_sector_hit_rate.pct"
REGISTERS = "launch__registers_per_thread"
DURATION = "gpu__time_duration.sum"
BYTES_READ, BYTES_WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
LOCAL_SECTORS = tuple(f"l1tex__t_sectors_pipe_lsu_mem_local_op_{kind}.sum" for kind in ("ld", "st"))
LIMITS = {
    name: f"launch__occupancy_limit_{name}"
    for name in ("blocks", "registers", "shared_mem", "warps")
}
METRICS = (
    *(DRAM, OCCUPANCY, L2_HITS, REGISTERS, DURATION, BYTES_READ, BYTES_WRITTEN),
    *LOCAL_SECTORS,
    *LIMITS.values(),
)
# The section counts the waiting warps per issued instruction, by reason.
STALL_SECTION = "WarpStateStats"
STALL = re.compile(
    r"smsp__average_warps_issue_stalled_(\w+)(?<!_not_issued)_per_issue_active\.ratio"
)
SECTOR_BYTES = 32

DRAM_TARGET, OCCUPANCY_TARGET = 85.0, 50.0  # percent, lower limits

# The column with the workload's name, from an NVTX range that the run pushes.
RANGE_COLUMN = "Push/Pop_Range"
RANGE = re.compile(r"workload<(.+?)>")


class ProfileError(RuntimeError):
    """The profiler is missing, failed, or did not report a requested counter."""


@dataclass(frozen=True)
class Profile:
    """Counters of one kernel."""

    workload: str
    kernel: str
    microseconds: float
    dram_percent: float
    occupancy_percent: float
    l2_hit_percent: float
    registers: int
    local_bytes: int  # moved by spills and other local memory
    dram_bytes_read: int
    dram_bytes_written: int
    occupancy_limits: dict[str, int]  # blocks a multiprocessor
    stalls: dict[str, float]  # waiting warps per issued instruction

    @property
    def largest_stall(self) -> str:
        return max(self.stalls, key=self.stalls.__getitem__)

    @property
    def misses(self) -> list[str]:
        """The counters that miss their targets."""
        misses = []
        if self.workload.split()[0] not in NOT_BOUND_BY_MEMORY:
            if self.dram_percent <= DRAM_TARGET:
                misses.append(f"memory {self.dram_percent:.1f}% <= {DRAM_TARGET:.0f}%")
            if self.occupancy_percent <= OCCUPANCY_TARGET:
                misses.append(f"occupancy {self.occupancy_percent:.1f}% <= {OCCUPANCY_TARGET:.0f}%")
        if self.local_bytes:
            misses.append(f"{self.local_bytes} bytes of local memory")
        return misses


def _number(row: dict[str, str], name: str) -> float:
    kernel = row.get("Kernel Name")
    if row.get(name) is None:
        raise ProfileError(f"ncu's output has no column {name}: this ncu or GPU may not support it")
    try:
        return float(row[name].replace(",", ""))
    except ValueError:
        raise ProfileError(f"ncu reports {row[name]!r} for {name} of {kernel}, no number") from None


def _check_units(units: dict[str, str]) -> None:
    accepted = {
        DURATION: ("ns", "nsecond"),
        **dict.fromkeys((BYTES_READ, BYTES_WRITTEN), ("byte",)),
        **dict.fromkeys((DRAM, OCCUPANCY, L2_HITS), ("%",)),
    }
    for name, names in accepted.items():
        if name in units and units[name] not in names:
            raise ProfileError(f"ncu reports {name} in {units[name]!r}, not in {names[0]!r}")


def _profile(row: dict[str, str]) -> Profile:
    ranges = next((value for name, value in row.items() if RANGE_COLUMN in name), None)
    if ranges is None:
        raise ProfileError(f"ncu's output has no column {RANGE_COLUMN}: was it run with --nvtx?")
    workload = RANGE.search(ranges)
    if workload is None:
        raise ProfileError(f"ncu reports no workload for {row['Kernel Name']}: {ranges!r}")
    numbers = {name: _number(row, name) for name in METRICS}
    stalls = {match[1]: _number(row, name) for name in row if (match := STALL.fullmatch(name))}
    stalls.pop("selected", None)  # the warp that issues
    if not stalls:
        raise ProfileError(f"ncu's output has no stall reasons (section {STALL_SECTION})")
    return Profile(
        workload=workload[1],
        kernel=row["Kernel Name"],
        microseconds=numbers[DURATION] / 1e3,
        dram_percent=numbers[DRAM],
        occupancy_percent=numbers[OCCUPANCY],
        l2_hit_percent=numbers[L2_HITS],
        registers=int(numbers[REGISTERS]),
        local_bytes=int(sum(numbers[name] for name in LOCAL_SECTORS) * SECTOR_BYTES),
        dram_bytes_read=int(numbers[BYTES_READ]),
        dram_bytes_written=int(numbers[BYTES_WRITTEN]),
        occupancy_limits={name: int(numbers[metric]) for name, metric in LIMITS.items()},
        stalls=stalls,
    )


def parse(text: str, expected: Iterable[str]) -> list[Profile]:
    """Reads the output of `ncu --csv --page raw`: names, units, a row for each kernel.

    Raises:
        ProfileError: a requested counter, or a kernel of one of the `expected` workloads, is missing.
    """
    lines = [line for line in text.splitlines() if not line.startswith("==")]
    begin = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if begin is None:
        raise ProfileError(f"ncu profiled no kernel of this package:\n{text.strip()[-2000:]}")
    units, *rows = csv.DictReader(lines[begin:])
    _check_units(units)
    profiles = [_profile(row) for row in rows]
    seen = {profile.workload for profile in profiles}
    if absent := [name for name in expected if name not in seen]:
        raise ProfileError(f"ncu profiled no kernel of {', '.join(absent)}")
    return profiles


def find_ncu() -> str:
    folders = [
        "/usr/local/cuda/bin",
        *sorted(glob.glob("/opt/nvidia/nsight-compute/*"), reverse=True),
    ]
    for path in (None, *folders):
        if ncu := shutil.which("ncu", path=path):
            return ncu
    raise ProfileError("there is no ncu on PATH: install Nsight Compute")


def command(ncu: str, log: Path, names: Sequence[str]) -> list[str]:
    """The command that runs this script under ncu. Clocks are not locked, as in the benchmarks."""
    return [
        *(ncu, "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)),
        *("--nvtx", "--cache-control", "all", "--clock-control", "none"),
        *("--kernel-name-base", "demangled", "--kernel-name", "regex:.*h100_diffusers_kernels.*"),
        *("--section", STALL_SECTION, "--metrics", ",".join(METRICS)),
        *(sys.executable, __file__, "--under-ncu"),
        *(word for name in names for word in ("--only", name)),
    ]


def call_each(chosen: Iterable[tuple[Family, Workload]]) -> None:
    """One call of each workload, in an NVTX range with its name."""
    device = torch.device("cuda")
    kernel, _ = models.load_kernel()
    for family, workload in chosen:
        case = family.build(workload, kernel, device)
        function = getattr(kernel, workload.operation)
        torch.cuda.synchronize()
        torch.cuda.nvtx.range_push(f"workload<{workload}>")
        with torch.no_grad():
            function(*case.arguments, **case.options)
        torch.cuda.synchronize()
        torch.cuda.nvtx.range_pop()


def profile(names: Sequence[str], expected: Sequence[str]) -> list[Profile]:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        process = subprocess.run(command(find_ncu(), log, names), capture_output=True, text=True)
        text = log.read_text() if log.exists() else ""
    if process.returncode != 0:
        said = "\n".join(part.strip()[-2000:] for part in (process.stdout, process.stderr, text))
        raise ProfileError(f"ncu failed with status {process.returncode}:\n{said}")
    return parse(text, expected)


def table(profiles: Iterable[Profile]) -> str:
    rows = [
        [
            *(p.workload, p.microseconds, p.dram_percent, p.occupancy_percent, p.l2_hit_percent),
            *(p.registers, p.local_bytes, f"{p.largest_stall} {p.stalls[p.largest_stall]:.1f}"),
            "; ".join(p.misses) or "ok",
        ]
        for p in profiles
    ]
    headers = ["kernel of", "µs", "memory %", "occupancy %", "L2 hits %"]
    headers += ["registers", "local bytes", "largest stall", "targets"]
    return tabulate(rows, headers=headers, floatfmt=".1f")


OPERATIONS = list(dict.fromkeys(workload.operation for _, workload in MAIN_SHAPES))


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--only", "names", multiple=True, type=click.Choice(OPERATIONS))
@record.output_option("profile")
@click.option("--under-ncu", is_flag=True, hidden=True)
def main(names: tuple[str, ...], output: Path | None, under_ncu: bool) -> None:
    chosen = [pair for pair in MAIN_SHAPES if not names or pair[1].operation in names]
    if not torch.cuda.is_available():
        raise click.ClickException("there is no CUDA GPU")
    if under_ncu:
        call_each(chosen)
        return
    models.load_kernel()
    try:
        profiles = profile(names, [str(workload) for _, workload in chosen])
    except ProfileError as error:
        raise click.ClickException(str(error)) from error
    result = {
        "environment": record.environment(torch.device("cuda")),
        "targets": {"dram_percent": DRAM_TARGET, "occupancy_percent": OCCUPANCY_TARGET},
        "kernels": [
            {
                **vars(p),
                "kernel": kernel_times.short_name(p.kernel),
                "largest_stall": p.largest_stall,
                "misses": p.misses,
            }
            for p in profiles
        ],
    }
    output = record.destination(output, "profile")
    record.finish(output, result)
    click.echo(table(profiles))
    click.echo(
        f"\ntargets: memory above {DRAM_TARGET:.0f}% of its peak, occupancy above "
        f"{OCCUPANCY_TARGET:.0f}%, nothing in local memory; stall: warps that wait, an instruction issued"
    )


if __name__ == "__main__":
    main()
