"""What is refused before an upload and after a download. tools/release_check also loads downloads."""

import json
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from kernels._rust import Digest, DigestAlgorithm

import check_release
from builder.card import render_card
from builder.package import read_toml
from conftest import CHECKOUT, REPO_ID, VERSION
from processes import run

MODULE = "h100_diffusers_kernels"
VARIANTS = {
    "cuda": "torch-stable-abi211-cu130-x86_64-linux",
    "cpu": "torch-stable-abi211-cpu-x86_64-linux",
}


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

    def check(self):
        return invoke("--root", self.root)


def kernel_of(release, **changes):
    return {
        "kernel-builder": {"version": "0.17.0"},
        "kernel": {"commit": release.commit, "dirty": False, **changes},
    }


def invoke(*arguments):
    return CliRunner().invoke(check_release.main, [str(argument) for argument in arguments])


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
    shutil.copy(CHECKOUT / "build.toml", root)
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
    (root / "build" / "CARD.md").touch()  # by kernel-builder
    return release


@pytest.fixture
def release(complete, tmp_path):
    shutil.copytree(complete.root, tmp_path, dirs_exist_ok=True)
    return Release(tmp_path, complete.commit)


def test_a_complete_build_passes(release):
    (release.folder("cpu") / "metadata.json.sigstore").write_text("{}")
    result = release.check()
    assert result.exit_code == 0 and result.stderr == "", result.output
    assert result.stdout == told(release)


def told(release) -> str:
    files = [path for path in release.folder("cuda").rglob("*.*") if "metadata" not in path.name]
    names = sorted(VARIANTS.values())
    return "".join(f"{name}: {len(files)} files match metadata.json\n" for name in names)


def remove(backend):
    return lambda release: shutil.rmtree(release.folder(backend))


def change_a_byte(release):
    path = release.folder("cuda") / "layers.py"
    path.write_bytes(path.read_bytes().replace(b"eps", b"epz", 1))


def add(path):
    path.parent.mkdir()
    path.touch()


REFUSED = {
    "no CUDA variant": (
        remove("cuda"),
        "build/torch-stable-abi211-cu<version>-<platform> is missing: build.toml has cuda",
    ),
    "no CPU variant": (
        remove("cpu"),
        "build/torch-stable-abi211-cpu-<platform> is missing: build.toml has cpu",
    ),
    "bytecode": (
        lambda release: add(release.folder("cpu") / "__pycache__" / "layers.cpython-311.pyc"),
        "{cpu} holds files that no build has: __pycache__/layers.cpython-311.pyc",
    ),
    "no card": (
        lambda release: (release.root / "build" / "CARD.md").unlink(),
        "build/CARD.md, the page on the Hub, is missing: build it again",
    ),
    "result of nix build": (
        lambda release: (release.root / "result").mkdir(),
        "kernel-builder would upload result/, not build/: remove it",
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
        lambda release: release.edit("cuda", version=VERSION + 1),
        f"{{cuda}} is of version {VERSION + 1}, build.toml has version {VERSION}: "
        "build it again from a clean checkout",
    ),
    "local build": (
        lambda release: release.edit(
            "cuda",
            provenance=kernel_of(release)
            | {"kernel-builder": {"version": check_release.LOCAL_BUILDER}},
        ),
        "{cuda} was built by tools/build_variant.py: build it with kernel-builder",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(release, name):
    change, message = REFUSED[name]
    change(release)
    for key, value in {"root": release.root, "commit": release.commit, **VARIANTS}.items():
        message = message.replace(f"{{{key}}}", str(value))
    pattern = re.escape(message).replace(r"\.\*", ".*").replace(r"1\{40\}", "1{40}")
    assert re.fullmatch(pattern, sentence(release.check()))


def test_a_folder(release):
    """A download has no checkout, and its files may have been imported."""
    add(release.folder("cpu") / "__pycache__" / "layers.cpython-311.pyc")
    result = invoke(release.root / "build")
    assert result.exit_code == 0 and result.stdout == told(release)
    folder = release.folder("cuda")
    (folder / "new.py").touch()
    fault = f"{folder} does not match its metadata.json: Unknown file: new.py"
    assert fault in sentence(invoke(release.root / "build"))


def test_source_is_one_repository():
    source = read_toml(CHECKOUT)["general"]["source"]
    assert source.endswith(f"/{REPO_ID}")
    assert f"[Unreleased]: {source}/commits/main" in (CHECKOUT / "CHANGELOG.md").read_text()
    assert f"({source})" in render_card(CHECKOUT, read_toml(CHECKOUT)["general"])
