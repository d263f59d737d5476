"""Compiles the programs that measure this GPU's limits, checks their machine code and runs them.

Prints every measure with the theoretical limit from the device's properties. --compile-only needs no
GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import click
import torch
from tabulate import tabulate

FOLDER = Path(__file__).resolve().parent
CHECKOUT = FOLDER.parents[1]
sys.path.insert(0, str(CHECKOUT))

from benchmarks.harness import clocks, record  # noqa: E402

import kernel_resources  # noqa: E402
from builder.package import Revision  # noqa: E402
from builder.toolchain import Nvcc, ToolchainError, find_cxx, find_nvcc  # noqa: E402

FLAGS = (
    *("-std=c++20", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "-Werror=all-warnings"),
    *("-Xcompiler", "-Wall,-Wextra,-Werror"),
)
HIGHEST_RATIO = 1.1  # to the theoretical limit: a clock may be slightly above its nominal rate
TIMEOUT_S = 120
FIELDS = {"program", "name", "unit", "measured", "theoretical", "formula", "ratio"}

# By program: part of a kernel's mangled name, and its measured instructions, which a compiler might replace
# or remove.
INSTRUCTIONS = {
    "memory": {
        "copy_kernelIjLi4": {"LDG.E": 4, "STG.E": 4},
        "copy_kernelI5uint2Li4": {"LDG.E.64": 4, "STG.E.64": 4},
        "copy_kernelI5uint4Li8": {"LDG.E.128": 8, "STG.E.128": 8},
        "read_kernelIjLi4": {"LDG.E": 4},
        "read_kernelI5uint4Li8": {"LDG.E.128": 8},
        "write_kernelI5uint4Li8": {"STG.E.128": 8},
        "bulk_read_kernel": {"UBLKCP.S.G": 1},
        "bulk_write_kernel": {"UBLKCP.G.S": 1},
        "bulk_copy_kernel": {"UBLKCP.S.G": 1, "UBLKCP.G.S": 1},
        "flush_kernel": {"LDG.E.128.STRONG.GPU": 1},
    },
    "cache": {
        "ring_kernelILNS_5CacheE0": {"LDG.E.128": 8},
        "ring_kernelILNS_5CacheE1": {"LDG.E.128.STRONG.GPU": 8},
        "13shared_kernel": {"LDS.128": 16},
        "chase_kernelILNS_5CacheE0": {"LDG.E.64": 16},
        "chase_kernelILNS_5CacheE1": {"LDG.E.64.STRONG.GPU": 16},
        "shared_chase_kernel": {"LDS": 16},
    },
    "arithmetic": {
        "8FloatFma": {"FFMA": 64},
        "7HalfFma": {"HFMA2": 32, "HFMA2.MMA": 32},
        "11BFloat16Fma": {"HFMA2.BF16_V2": 32, "HFMA2.MMA.BF16_V2": 32},
        "9FloatExp2": {"MUFU.EX2": 64},
        "8HalfExp2": {"MUFU.EX2.F16": 128},
        "12BFloat16Exp2": {"MUFU.EX2.BF16": 128},
    },
    "tensor_core": {
        "product_kernelINS0_8BFloat16": {"HGMMA.64x256x16.F32.BF16": 16},
        "product_kernelINS0_3Fp8": {"QGMMA.64x256x32.F32.E4M3.E4M3": 16},
    },
    "launch": {
        "12empty_kernel": {"EXIT": 1},
        "increment_kernelILb1": {"PREEXIT": 1, "ACQBULK": 1},
    },
}


def compile_program(nvcc: Nvcc, cxx: str, name: str, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / name
    libraries = [f"-L{library}" for library in nvcc.library_dirs]
    command = [nvcc.path, *FLAGS, "-ccbin", cxx, *libraries, FOLDER / f"{name}.cu", "-o", program]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode != 0:
        raise click.ClickException(f"{name}.cu does not compile:\n{process.stdout}{process.stderr}")
    return program


def missing_instructions(name: str, kernels: dict[str, dict[str, int]]) -> list[str]:
    """Returns the missing instructions of the program's kernels, {mangled name: {opcode: count}}."""
    missing = []
    for part, wanted in INSTRUCTIONS[name].items():
        matches = [opcodes for kernel, opcodes in kernels.items() if part in kernel]
        if len(matches) != 1:
            missing.append(f"{name}: {len(matches)} kernels have {part} in their names")
            continue
        for opcode, count in wanted.items():
            if matches[0].get(opcode, 0) < count:
                found = matches[0].get(opcode, 0)
                missing.append(f"{name}: {part} has {found} {opcode}, expected at least {count}")
    return missing


def parse(name: str, lines: Iterable[str]) -> list[dict]:
    """Returns the measures that the program `name` printed with --json."""
    measures = [json.loads(line) for line in lines if line.strip()]
    if not measures:
        raise click.ClickException(f"{name} printed no measure")
    for measure in measures:
        if set(measure) != FIELDS or measure["program"] != name:
            raise click.ClickException(f"{name} printed an invalid measure: {measure}")
    return measures


def run_program(program: Path) -> list[dict]:
    process = subprocess.run([program, "--json"], capture_output=True, text=True, timeout=TIMEOUT_S)
    if process.returncode != 0:
        raise click.ClickException(
            f"{program.name} failed with {process.returncode}: {process.stderr.strip()}"
        )
    return parse(program.name, process.stdout.splitlines())


def check_ratios(measures: Iterable[dict]) -> None:
    faults = [
        f"{m['program']}: {m['name']} is at {m['ratio']:.0%} of its limit: it measured something else"
        for m in measures
        if m["ratio"] is not None and m["ratio"] > HIGHEST_RATIO
    ]
    if faults:
        raise click.ClickException("\n".join(faults))


def table(measures: Iterable[dict]) -> str:
    rows = [
        [
            *(m["program"], m["name"], m["measured"], m["unit"], m["theoretical"]),
            None if m["ratio"] is None else f"{m['ratio']:.1%}",
            m["formula"],
        ]
        for m in measures
    ]
    headers = ["program", "measure", "measured", "unit", "theoretical", "ratio", "formula"]
    return tabulate(rows, headers=headers, floatfmt=".2f")


@click.command(help=__doc__)
@click.option("--compile-only", is_flag=True, help="Only compile and check the machine code.")
@click.option("--only", "names", multiple=True, type=click.Choice(list(INSTRUCTIONS)))
@record.output_option("ceilings")
def main(compile_only: bool, names: tuple[str, ...], output: Path | None) -> None:
    names = names or tuple(INSTRUCTIONS)
    if not compile_only and not torch.cuda.is_available():
        raise click.ClickException("there is no CUDA GPU: --compile-only needs none")
    folder = CHECKOUT / ".build" / "ceilings"
    try:
        nvcc, cxx = find_nvcc(torch.version.cuda), find_cxx()
        programs = [compile_program(nvcc, cxx, name, folder) for name in names]
        missing = [
            fault
            for program in programs
            for fault in missing_instructions(program.name, kernel_resources.machine_code(program))
        ]
    except ToolchainError as error:
        raise click.ClickException(str(error)) from error
    if missing:
        raise click.ClickException("\n".join(missing))
    click.echo(f"compiled, with the measured instructions: {', '.join(names)}")
    if compile_only:
        return

    device = torch.device("cuda")
    measures: list[dict] = []
    watched: dict[str, dict[str, float]] = {}
    for program in programs:
        with clocks.watch(device) as summary:
            measures += run_program(program)
        click.echo(f"{program.name}: ", nl=False)
        clocks.show(summary)
        watched[program.name] = summary
    click.echo(table(measures))
    check_ratios(measures)
    environment = {**record.environment(device), "commit": Revision.read(CHECKOUT).suffix}
    output = record.destination(output, "ceilings")
    record.finish(output, {"environment": environment, "clocks": watched, "measures": measures})


if __name__ == "__main__":
    main()
