#!/usr/bin/env python3
"""Run the tests marked kernels_ci as kernel-builder's `nix run .#ci-test` does, without Nix.

The tests get kernel-builder's set of files in an empty folder, and load the package from build/. Of the
installed packages they can import Torch, kernels, pytest, the pythonCheckInputs of flake.nix, and what these
require. A run that selects no test fails; with kernel-builder it passes.
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

from builder.package import hub_name, read_toml

CHECKOUT = Path(__file__).resolve().parents[1]
# What kernel-builder adds to pythonCheckInputs (nix-builder/lib/build.nix).
OWN_INPUTS = ["torch", "kernels", "pytest"]
HIDE_PACKAGES = CHECKOUT / "tools" / "builder" / "hide_packages.py"


def check_inputs(flake: str) -> list[str]:
    """The packages of pythonCheckInputs. Their names in Nix are those on PyPI."""
    found = re.search(r"pythonCheckInputs =\s*pkgs:\s*with pkgs;\s*\[([^]]*)\];", flake)
    if found is None:
        raise click.ClickException(
            "flake.nix has no pythonCheckInputs = pkgs: with pkgs; [ names ];"
        )
    return found[1].split()


def source_set(toml: dict) -> set[str]:
    """The files that kernel-builder takes (nix-builder/lib/source-set.nix), as paths in the repository."""
    tables = [toml["torch"], *toml.get("kernel", {}).values()]
    files = {"build.toml", *(source for table in tables for source in table["src"])}
    suffixes = {f".{suffix}" for suffix in toml["torch"].get("pyext", ["py", "pyi"])}
    for folder in ("torch-ext", "tests"):
        found = (path for path in (CHECKOUT / folder).rglob("*") if path.suffix in suffixes)
        files.update(path.relative_to(CHECKOUT).as_posix() for path in found)
    return files


def run_tests() -> int:
    """Returns the exit status of pytest."""
    toml = read_toml(CHECKOUT)
    build = CHECKOUT / "build"
    variant = Path(str(kernels.get_local_kernel(build).__file__)).parent
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    names = [*OWN_INPUTS, *check_inputs((CHECKOUT / "flake.nix").read_text())]
    environment["VISIBLE_PACKAGES"] = " ".join(names)
    environment["LOCAL_KERNELS"] = f"{hub_name(CHECKOUT)[0]}={build}"
    environment.pop("LD_LIBRARY_PATH", None)
    with tempfile.TemporaryDirectory() as folder:
        for file in source_set(toml):
            copy = Path(folder, file)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(CHECKOUT / file, copy)
        plugins = Path(folder, "plugins")
        plugins.mkdir()
        shutil.copy(HIDE_PACKAGES, plugins)
        environment["PYTHONPATH"] = f"{variant}{os.pathsep}{plugins}"
        options = ["-m", "kernels_ci", "-p", "no:cacheprovider", "-p", HIDE_PACKAGES.stem]
        command = [sys.executable, "-m", "pytest", f"{folder}/tests", *options]
        return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


@click.command(help=__doc__)
def main() -> None:
    sys.exit(run_tests())


if __name__ == "__main__":
    main()
