#!/usr/bin/env python3
"""Run the tests marked kernels_ci as kernel-builder's `nix run .#ci-test` does, without Nix.

The tests get kernel-builder's set of files in an empty folder, and load the package from build/. Their
environment has Torch, kernels, pytest and the pythonCheckInputs of flake.nix. A run that selects no test
fails; with kernel-builder it passes.

python tools/kernel_builder_tests.py --requirements                 # the environment's packages, for pip
python tools/kernel_builder_tests.py .build/kernels-ci/bin/python   # run the tests with this interpreter
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import click
import kernels

from builder.package import read_toml

CHECKOUT = Path(__file__).resolve().parents[1]
REQUIREMENTS = CHECKOUT / "requirements"
# What kernel-builder adds to pythonCheckInputs (nix-builder/lib/build.nix).
OWN_INPUTS = ["torch", "kernels", "pytest"]


def check_inputs(flake: str) -> list[str]:
    """The packages of pythonCheckInputs. Their names in Nix are those on PyPI."""
    found = re.search(r"pythonCheckInputs =\s*pkgs:\s*with pkgs;\s*\[([^]]*)\];", flake)
    if found is None:
        raise click.ClickException(
            "flake.nix has no pythonCheckInputs = pkgs: with pkgs; [ names ];"
        )
    return found[1].split()


def pinned(names: list[str]) -> list[str]:
    """The lines of the requirement files for these packages."""
    text = "\n".join(
        (REQUIREMENTS / f"{name}.txt").read_text() for name in ("torch", "test", "example")
    )
    lines = []
    for name in names:
        found = re.findall(rf"^{re.escape(name)}==.*", text, re.M)
        if not found:
            raise click.ClickException(f"requirements/ pin no version of {name}")
        lines += found
    return lines


def source_set(toml: dict) -> set[str]:
    """The files that kernel-builder takes (nix-builder/lib/source-set.nix), as paths in the repository."""
    tables = [toml["torch"], *toml.get("kernel", {}).values()]
    files = {"build.toml", *(source for table in tables for source in table["src"])}
    suffixes = {f".{suffix}" for suffix in toml["torch"].get("pyext", ["py", "pyi"])}
    for folder in ("torch-ext", "tests"):
        found = (path for path in (CHECKOUT / folder).rglob("*") if path.suffix in suffixes)
        files.update(path.relative_to(CHECKOUT).as_posix() for path in found)
    return files


def run_tests(python: Path) -> int:
    """Returns the exit status of pytest."""
    toml = read_toml(CHECKOUT)
    build = CHECKOUT / "build"
    variant = Path(str(kernels.get_local_kernel(build).__file__)).parent
    environment = {**os.environ, "PYTHONPATH": str(variant)}
    environment["LOCAL_KERNELS"] = f"{toml['general']['hub']['repo-id']}={build}"
    environment.pop("LD_LIBRARY_PATH", None)
    with tempfile.TemporaryDirectory() as folder:
        for file in source_set(toml):
            copy = Path(folder, file)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(CHECKOUT / file, copy)
        options = ["-m", "kernels_ci", "-p", "no:cacheprovider"]
        command = [str(python.absolute()), "-m", "pytest", f"{folder}/tests", *options]
        return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


@click.command(help=__doc__)
@click.argument(
    "python", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=False
)
@click.option("--requirements", is_flag=True, help="Print the packages of the environment.")
def main(python: Path | None, requirements: bool) -> None:
    if requirements:
        names = [*OWN_INPUTS, *check_inputs((CHECKOUT / "flake.nix").read_text())]
        click.echo("\n".join(pinned(names)))
    elif python is not None:
        sys.exit(run_tests(python))
    else:
        raise click.UsageError("give an interpreter, or --requirements")


if __name__ == "__main__":
    main()
