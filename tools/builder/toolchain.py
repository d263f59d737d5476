"""Finds the compilers: first those in the environment and on PATH, then those installed by pip."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PIP_CUDA_TOOLS = "pip install -r requirements/cuda-tools.txt"


class ToolchainError(RuntimeError):
    """A tool is missing or has the wrong version. The message says what to install."""


@dataclass(frozen=True)
class Nvcc:
    path: Path
    root: Path  # of the toolkit: include/, lib/ or lib64/
    version: tuple[int, int]

    @property
    def library_dirs(self) -> list[Path]:
        return [folder for folder in (self.root / "lib64", self.root / "lib") if folder.is_dir()]


def cuda_tools(name: str) -> Iterator[Path]:
    """Yields each `name` in the CUDA toolkits on this machine, the preferred one first."""
    folders = [Path(os.environ[v]) / "bin" for v in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(v)]
    folders += [Path(folder) for folder in os.get_exec_path()]
    folders.append(Path("/usr/local/cuda/bin"))
    nvidia = importlib.util.find_spec("nvidia")
    for location in (nvidia and nvidia.submodule_search_locations) or []:
        folders += sorted(Path(location).glob("*/bin"), reverse=True)
    for folder in folders:
        if tool := shutil.which(name, path=str(folder)):
            yield Path(tool)


def cuda_tool(name: str) -> Path:
    """Returns the preferred `name` of the CUDA toolkits, or raises ToolchainError."""
    for tool in cuda_tools(name):
        return tool
    raise ToolchainError(
        f"no {name} in CUDA_HOME, on PATH or in site-packages: run `{PIP_CUDA_TOOLS}`"
    )


def inspect_nvcc(path: Path) -> Nvcc:
    """Returns the nvcc with its version and toolkit. Raises ToolchainError if it does not report them."""
    try:
        release = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
        # nvcc on PATH may be a wrapper script, so it reports the location of its toolkit.
        dry_run: list[str | Path] = [path, "--dryrun", "-x", "cu", "-c", os.devnull]
        plan = subprocess.run(dry_run, capture_output=True, text=True).stderr
    except OSError as error:
        raise ToolchainError(f"{path} cannot be run: {error.strerror}") from error
    version = re.search(r"release (\d+)\.(\d+)", release)
    top = re.search(r"^#\$ TOP=(.+)$", plan, re.MULTILINE)
    if version is None or top is None:
        raise ToolchainError(f"{path} does not report release and toolkit as nvcc does")
    return Nvcc(path, Path(top[1].strip()).resolve(), (int(version[1]), int(version[2])))


def find_nvcc(torch_cuda: str | None) -> Nvcc:
    """Returns the nvcc to build with.

    Args:
        torch_cuda: CUDA version of the installed Torch ("13.0"), or None for a Torch without CUDA.
            Torch loads kernels of the same CUDA major version and the same or an older minor version.

    Raises:
        ToolchainError: no nvcc, none in CUDA_HOME or CUDA_PATH, or none that fits this Torch.
    """
    for name in ("CUDA_HOME", "CUDA_PATH"):
        folder = os.environ.get(name)
        if folder and not shutil.which("nvcc", path=os.path.join(folder, "bin")):
            raise ToolchainError(f"{name} is {folder}, which has no bin/nvcc")
    rejected = []
    for path in cuda_tools("nvcc"):
        nvcc = inspect_nvcc(path)
        if torch_cuda is None or _loads(torch_cuda, nvcc):
            return nvcc
        rejected.append(f"{nvcc.version[0]}.{nvcc.version[1]} ({nvcc.path})")
    if rejected:
        raise ToolchainError(
            f"Torch for CUDA {torch_cuda} does not load kernels of nvcc {', '.join(rejected)}: set "
            "CUDA_HOME to a toolkit of the same major and the same or an older minor version"
        )
    raise ToolchainError(
        "no nvcc in CUDA_HOME, on PATH or in site-packages: install the CUDA toolkit, or run "
        f"`{PIP_CUDA_TOOLS}`"
    )


def _loads(torch_cuda: str, nvcc: Nvcc) -> bool:
    major, minor = (int(part) for part in torch_cuda.split(".")[:2])
    return nvcc.version[0] == major and nvcc.version[1] <= minor


def find_cxx() -> str:
    """Returns the C++ compiler: CXX, otherwise g++, otherwise clang++."""
    named = os.environ.get("CXX")
    for name in [named] if named else ["g++", "clang++"]:
        if path := shutil.which(name):
            break
    else:
        if named:
            raise ToolchainError(f"CXX is {named!r}, which does not exist")
        raise ToolchainError("no C++ compiler: install g++ (11 or later), or set CXX")
    command = [path, "-std=gnu++20", "-x", "c++", "-E", "-dM", os.devnull]
    try:
        macros = subprocess.run(command, capture_output=True, text=True).stdout
    except OSError as error:
        raise ToolchainError(f"{path} cannot be run: {error.strerror}") from error
    if re.search(r"#define __cplusplus 202\d{3}L", macros) is None:
        raise ToolchainError(
            f"{path} does not compile C++20: install g++ (11 or later), or set CXX"
        )
    return path


def takes_flag(cxx: str, flag: str) -> bool:
    command = [cxx, flag, "-x", "c++", "-E", os.devnull]
    return subprocess.run(command, capture_output=True).returncode == 0


def main() -> None:
    """Prints the paths of the CUDA tools named on the command line; fails if one is missing."""
    import torch

    try:
        for name in sys.argv[1:]:
            fitting = name == "nvcc" and find_nvcc(torch.version.cuda).path
            print(fitting or cuda_tool(name))
    except ToolchainError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
