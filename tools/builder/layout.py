"""The folder of a build variant, as kernel-builder lays it out and `kernels` loads it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kernels._rust import Digest, DigestAlgorithm

from builder.package import Package, Revision

OPS_PY = '''\
"""The operators of this build. Each build has its own namespace, so that several can be loaded."""

import torch

from . import {id}

ops = torch.ops.{id}


def add_op_namespace_prefix(op_name: str) -> str:
    """Returns the qualified name of this build's operator `op_name`."""
    return f"{id}::{{op_name}}"
'''

COMPATIBILITY_PY = '''\
"""Exports the names of the package in the parent folder: for `import {module}`, and for versions
of `kernels` that look for the package here."""

import importlib.util
import sys
from pathlib import Path


def _load(name, path):
    # `kernels` loads the package under this name, and its operators can be registered only once.
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


_package = _load("{id}", Path(__file__).parent.parent / "__init__.py")

globals().update({{k: v for k, v in vars(_package).items() if not k.startswith("__")}})
__all__ = _package.__all__
'''


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the path to errors without one: those of shutil, and of writes to a full disk."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def write(path: Path, content: bytes) -> None:
    with naming(path):
        path.write_bytes(content)


def remove(path: Path) -> None:
    with naming(path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def write_if_changed(path: Path, content: bytes) -> bool:
    """Replaces the file atomically. Processes that have the old one open keep it."""
    if path.is_file() and path.read_bytes() == content:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(temporary, content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return True


def metadata(package: Package, extension_id: str, revision: Revision, variant: Path) -> bytes:
    """Returns metadata.json for the files in the variant's folder."""
    general = package.general
    content = {"name": general["name"], "id": extension_id, "version": general["version"]}
    content.update({k: general[k] for k in ("license", "upstream", "source") if k in general})
    content["python-depends"] = package.python_depends
    content["backend"] = {"type": package.backend}
    if package.capabilities:
        content["backend"]["archs"] = package.capabilities
    digest = Digest.hash_variant(DigestAlgorithm.SHA256, variant)
    content["digest"] = {"algorithm": "sha256", "files": dict(sorted(digest.files.items()))}
    # The provenance states that kernel-builder did not make this build.
    content["provenance"] = {"kernel-builder": {"version": "tools/build_variant.py"}}
    if revision.commit is not None:
        content["provenance"]["kernel"] = {"commit": revision.commit, "dirty": revision.dirty}
    return (json.dumps(content, indent=2) + "\n").encode()


def lay_out(
    package: Package, extension_id: str, revision: Revision, extension: Path, variant: Path
) -> bool:
    """Installs this build as the folder `variant`; returns whether the folder changed.

    The new folder is assembled beside the extension and moved when complete, so that an interrupted
    build, or a full disk, leaves the old one.
    """
    names = {"id": extension_id, "module": package.module}
    files = {path: file.read_bytes() for path, file in package.python_files().items()}
    files["_ops.py"] = OPS_PY.format(**names).encode()
    files[f"{package.module}/__init__.py"] = COMPATIBILITY_PY.format(**names).encode()
    files[extension.name] = extension.read_bytes()

    staged = extension.parent / "variant"
    remove(staged)
    for path, content in files.items():
        (staged / path).parent.mkdir(parents=True, exist_ok=True)
        write(staged / path, content)
    files["metadata.json"] = metadata(package, extension_id, revision, staged)
    write(staged / "metadata.json", files["metadata.json"])

    if holds(variant, files):
        remove(staged)
        return False
    replaced = extension.parent / "replaced"
    remove(replaced)
    variant.parent.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(variant):
        variant.rename(replaced)
    try:
        staged.rename(variant)
    except OSError:
        if os.path.lexists(replaced):
            replaced.rename(variant)
        raise
    remove(replaced)
    return True


def holds(variant: Path, files: dict[str, bytes]) -> bool:
    """Whether the folder has exactly these files, apart from Python's bytecode."""
    present = {path for path in variant.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    return present == {variant / path for path in files} and all(
        (variant / path).read_bytes() == content for path, content in files.items()
    )
