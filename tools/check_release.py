#!/usr/bin/env python3
"""Checks build/ before kernel-builder uploads it, or a download after that.

kernel-builder's upload takes what lies in build/. This refuses a build that is incomplete, changed, of
another commit or version, or not by kernel-builder's toolchain.

    python tools/check_release.py             # build/, before `kernel-builder upload`
    python tools/check_release.py --download  # the version of build.toml, from the Hub
    python tools/check_release.py FOLDER      # builds in a folder, such as a snapshot in the Hub's cache
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click
import httpx2
from click import ClickException
from huggingface_hub import snapshot_download
from kernels._rust import Digest, DigestValidationError, Metadata
from kernels.hf_hub import CACHE_DIR

import check_abi
from builder.package import PackageError, Revision, hub_name, read_toml

LOCAL_BUILDER = "tools/build_variant.py"  # in the metadata of its builds
CHECKOUT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Variant:
    """A folder of build/ whose files match the digest in its metadata.json."""

    folder: Path
    metadata: Metadata
    files: set[str]

    @classmethod
    def read(cls, folder: Path) -> Variant:
        path = folder / "metadata.json"
        try:
            metadata = Metadata.read_from_file(path)
            if metadata.digest is None:
                raise ClickException(f"{path} has no digest")
            metadata.digest.validate(Digest.hash_variant(metadata.digest.algorithm, folder))
        except ValueError as error:
            raise ClickException(f"{path} is not valid: {error}") from error
        except DigestValidationError as error:
            found = "; ".join(str(violation) for violation in error.violations)
            raise ClickException(f"{folder} does not match its metadata.json: {found}") from error
        return cls(folder, metadata, set(metadata.digest.files))

    @property
    def backend(self) -> str:
        return str(self.metadata.backend.backend_type)


def read_variants(folder: Path) -> list[Variant]:
    variants = [Variant.read(path.parent) for path in sorted(folder.rglob("metadata.json"))]
    if not variants:
        raise ClickException(f"{folder} holds no build variant: no metadata.json was found")
    return variants


def check_source(variant: Variant, version: int, commit: str | None) -> None:
    """Checks that the variant is a build of this version and of the commit that is checked out."""
    metadata, provenance = variant.metadata, variant.metadata.provenance
    built = provenance.kernel.commit if provenance and provenance.kernel else "unknown"
    if metadata.version != version:
        reason = f"is of version {metadata.version}, build.toml has version {version}"
    elif metadata.id.endswith("_dirty") or provenance and provenance.dirty:
        reason = "was built with uncommitted changes"
    elif built != commit:
        reason = f"was built from commit {built}, the checkout is at {commit}"
    else:
        return
    raise ClickException(f"{variant.folder.name} {reason}: build it again from a clean checkout")


def check_files(variant: Variant) -> None:
    """Checks that nothing beside the build is uploaded: bytecode is in no digest."""
    signed = {"metadata.json", "metadata.json.sigstore"}
    paths = (path for path in variant.folder.rglob("*") if path.is_file())
    found = {path.relative_to(variant.folder).as_posix() for path in paths}
    if more := found - variant.files - signed:
        raise ClickException(f"{variant.folder.name} holds files that no build has: {min(more)}")


def check_binary(variant: Variant) -> None:
    """Checks that the extension loads wherever the variant's name promises it does."""
    name, metadata = variant.folder.name, variant.metadata
    extension = variant.folder / f"{metadata.id}.abi3.so"
    if not extension.is_file():
        raise ClickException(f"{name} has no {extension.name}")
    if metadata.provenance and metadata.provenance.kernel_builder.version == LOCAL_BUILDER:
        raise ClickException(f"{name} was built by {LOCAL_BUILDER}: build it with kernel-builder")
    for requirement, result in check_abi.check(extension)[0]:
        if result != "ok":
            raise ClickException(f"{name} is not fit for publishing: {requirement}: {result}")


def check_build(root: Path) -> list[Variant]:
    """Checks what kernel-builder would upload from a checkout."""
    toml, (_, version) = read_toml(root), hub_name(root)
    if (root / "result").exists():
        raise ClickException("kernel-builder would upload result/, not build/: remove it")
    variants = read_variants(root / "build")
    for backend in toml["general"]["backends"]:
        if backend not in [variant.backend for variant in variants]:
            abi = toml["torch"]["stable-abi"][backend].replace(".", "")
            name = f"torch-stable-abi{abi}-{'cu<version>' if backend == 'cuda' else backend}"
            raise ClickException(f"build/{name}-<platform> is missing: build.toml has {backend}")
    for variant in variants:
        check_source(variant, version, Revision.read(root).commit)
        check_files(variant)
        check_binary(variant)
    if not (root / "build" / "CARD.md").is_file():
        raise ClickException("build/CARD.md, the page on the Hub, is missing: build it again")
    return variants


def download(root: Path) -> Path:
    """The whole branch of the version in build.toml, which then also loads without network."""
    repo_id, version = hub_name(root)
    where = {"revision": f"v{version}", "cache_dir": CACHE_DIR}
    return Path(snapshot_download(repo_id, repo_type="kernel", **where))


@click.command(help=__doc__.split("\n\n")[0])
@click.argument("folder", required=False, type=click.Path(exists=True, path_type=Path))
@click.option("--download", "is_download", is_flag=True, help="Check the version on the Hub.")
@click.option("--root", type=Path, default=CHECKOUT, help="The checkout. Default: this one.")
def main(folder: Path | None, is_download: bool, root: Path) -> None:
    try:
        if is_download:
            folder = download(root)
        variants = check_build(root) if folder is None else read_variants(folder)
    except (PackageError, httpx2.HTTPError, OSError) as error:
        raise ClickException(" ".join(str(error).split())) from error
    for variant in variants:
        click.echo(f"{variant.folder.name}: {len(variant.files)} files match metadata.json")


if __name__ == "__main__":
    main()
