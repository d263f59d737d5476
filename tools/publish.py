#!/usr/bin/env python3
"""Publishes build/ to the Hub as kernel-builder's upload does, or verifies a download.

The variants and benchmarks/benchmark*.py go to the branch v<version>, the rendered CARD.md to
README.md of main. Everything is checked before the first request. At the end the branch is
downloaded and compared with the files here.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import httpx2
from click import ClickException
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from kernels._rust import Digest, DigestValidationError, Metadata
from kernels.hf_hub import CACHE_DIR

import check_abi
from builder.card import render_card
from builder.package import PackageError, Revision, read_toml

LOCAL_BUILDER = "tools/build_variant.py"  # in the metadata of its builds


@dataclass(frozen=True)
class Variant:
    """A folder of build/ whose files match the digest in its metadata.json."""

    folder: Path
    metadata: Metadata
    files: list[Path]

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
        names = [*metadata.digest.files, "metadata.json", "metadata.json.sigstore"]
        files = [folder / name for name in sorted(names) if (folder / name).exists()]
        return cls(folder, metadata, files)

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


def check_binary(variant: Variant, allow_local_toolchain: bool) -> None:
    """Checks that the extension loads wherever the variant's name promises it does."""
    name, metadata = variant.folder.name, variant.metadata
    extension = variant.folder / f"{metadata.id}.abi3.so"
    if not extension.is_file():
        raise ClickException(f"{name} has no {extension.name}")
    local = []
    if metadata.provenance and metadata.provenance.kernel_builder.version == LOCAL_BUILDER:
        local.append(f"built by {LOCAL_BUILDER}")
    for requirement, result in check_abi.check(extension)[0]:
        if result.startswith("not met"):
            local.append(f"{requirement} {result}")
        elif result != "ok":
            raise ClickException(f"{name} is not fit for publishing: {requirement}: {result}")
    if local:
        fault = f"{name} is no build of kernel-builder's toolchain ({', '.join(local)})"
        if not allow_local_toolchain:
            raise ClickException(f"{fault}: for a rehearsal, pass --allow-local-toolchain")
        click.echo(f"Warning: {fault}", err=True)


def upload(repo_id: str, branch: str, files: dict[str, bytes], card: bytes) -> None:
    api = HfApi()
    repo: dict[str, Any] = {"repo_id": repo_id, "repo_type": "kernel"}
    api.create_repo(**repo, exist_ok=True)
    is_new = branch not in [ref.name for ref in api.list_repo_refs(**repo).branches]
    operations: list = [CommitOperationAdd(path, content) for path, content in files.items()]
    # Binaries first: if their upload fails, no new and empty branch is left.
    api.preupload_lfs_files(**repo, additions=operations, revision="main" if is_new else branch)
    if is_new:
        api.create_branch(**repo, branch=branch)
    replaced = [path.removesuffix("metadata.json") for path in files if "metadata.json" in path]
    for path in api.list_repo_files(**repo, revision=branch):
        if path.startswith((*replaced, "benchmarks/benchmark")) and path not in files:
            operations.append(CommitOperationDelete(path))
    repo["commit_message"] = "Uploaded using tools/publish.py"
    commit = api.create_commit(**repo, operations=operations, revision=branch).oid
    api.create_commit(**repo, operations=[CommitOperationAdd("README.md", card)])
    with TemporaryDirectory() as cache:
        snapshot = Path(
            api.snapshot_download(repo_id, repo_type="kernel", revision=commit, cache_dir=cache)
        )
        for path, content in files.items():
            if (snapshot / path).read_bytes() != content:
                raise OSError(f"the Hub returns other bytes for {path} than were uploaded")


def publish(root: Path, only: str | None, allow_local_toolchain: bool, dry_run: bool) -> None:
    toml = read_toml(root)
    general, commit = toml["general"], Revision.read(root).commit
    backends = [only] if only else general["backends"]
    variants = [v for v in read_variants(root / "build") if v.backend in backends]
    for backend in backends:
        if backend not in [variant.backend for variant in variants]:
            abi = toml["torch"]["stable-abi"][backend].replace(".", "")
            name = f"torch-stable-abi{abi}-{'cu<version>' if backend == 'cuda' else backend}"
            raise ClickException(f"build/{name}-<platform> is missing: build.toml has {backend}")
    for variant in variants:
        check_source(variant, general["version"], commit)
        check_binary(variant, allow_local_toolchain)
    paths = [*root.glob("benchmarks/benchmark*.py"), *(p for v in variants for p in v.files)]
    files = {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(paths)}
    repo_id, branch = general["hub"]["repo-id"], f"v{general['version']}"
    card = render_card(root, general).encode()
    listed = [("main", "README.md", card), *((branch, path, files[path]) for path in files)]
    for revision, path, content in listed:
        click.echo(f"{revision} {sha256(content).hexdigest()} {len(content):9} {path}")
    if dry_run:
        click.echo(f"{repo_id}: {len(listed)} files of commit {commit}, nothing was uploaded")
        return
    try:
        upload(repo_id, branch, files, card)
    except (httpx2.HTTPError, OSError, RuntimeError, ValueError) as error:
        reasons = dict.fromkeys(str(e) for e in (error, error.__cause__) if e)
        reason = " ".join(" ".join(reasons).split())
        raise ClickException(f"publishing {repo_id} {branch} failed: {reason}") from error
    click.echo(f"{repo_id}: {len(listed)} files of commit {commit} are published and compared")


@click.command(help=__doc__)
@click.option(
    "--root",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path(__file__).resolve().parent.parent,
    help="The folder of build.toml and build/. Default: this checkout.",
)
@click.option(
    "--backend",
    type=click.Choice(["cuda", "cpu"]),
    help="Only this one. Default: all of build.toml.",
)
@click.option("--allow-local-toolchain", is_flag=True, help="Accept builds made on this machine.")
@click.option("--dry-run", is_flag=True, help="Check and list the files, without network.")
@click.option("--verify", metavar="FOLDER|REPO", help="Compare a download with its digests.")
@click.option("--version", type=int, help="The version of --verify's repository.")
def main(
    root: Path,
    backend: str | None,
    allow_local_toolchain: bool,
    dry_run: bool,
    verify: str | None,
    version: int | None,
) -> None:
    try:
        if verify is None:
            return publish(root, backend, allow_local_toolchain, dry_run)
        if version is not None:  # the whole branch: this version then loads without network
            verify = HfApi().snapshot_download(
                verify, repo_type="kernel", revision=f"v{version}", cache_dir=CACHE_DIR
            )
        for variant in read_variants(Path(verify)):
            click.echo(f"{variant.folder.name}: {len(variant.files)} files match metadata.json")
    except (PackageError, httpx2.HTTPError, OSError) as error:
        raise ClickException(" ".join(str(error).split())) from error


if __name__ == "__main__":
    main()
