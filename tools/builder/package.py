"""The package to build: build.toml for one backend, and the revision of the sources."""

from __future__ import annotations

import operator
import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import tomllib
from kernels._rust import Build

CXX_SUFFIXES = {".cpp", ".cc", ".cxx"}
CUDA_SUFFIXES = {".cu"}
HEADER_SUFFIXES = {".h", ".hh", ".hpp", ".cuh", ".inl"}
SOURCE_SUFFIXES = CXX_SUFFIXES | CUDA_SUFFIXES | HEADER_SUFFIXES
PYTHON_SUFFIXES = {".py", ".pyi"}
GENERATED = {"torch-ext/registration.h"}  # by kernel-builder


def version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)


class PackageError(ValueError):
    """The package cannot be built. The message is one sentence that names the file."""


@dataclass(frozen=True)
class Component:
    """The `[torch]` table of build.toml, or a `[kernel.*]` table."""

    sources: list[str]  # paths from the root of the package, in the order of build.toml
    include: list[str]
    cxx_flags: list[str]
    cuda_flags: list[str] = field(default_factory=list)
    capabilities: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, table: dict) -> Component:
        return cls(
            sources=[os.path.normpath(source) for source in table.get("src", [])],
            include=table.get("include", []),
            cxx_flags=table.get("cxx-flags", []),
            cuda_flags=table.get("cuda-flags", []),
            capabilities=table.get("cuda-capabilities", []),
        )

    @property
    def compiled(self) -> list[str]:
        """The sources without headers."""
        return [source for source in self.sources if Path(source).suffix not in HEADER_SUFFIXES]


def read_text(path: Path) -> str:
    """Returns the text of a source. Raises PackageError if it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PackageError(f"{path} is not UTF-8: byte {error.start} is {error.reason}") from error


def read_toml(root: Path) -> dict:
    """Returns the content of build.toml, validated by kernel-builder's parser."""
    path = root / "build.toml"
    if not path.is_file():
        raise PackageError(f"there is no file {path}")
    try:
        toml = tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise PackageError(f"{path} is not TOML: {error}") from error
    try:
        Build.open(root)
    except ValueError as error:
        reason = str(error).split(f"{path}: ", 1)[-1]
        raise PackageError(f"{path} is not valid: {' '.join(reason.split())}") from error
    return toml


def hub_name(root: Path) -> tuple[str, int]:
    """The repository on the Hub and the version that build.toml names."""
    general = read_toml(root)["general"]
    return general["hub"]["repo-id"], general["version"]


def check_sources(root: Path, tables: list[dict]) -> None:
    """Checks that all files listed in one build's tables exist and are listed once."""
    compiled: Counter[str] = Counter()
    for table in tables:
        sources = Component.read(table).sources
        for source, count in Counter(sources).items():
            if count > 1:
                raise PackageError(f"build.toml lists {source} twice")
            if os.path.isabs(source) or source.startswith(".."):
                raise PackageError(f"build.toml lists {source}, which is outside of {root}")
            if not (root / source).is_file():
                found = [p for p in unlisted_sources(root, tables) if Path(p).name == source]
                hint = f": is it {found[0]}?" if found else ""
                what = "is no file" if (root / source).exists() else "does not exist"
                raise PackageError(f"build.toml lists {source}, which {what}{hint}")
            if Path(source).suffix not in SOURCE_SUFFIXES:
                raise PackageError(
                    f"build.toml lists {source}, which is none of {', '.join(sorted(SOURCE_SUFFIXES))}"
                )
            read_text(root / source)
        compiled.update(Component.read(table).compiled)
    if not compiled:
        raise PackageError(f"{root / 'build.toml'} lists no source to compile")
    for source, count in compiled.items():
        if count > 1:
            raise PackageError(f"build.toml lists {source} in two tables of one backend")


def unlisted_sources(root: Path, tables: list[dict]) -> Iterator[str]:
    """Yields sources in or below the folders of listed sources that build.toml does not list.

    kernel-builder copies only listed files, so its builds would lack them.
    """
    listed = {source for table in tables for source in Component.read(table).sources} | GENERATED
    folders = {Path(source).parts[0] for source in listed if len(Path(source).parts) > 1}
    for folder in sorted(folders):
        for path in sorted((root / folder).rglob("*")):
            is_source = path.suffix in SOURCE_SUFFIXES and not path.name.startswith(".")
            if is_source and path.is_file():
                name = path.relative_to(root).as_posix()
                if name not in listed:
                    yield name


@dataclass(frozen=True)
class Package:
    root: Path
    backend: str
    general: dict
    torch: dict
    components: list[Component]

    @classmethod
    def read(cls, root: Path, backend: str) -> Package:
        """Reads build.toml. Raises PackageError if the package cannot be built from it."""
        toml = read_toml(root)
        if "torch" not in toml:
            raise PackageError(
                f"{root / 'build.toml'} has no table [torch]: there is nothing to build"
            )
        if backend not in toml["general"]["backends"]:
            raise PackageError(f"build.toml has no backend {backend}")
        kernels = list(toml.get("kernel", {}).values())
        tables = [toml["torch"], *(kernel for kernel in kernels if kernel["backend"] == backend)]
        check_sources(root, tables)
        for source in unlisted_sources(root, [toml["torch"], *kernels]):
            raise PackageError(
                f"build.toml does not list {source}: add it to a src, or remove the file"
            )
        package = cls(root, backend, toml["general"], toml["torch"], [*map(Component.read, tables)])
        if package.stable_abi_text is None:
            raise PackageError(
                f"build.toml has no version for {backend} in [torch.stable-abi]: only builds of "
                "Torch's stable ABI can be made here"
            )
        if "__init__.py" not in package.python_files():
            init = f"torch-ext/{package.module}/__init__.py"
            raise PackageError(f"there is no {init}, the module of {package.general['name']!r}")
        for file in package.python_files().values():
            if file.suffix in PYTHON_SUFFIXES:
                read_text(file)
        return package

    @property
    def module(self) -> str:
        return self.general["name"].replace("-", "_")

    @property
    def stable_abi_text(self) -> str | None:
        versions = self.torch.get("stable-abi", {})
        return versions if isinstance(versions, str) else versions.get(self.backend)

    @property
    def stable_abi(self) -> tuple[int, int]:
        assert self.stable_abi_text is not None  # otherwise the package would not have been read
        return version(self.stable_abi_text)

    def check_cuda(self, cuda: tuple[int, int]) -> None:
        """Raises PackageError if build.toml excludes this version of CUDA."""
        limits = self.general.get("cuda", {})
        for name, excludes in (("minver", operator.lt), ("maxver", operator.gt)):
            if name in limits and excludes(cuda, version(limits[name])):
                raise PackageError(
                    f"build.toml excludes CUDA {cuda[0]}.{cuda[1]}: the {name} of [general.cuda] is "
                    f"{limits[name]}"
                )

    @property
    def capabilities(self) -> list[str]:
        return sorted({c for component in self.components for c in component.capabilities})

    @property
    def python_depends(self) -> list[str]:
        of_backend = self.general.get(self.backend, {})
        return self.general.get("python-depends", []) + of_backend.get("python-depends", [])

    def python_files(self) -> dict[str, Path]:
        """Returns {path inside the package: file}."""
        folder = self.root / "torch-ext" / self.module
        suffixes = {f".{extension}" for extension in self.torch.get("pyext", ["py", "pyi"])}
        files = {
            path.relative_to(folder).as_posix(): path
            for path in sorted(folder.rglob("*"))
            if path.suffix in suffixes and path.is_file()
        }
        files.pop("_ops.py", None)  # generated by kernel-builder
        return files


@dataclass(frozen=True)
class Revision:
    """The commit of the sources; None without Git or without a commit."""

    commit: str | None
    dirty: bool

    @classmethod
    def read(cls, root: Path) -> Revision:
        def git(*arguments: str) -> str | None:
            command = ["git", "-C", str(root), *arguments]
            try:
                process = subprocess.run(command, capture_output=True, text=True, check=True)
            except (OSError, subprocess.CalledProcessError):
                return None
            return process.stdout.strip()

        # A copy of the sources inside another project's checkout has no revision of its own.
        top = git("rev-parse", "--show-toplevel")
        commit = git("rev-parse", "--verify", "HEAD")
        if top is None or commit is None or Path(top).resolve() != root.resolve():
            return cls(None, False)
        return cls(commit, bool(git("status", "--porcelain", "--untracked-files=no")))

    @property
    def suffix(self) -> str:
        """The suffix that distinguishes this revision's operators from another's."""
        if self.commit is None:
            return "local"
        return self.commit[:7] + ("_dirty" if self.dirty else "")
