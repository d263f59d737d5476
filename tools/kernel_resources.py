"""Shows the resources of each CUDA kernel, read from the compiled code in folders of .build/.

Fails if registers spill to memory, if the compiler serializes matrix products (it only prints a note
when code accesses their registers too early), and if a kernel does not read and write global memory
16 bytes at a time. Kernels for data that is not aligned to 16 bytes have `scalar`, `ScalarLoader` or
`Access::kScalar` in their names and are exempt. FP8 values may be written 8 bytes at a time. Kernels of
`statistics` write few values.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import click
from tabulate import tabulate

from builder.toolchain import ToolchainError, cuda_tool

# c++filt prints Access::kScalar as (Access)1.
SCALAR_ACCESS = re.compile(
    r"\bscalar_\w+_kernel\b|\bScalarLoader\b|Access\)1\b|\bAccess::kScalar\b"
)
FEW_OUTPUTS = re.compile(r"\b\w+_statistics_kernel\b")
FP8_OUTPUT = re.compile(r"\bquantize_fp8_kernel\b|\bQuantizedOutput\b")
INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
ENCODING = re.compile(r"/\* (0x[0-9a-f]{16}) \*/\s*$")  # half of an instruction


@dataclass
class Kernel:
    name: str  # demangled
    registers: int
    stack: int  # bytes, as the next two
    spills: int
    shared: int  # static
    opcodes: Counter[str] = field(default_factory=Counter)
    code: str = ""  # a digest of the encoded instructions

    def count(self, *names: str, width: str | None = None) -> int:
        """Counts instructions by opcode and, if given, access width in bits."""
        total = 0
        for opcode, count in self.opcodes.items():
            name, *modifiers = opcode.split(".")
            if name in names and (width is None or width in modifiers):
                total += count
        return total

    @property
    def wide_loads(self) -> int:
        return self.count("LDG", "LD", "LDGSTS", width="128")

    @property
    def wide_stores(self) -> int:
        return self.count("STG", "ST", width="128")

    @property
    def fp8_stores(self) -> int:
        return self.count("STG", "ST", width="64") if FP8_OUTPUT.search(self.name) else 0

    @property
    def shared_accesses(self) -> int:
        return self.count("LDS", "STS", width="128")

    @property
    def bulk_loads(self) -> int:
        return self.count("UTMALDG") + self.count("UBLKCP", width="S")

    @property
    def bulk_stores(self) -> int:
        return self.count("UTMASTG", "UTMAREDG", "UBLKRED") + self.count("UBLKCP", width="G")

    @property
    def has_serial_products(self) -> bool:
        """Whether there is a separate wait for nearly each product of a warp group (wgmma)."""
        products, waits = (
            self.count("HGMMA", "QGMMA", "IGMMA"),
            self.count("WARPGROUP", width="DEPBAR"),
        )
        return products > 0 and products < 2 * waits

    def faults(self) -> list[str]:
        faults = []
        if self.spills:
            faults.append(f"spills {self.spills} bytes")
        if self.has_serial_products:
            faults.append("matrix products wait for each other")
        if not SCALAR_ACCESS.search(self.name):
            if not (self.wide_loads or self.bulk_loads):
                faults.append("no 16-byte loads")
            has_stores = self.wide_stores or self.bulk_stores or self.fp8_stores
            if not (has_stores or FEW_OUTPUTS.search(self.name)):
                faults.append("no 16-byte stores")
        return faults


def demangle(names: list[str]) -> list[str]:
    text = subprocess.run(
        ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
    )
    return text.stdout.splitlines()


def short_name(name: str) -> str:
    """Drops result, namespaces of this package and parameters from a demangled function."""
    name = name.replace("(anonymous namespace)::", "")
    # Casts of enum values, `(Access)1`, are the only other parentheses.
    name = re.sub(r"\([^()]*(?:\([^()]*\)[^()]*)*\)$", "", name)
    name = name.removeprefix("void ")
    return re.sub(r"\b(h100_diffusers_kernels|(_GLOBAL__N_\w+))::", "", name)


def _found(pattern: str, report: str) -> re.Match[str]:
    match = re.search(pattern, report)
    if match is None:
        raise ToolchainError(
            f"unknown format of the ptxas report: no '{pattern}' in '{report.strip()}'"
        )
    return match


def ptxas_reports(folder: Path) -> dict[str, Kernel]:
    """Returns {mangled name: resources} from the ptxas report of each compilation."""
    kernels = {}
    for log in folder.rglob("*.ptxas"):
        for entry in re.split(r"Compiling entry function '", log.read_text())[1:]:
            name = entry[: entry.index("'")]
            # Functions that are not inlined are reported before or after the kernel.
            own = entry[entry.index(f"Function properties for {name}\n") :]
            frame, stores, loads = _found(
                r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", own
            ).groups()
            used = _found(r"Used (\d+) registers.*", own)
            shared = re.search(r"(\d+) bytes smem", used[0])
            kernels[name] = Kernel(
                name=name,
                registers=int(used[1]),
                stack=int(frame),
                spills=int(stores) + int(loads),
                shared=int(shared[1]) if shared else 0,
            )
    return kernels


def disassembly(extension: Path) -> dict[str, list[str]]:
    """Returns {mangled name: lines of cuobjdump's listing} of the extension's kernels."""
    cuobjdump = cuda_tool("cuobjdump")
    nvdisasm = cuda_tool("nvdisasm")  # called by cuobjdump
    environment = {**os.environ, "PATH": f"{nvdisasm.parent}{os.pathsep}{os.environ['PATH']}"}
    command: list[str | Path] = [cuobjdump, "-sass", extension]
    process = subprocess.run(command, capture_output=True, text=True, env=environment)
    if process.returncode != 0:
        raise ToolchainError(f"{cuobjdump} failed on {extension}: {process.stderr.strip()}")
    kernels: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in process.stdout.splitlines():
        if "Function :" in line:
            lines = kernels.setdefault(line.split(":", 1)[1].strip(), [])
        else:
            lines.append(line)
    return kernels


def count_opcodes(lines: list[str]) -> Counter[str]:
    return Counter(match[1] for match in map(INSTRUCTION.match, lines) if match)


def machine_code(extension: Path) -> dict[str, Counter[str]]:
    """Returns {mangled name: {opcode: count}} of the kernels in an extension or program."""
    return {name: count_opcodes(lines) for name, lines in disassembly(extension).items()}


def digest(lines: list[str]) -> str:
    """Returns a digest that is equal for kernels with the same instructions."""
    halves = [match[1] for match in map(ENCODING.search, lines) if match]
    return hashlib.sha256("".join(halves).encode()).hexdigest()


def read_kernels(folder: Path) -> list[Kernel]:
    extensions = list(folder.glob("*.abi3.so"))
    if len(extensions) != 1:
        raise ToolchainError(f"{folder} must hold one extension, got {len(extensions)}")
    reports = ptxas_reports(folder)
    kernels = []
    for name, lines in disassembly(extensions[0]).items():
        if name not in reports:
            raise ToolchainError(f"no ptxas report for {name} in {folder}: rebuild it")
        kernel = reports[name]
        kernel.opcodes = count_opcodes(lines)
        kernel.code = digest(lines)
        kernels.append(kernel)
    for kernel, name in zip(kernels, demangle([kernel.name for kernel in kernels]), strict=True):
        kernel.name = name
    return sorted(kernels, key=lambda kernel: kernel.name)


@click.command(help=__doc__)
@click.argument(
    "folders",
    nargs=-1,
    required=True,
    metavar="FOLDER...",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
)
def main(folders: tuple[Path, ...]) -> None:
    faulty = False
    for folder in folders:
        try:
            kernels = read_kernels(folder)
        except ToolchainError as error:
            raise click.ClickException(str(error)) from error
        if not kernels:
            raise click.ClickException(f"there are no kernels in {folder}")
        faults = [
            (short_name(kernel.name), fault) for kernel in kernels for fault in kernel.faults()
        ]
        show(folder, kernels, faults)
        faulty = faulty or bool(faults)
    if faulty:
        raise SystemExit(1)


def show(folder: Path, kernels: list[Kernel], faults: list[tuple[str, str]]) -> None:
    headers = ["kernel", "registers", "spills", "stack", "shared"]
    headers += ["loads", "stores", "in shared", "bulk loads", "bulk stores"]
    rows = [
        [short_name(k.name), k.registers, k.spills, k.stack, k.shared]
        + [k.wide_loads, k.wide_stores, k.shared_accesses, k.bulk_loads, k.bulk_stores]
        for k in kernels
    ]
    click.echo(f"{folder}\n{tabulate(rows, headers=headers)}")
    click.echo("\nspills, stack, shared: bytes; loads, stores, in shared: 16-byte instructions")
    click.echo(f"{folder}: {len(kernels)} kernels, {len(faults)} faults")
    for name, fault in faults:
        click.echo(f"  {name}: {fault}")


if __name__ == "__main__":
    main()
