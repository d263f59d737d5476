"""Builds this checkout without Nix, into build/<variant>/.

Sources, flags, architectures and names come from build.toml. The build is incremental: objects stay
in .build/cpu or in a folder named by the CUDA version (.build/cu130).
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import click
    import kernels  # noqa: F401
    import ninja  # noqa: F401
    import torch
except ModuleNotFoundError as error:
    raise SystemExit(
        f"no module {error.name} in {sys.executable}: run `pip install -r requirements/example.txt`"
    ) from error

from builder.layout import lay_out, write_if_changed
from builder.ninja_file import REGISTRATION_H, ninja_file
from builder.package import Package, PackageError, Revision
from builder.toolchain import Nvcc, ToolchainError, find_cxx, find_nvcc, inspect_nvcc


def compute_name(package: Package, nvcc: Nvcc | None) -> str:
    return "cu{}{}".format(*nvcc.version) if nvcc else package.backend


def variant_name(package: Package, nvcc: Nvcc | None) -> str:
    abi = "{}{}".format(*package.stable_abi)
    compute = compute_name(package, nvcc)
    machine = {"arm64": "aarch64"}.get(platform.machine(), platform.machine())
    return f"torch-stable-abi{abi}-{compute}-{machine}-{platform.system().lower()}"


def check_torch(package: Package) -> None:
    installed = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if installed < package.stable_abi:
        needed = "{}.{}".format(*package.stable_abi)
        raise ToolchainError(f"the build needs Torch {needed} or later, got {torch.__version__}")


@contextmanager
def only_build(folder: Path) -> Iterator[None]:
    """Makes a concurrent build of the same folder wait, because both would write the same objects."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build(
    root: Path,
    backend: str,
    compiler: Path | None,
    jobs: int | None,
    werror: bool,
    verbose: bool,
) -> None:
    package = Package.read(root, backend)
    check_torch(package)
    cxx = find_cxx()
    if backend != "cuda":
        nvcc = None
    elif compiler is None:
        nvcc = find_nvcc(torch.version.cuda)
    else:
        nvcc = inspect_nvcc(compiler.absolute())
    if nvcc:
        package.check_cuda(nvcc.version)
    revision = Revision.read(root)
    extension_id = f"_{package.module}_{backend}_{revision.suffix}"
    folder = Path(".build") / compute_name(package, nvcc)
    extension = root / folder / f"{extension_id}.abi3.so"
    variant = root / "build" / variant_name(package, nvcc)

    with only_build(root / folder):
        write_if_changed(root / folder / "generated" / "registration.h", REGISTRATION_H.encode())
        text = ninja_file(package, extension_id, folder, cxx, nvcc, werror)
        write_if_changed(root / folder / "build.ninja", text.encode())
        command = [sys.executable, "-m", "ninja", "-C", str(root)]
        command += ["-f", str(folder / "build.ninja")]
        command += ["-j", str(jobs)] if jobs else []
        command += ["-v"] if verbose else []
        if subprocess.run(command).returncode != 0 or not extension.is_file():
            raise click.ClickException("the build failed: see the compiler's messages above")
        for old in (root / folder).glob("*.abi3.so"):
            if old != extension:
                old.unlink()
        changed = lay_out(package, extension_id, revision, extension, variant)
    click.echo(f"{'built' if changed else 'up to date:'} {os.path.relpath(variant)}")


@click.command(help=__doc__)
@click.option(
    "--backend",
    type=click.Choice(["cuda", "cpu"]),
    help="Default: cuda if Torch sees a GPU, otherwise cpu.",
)
@click.option(
    "--root",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path(__file__).resolve().parent.parent,
    help="The folder of build.toml. Default: this checkout.",
)
@click.option(
    "--nvcc",
    "compiler",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The CUDA compiler. Default: the first one found that fits the installed Torch.",
)
@click.option("--jobs", "-j", type=click.IntRange(min=1), help="Number of parallel compilations.")
@click.option("--werror", is_flag=True, help="Treat compiler warnings as errors.")
@click.option("--verbose", "-v", is_flag=True, help="Show all commands.")
def main(
    backend: str | None,
    root: Path,
    compiler: Path | None,
    jobs: int | None,
    werror: bool,
    verbose: bool,
) -> None:
    if backend is None:
        backend = "cuda" if torch.version.cuda and torch.cuda.is_available() else "cpu"
    try:
        build(root.resolve(), backend, compiler, jobs, werror, verbose)
    except (ToolchainError, PackageError) as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        files = " and ".join(str(name) for name in (error.filename, error.filename2) if name)
        reason = error.strerror or str(error)
        raise click.ClickException(f"{files}: {reason}" if files else reason) from error


if __name__ == "__main__":
    main()
