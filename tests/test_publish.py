"""Publishing: what would be uploaded, and what is refused. tools/release_check also publishes."""

import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from kernels._rust import Digest, DigestAlgorithm

import publish
from builder.card import render_card
from builder.package import read_toml
from conftest import CHECKOUT, REPO_ID
from processes import run

MODULE = "h100_diffusers_kernels"
VARIANTS = {
    "cuda": "torch-stable-abi211-cu130-x86_64-linux",
    "cpu": "torch-stable-abi211-cpu-x86_64-linux",
}
COPIED = ("build.toml", "CARD.md", "benchmarks/benchmark.py")
COPIED += tuple(f"torch-ext/{MODULE}/{name}.py" for name in ("__init__", "layers"))


class Release:
    """A checkout with variants of both backends: this checkout's build, with the metadata of others."""

    def __init__(self, root: Path, commit: str):
        self.root, self.commit = root, commit

    def folder(self, backend) -> Path:
        return self.root / "build" / VARIANTS[backend]

    def edit(self, backend, /, **changes):
        """Changes the variant's metadata.json, which has no digest of its own."""
        path = self.folder(backend) / "metadata.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    def dry_run(self, *options):
        return invoke("--root", self.root, "--dry-run", *options)


def kernel_of(release, **changes):
    return {
        "kernel-builder": {"version": "0.17.0"},
        "kernel": {"commit": release.commit, "dirty": False, **changes},
    }


def invoke(*arguments):
    return CliRunner().invoke(publish.main, [str(argument) for argument in arguments])


def sentence(result) -> str:
    """With which the command refused to start: nothing else was printed."""
    assert isinstance(result.exception, SystemExit) and result.exit_code == 1, result.exception
    assert result.stdout == ""
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("Error: ")
    return line.removeprefix("Error: ")


@pytest.fixture(scope="module")
def complete(tmp_path_factory, kernel):
    root = tmp_path_factory.mktemp("release")
    for name in COPIED:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(CHECKOUT / name, root / name)
    (root / ".gitignore").write_text("/build/\n")
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    for command in (("init", "-q"), ("add", "-A"), (*identity, "commit", "-q", "-m", "release")):
        assert run("git", "-C", root, *command).returncode == 0
    commit = run("git", "-C", root, "rev-parse", "HEAD").stdout.strip()
    release, build = Release(root, commit), Path(kernel.__file__).parent
    (extension,) = build.glob("*.abi3.so")
    for backend in VARIANTS:
        folder, name = release.folder(backend), f"_{MODULE}_{backend}_{commit[:7]}"
        shutil.copytree(build, folder, ignore=shutil.ignore_patterns("__pycache__"))
        (folder / extension.name).rename(folder / f"{name}.abi3.so")
        files = Digest.hash_variant(DigestAlgorithm.SHA256, folder).files
        changes = {"id": name, "backend": {"type": backend}, "provenance": kernel_of(release)}
        release.edit(backend, digest={"algorithm": "sha256", "files": files}, **changes)
    return release


@pytest.fixture
def release(complete, tmp_path):
    shutil.copytree(complete.root, tmp_path, dirs_exist_ok=True)
    return Release(tmp_path, complete.commit)


def test_dry_run_lists_what_would_be_uploaded(release):
    """Signatures too, and no bytecode."""
    cached = release.folder("cpu") / "__pycache__/layers.cpython-311.pyc"
    cached.parent.mkdir()
    cached.write_bytes(b"")
    (release.folder("cpu") / "metadata.json.sigstore").write_text("{}")
    result = release.dry_run()
    assert result.exit_code == 0 and result.stderr == "", result.output
    *lines, last = result.stdout.splitlines()
    assert last == f"{REPO_ID}: {len(lines)} files of commit {release.commit}, nothing was uploaded"
    card = render_card(release.root, read_toml(release.root)["general"])
    files = {"main README.md": card.encode()}
    paths = [*(release.root / "build").rglob("*.*"), *(release.root / "benchmarks").iterdir()]
    for path in set(paths) - {cached}:
        files[f"v1 {path.relative_to(release.root)}"] = path.read_bytes()
    expected = {
        (branch, hashlib.sha256(content).hexdigest(), str(len(content)), path)
        for (branch, path), content in ((key.split(), content) for key, content in files.items())
    }
    assert {tuple(line.split()) for line in lines} == expected
    assert sum(line.endswith(".abi3.so") for line in lines) == 2


def test_one_backend(release):
    shutil.rmtree(release.folder("cuda"))
    result = release.dry_run("--backend", "cpu")
    assert result.exit_code == 0 and VARIANTS["cpu"] in result.stdout


def remove(backend):
    return lambda release: shutil.rmtree(release.folder(backend))


def change_a_byte(release):
    path = release.folder("cuda") / "layers.py"
    path.write_bytes(path.read_bytes().replace(b"eps", b"epz", 1))


REFUSED = {
    "no CUDA variant": (
        remove("cuda"),
        "build/torch-stable-abi211-cu<version>-<platform> is missing: build.toml has cuda",
    ),
    "no CPU variant": (
        remove("cpu"),
        "build/torch-stable-abi211-cpu-<platform> is missing: build.toml has cpu",
    ),
    "no variant": (
        lambda release: shutil.rmtree(release.root / "build"),
        "{root}/build holds no build variant: no metadata.json was found",
    ),
    "changed byte": (
        change_a_byte,
        "{root}/build/{cuda} does not match its metadata.json: "
        "File hash mismatch for layers.py: expected: .*, got: .*",
    ),
    "uncommitted changes": (
        lambda release: release.edit("cuda", provenance=kernel_of(release, dirty=True)),
        "{cuda} was built with uncommitted changes: build it again from a clean checkout",
    ),
    "other commit": (
        lambda release: release.edit("cuda", provenance=kernel_of(release, commit="1" * 40)),
        "{cuda} was built from commit 1{40}, the checkout is at {commit}: "
        "build it again from a clean checkout",
    ),
    "no commit": (
        lambda release: release.edit("cuda", provenance={"kernel-builder": {"version": "1"}}),
        "{cuda} was built from commit unknown, the checkout is at {commit}: "
        "build it again from a clean checkout",
    ),
    "other version": (
        lambda release: release.edit("cuda", version=2),
        "{cuda} is of version 2, build.toml has version 1: build it again from a clean checkout",
    ),
    "local build": (
        lambda release: release.edit(
            "cuda",
            provenance=kernel_of(release) | {"kernel-builder": {"version": publish.LOCAL_BUILDER}},
        ),
        "{cuda} is no build of kernel-builder's toolchain (built by tools/build_variant.py): "
        "for a rehearsal, pass --allow-local-toolchain",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(release, name):
    change, message = REFUSED[name]
    change(release)
    for key, value in {"root": release.root, "commit": release.commit, **VARIANTS}.items():
        message = message.replace(f"{{{key}}}", str(value))
    pattern = re.escape(message).replace(r"\.\*", ".*").replace(r"1\{40\}", "1{40}")
    assert re.fullmatch(pattern, sentence(release.dry_run()))


def test_verify(release):
    result = invoke("--verify", release.root)
    assert result.exit_code == 0
    folder = release.folder("cuda")
    count = sum(path.is_file() for path in folder.rglob("*"))
    names = sorted(VARIANTS.values())
    assert result.stdout == "".join(f"{n}: {count} files match metadata.json\n" for n in names)
    (folder / "new.py").touch()
    fault = f"{folder} does not match its metadata.json: Unknown file: new.py"
    assert fault in sentence(invoke("--verify", release.root))


def test_source_is_one_repository():
    source = read_toml(CHECKOUT)["general"]["source"]
    assert source.endswith(f"/{REPO_ID}")
    assert f"[Unreleased]: {source}/commits/main" in (CHECKOUT / "CHANGELOG.md").read_text()
    assert f"({source})" in render_card(CHECKOUT, read_toml(CHECKOUT)["general"])
