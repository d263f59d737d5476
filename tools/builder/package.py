"""What is built: build.toml for one backend, and the revision of the sources."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from kernels._rust import Build

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Component:
    """The `[torch]` table of build.toml, or a `[kernel.*]` table."""

    sources: list[str]
    include: list[str]
    cxx_flags: list[str]
    cuda_flags: list[str] = field(default_factory=list)
    capabilities: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Package:
    root: Path
    backend: str
    general: dict
    torch: dict
    components: list[Component]

    @classmethod
    def read(cls, root: Path, backend: str) -> Package:
        """Reads build.toml. Raises ValueError where it is not valid or lists a missing file."""
        Build.open(root)  # kernel-builder's own parser and checks
        toml = tomllib.loads((root / "build.toml").read_text())
        if backend not in toml["general"]["backends"]:
            raise ValueError(f"build.toml has no backend {backend}")
        tables = [toml["torch"], *(k for k in toml["kernel"].values() if k["backend"] == backend)]
        components = [
            Component(
                sources=table["src"],
                include=table.get("include", []),
                cxx_flags=table.get("cxx-flags", []),
                cuda_flags=table.get("cuda-flags", []),
                capabilities=table.get("cuda-capabilities", []),
            )
            for table in tables
        ]
        for source in (source for component in components for source in component.sources):
            if not (root / source).is_file():
                raise ValueError(f"build.toml lists {source}, which does not exist")
        return cls(root, backend, toml["general"], toml["torch"], components)

    @property
    def module(self) -> str:
        return self.general["name"].replace("-", "_")

    @property
    def stable_abi(self) -> tuple[int, int]:
        major, minor = self.torch["stable-abi"][self.backend].split(".")
        return int(major), int(minor)

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
        files.pop("_ops.py", None)  # one that kernel-builder has generated
        return files


@dataclass(frozen=True)
class Revision:
    """The commit of the sources: None without Git, or where there is no commit yet."""

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
        """What sets the operators of this revision apart from those of another."""
        if self.commit is None:
            return "local"
        return self.commit[:7] + ("_dirty" if self.dirty else "")
