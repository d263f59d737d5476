"""Checks that an extension loads on every platform that its variant's name promises.

Fails on Python symbols outside the limited API of Python 3.9, on libraries other than Torch's and the
C++ runtime, on Torch symbols outside its stable ABI, on symbols newer than manylinux_2_28, and on
exported symbols of the extension itself, which another build in the same process could bind to.

If only the compiler's C library is newer than manylinux_2_28, it passes with a note: the binary runs
on this machine but must not be published.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection
from kernel_abi_check import ObjectFile
from tabulate import tabulate

PYTHON_ABI = "3.9"
MANYLINUX = "manylinux_2_28"

ALLOWED_LIBRARIES = re.compile(
    r"libtorch(_cpu|_cuda)?\.so|libc10(_cuda)?\.so|libcudart\.so\.\d+"  # Torch's
    r"|lib(c|m|dl|rt|pthread)\.so\.\d+|ld-linux-[\w-]+\.so\.\d+"  # the C library's
    r"|libstdc\+\+\.so\.6|libgcc_s\.so\.1"
)
# Symbols that an extension may export: its entry, linker marks, instances of the C++ library's templates.
EXPORTED_SYMBOLS = re.compile(
    r"PyInit_\w+|_init|_fini|__bss_start|_edata|_end"
    r"|_Z(GV|T[ISTV]|Z)*N?K?[RO]?(S[abdiost]|9__gnu_cxx|5torch|3c10|2at).*"  # R, O: of & and &&
)
# Versioned by the compiler's C and C++ runtime.
TOOLCHAIN_VERSIONS = {"GLIBC", "GLIBCXX", "CXXABI", "GCC"}


def needed_libraries(elf: ELFFile) -> list[str]:
    sections = (section for section in elf.iter_sections() if isinstance(section, DynamicSection))
    # A tag's type names its attribute.
    tags: Iterator[Any] = (tag for section in sections for tag in section.iter_tags("DT_NEEDED"))
    return [tag.needed for tag in tags]


def dynamic_symbols(elf: ELFFile) -> Iterator[Any]:
    table = elf.get_section_by_name(".dynsym")
    assert isinstance(table, SymbolTableSection), "a shared library has dynamic symbols"
    return table.iter_symbols()


def undefined_symbols(elf: ELFFile) -> list[str]:
    symbols = dynamic_symbols(elf)
    return [symbol.name for symbol in symbols if symbol["st_shndx"] == "SHN_UNDEF" and symbol.name]


def exported_symbols(elf: ELFFile) -> list[str]:
    """Returns the exported symbols, as written in C++."""
    return demangled(
        symbol.name
        for symbol in dynamic_symbols(elf)
        if symbol["st_shndx"] != "SHN_UNDEF"
        and symbol["st_info"]["bind"] != "STB_LOCAL"
        and not EXPORTED_SYMBOLS.fullmatch(symbol.name)
    )


def demangled(names: Iterable[str]) -> list[str]:
    process = subprocess.run(
        ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
    )
    return process.stdout.splitlines()


def torch_cxx_symbols(names: list[str]) -> list[str]:
    """Returns the symbols of Torch's C++ namespaces: the stable ABI has C functions only."""
    of_torch = re.compile(r"(?:(?:vtable|typeinfo|typeinfo name|VTT) for )?(at|c10|torch)::")
    return [symbol for symbol in demangled(names) if of_torch.match(symbol)]


def check(extension: Path) -> tuple[list[tuple[str, str]], bool]:
    """Returns (rows of the report, whether the extension passes)."""
    binary = ObjectFile(extension)
    with open(extension, "rb") as file:
        elf = ELFFile(file)
        libraries = [
            name for name in needed_libraries(elf) if not ALLOWED_LIBRARIES.fullmatch(name)
        ]
        torch_symbols = torch_cxx_symbols(undefined_symbols(elf))
        exported = exported_symbols(elf)
    python = binary.check_python_abi(PYTHON_ABI)
    manylinux = binary.check_manylinux(MANYLINUX)
    toolchain = [symbol for symbol in manylinux if symbol.dep in TOOLCHAIN_VERSIONS]
    others = [symbol for symbol in manylinux if symbol.dep not in TOOLCHAIN_VERSIONS]

    failures = {
        f"limited API of Python {PYTHON_ABI}": [symbol.name for symbol in python],
        "only libraries of Torch and the C++ runtime": libraries,
        "only Torch's stable ABI": torch_symbols,
        "own symbols are hidden": exported,
        MANYLINUX: [f"{symbol.name} ({symbol.dep} {symbol.version})" for symbol in others],
    }
    rows = [
        (name, f"FAILED: {', '.join(found)}" if found else "ok")
        for name, found in failures.items()
        if found or not (name == MANYLINUX and toolchain)
    ]
    if toolchain:
        versions = ", ".join(sorted({f"{symbol.dep}_{symbol.version}" for symbol in toolchain}))
        rows.append((MANYLINUX, f"not met ({versions})"))
    return rows, not any(failures.values())


@click.command(help=__doc__)
@click.argument(
    "variants",
    nargs=-1,
    required=True,
    metavar="VARIANT...",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
)
def main(variants: tuple[Path, ...]) -> None:
    report, fit = [], True
    for variant in variants:
        extensions = sorted(variant.glob("*.abi3.so"))
        if len(extensions) != 1:
            raise click.ClickException(f"{variant} must hold one extension, got {len(extensions)}")
        rows, ok = check(extensions[0])
        report += [(variant.name, *row) for row in rows]
        fit = fit and ok
    click.echo(tabulate(report, headers=("variant", "requirement", "result")))
    if any("not met" in row[-1] for row in report):
        click.echo(
            f"\n{MANYLINUX} is not met because this machine's C library is newer. The build runs here; "
            "for publication, build with kernel-builder's own toolchain."
        )
    if not fit:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
