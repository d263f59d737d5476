"""Compares the machine code of all CUDA kernels in two builds: .build/cuda of two checkouts.

Kernels are matched by name. The rest are matched by code: if only the spelling of template arguments
differs, a kernel is "renamed". Line numbers are ignored. Fails if a kernel changed or exists in one
build only.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import click

from builder.toolchain import ToolchainError
from kernel_resources import Kernel, read_kernels, short_name


@dataclass
class Comparison:
    same: list[str] = field(default_factory=list)
    renamed: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)

    @property
    def is_same(self) -> bool:
        return not (self.changed or self.added or self.gone)


def code_of(kernel: Kernel) -> tuple[str, int, int, int]:
    return kernel.code, kernel.registers, kernel.stack, kernel.shared


def compare(before: list[Kernel], after: list[Kernel]) -> Comparison:
    result = Comparison()
    old = {short_name(kernel.name): code_of(kernel) for kernel in before}
    new = {short_name(kernel.name): code_of(kernel) for kernel in after}
    for name in sorted(old.keys() & new.keys()):
        (result.same if old[name] == new[name] else result.changed).append(name)
    # Each remaining kernel matches at most one kernel of the other build.
    by_code = defaultdict(list)
    for name in sorted(new.keys() - old.keys()):
        by_code[new[name]].append(name)
    for name in sorted(old.keys() - new.keys()):
        if by_code[old[name]]:
            result.renamed.append(f"{name} -> {by_code[old[name]].pop(0)}")
        else:
            result.gone.append(name)
    result.added = sorted(name for names in by_code.values() for name in names)
    return result


folder_argument = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command(help=__doc__)
@click.argument("before", type=folder_argument)
@click.argument("after", type=folder_argument)
def main(before: Path, after: Path) -> None:
    try:
        result = compare(read_kernels(before), read_kernels(after))
    except ToolchainError as error:
        raise click.ClickException(str(error)) from error
    for what in ("renamed", "changed", "added", "gone"):
        for name in getattr(result, what):
            click.echo(f"{what}: {name}")
    counts = {what: len(names) for what, names in vars(result).items()}
    click.echo(", ".join(f"{count} {what}" for what, count in counts.items()))
    if not result.is_same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
