"""Publishing: what is refused, and a release to a Hub on this machine that the real clients load from."""

import base64
import hashlib
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from huggingface_hub import snapshot_download
from kernels._rust import Digest, DigestAlgorithm

import publish
from builder.card import render_card
from builder.package import read_toml
from conftest import CHECKOUT, REPO_ID
from hub_server import Hub
from processes import TOOLS, run

MODULE = "h100_diffusers_kernels"
VARIANTS = {
    "cuda": "torch-stable-abi211-cu130-x86_64-linux",
    "cpu": "torch-stable-abi211-cpu-x86_64-linux",
}
PUBLISHED = ("build.toml", "CARD.md", "benchmarks/benchmark.py")


def commit(root):
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    for command in (("init", "-q"), ("add", "-A"), (*identity, "commit", "-q", "-m", "release")):
        process = run("git", "-C", root, *command)
        assert process.returncode == 0, process.stderr
    return run("git", "-C", root, "rev-parse", "HEAD").stdout.strip()


class Release:
    """A checkout with variants of both backends: this checkout's build, with the metadata of others."""

    def __init__(self, root: Path, build: Path):
        self.root, self.build = root, build
        for name in (*PUBLISHED, *(f"torch-ext/{MODULE}/{m}.py" for m in ("__init__", "layers"))):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(CHECKOUT / name, root / name)
        (root / ".gitignore").write_text("/build/\n")
        self.commit = commit(root)
        for backend in VARIANTS:
            self.write(backend)

    def write(self, backend, extension=None, **changes):
        """Writes the variant. `changes` are to its metadata.json."""
        variant = self.root / "build" / VARIANTS[backend]
        shutil.rmtree(variant, ignore_errors=True)
        ignored = shutil.ignore_patterns("__pycache__", "*.abi3.so", "metadata.json")
        shutil.copytree(self.build, variant, ignore=ignored)
        (built,) = self.build.glob("*.abi3.so")
        metadata = json.loads((self.build / "metadata.json").read_text())
        metadata["id"] = f"_{MODULE}_{backend}_{self.commit[:7]}"
        metadata["backend"] = {"type": backend}
        provenance = {"commit": self.commit, "dirty": False}
        metadata["provenance"] = {"kernel-builder": {"version": "0.17.0"}, "kernel": provenance}
        metadata.update(changes)
        shutil.copy(extension or built, variant / f"{metadata['id']}.abi3.so")
        digest = Digest.hash_variant(DigestAlgorithm.SHA256, variant)
        metadata["digest"] = {"algorithm": "sha256", "files": digest.files}
        (variant / "metadata.json").write_text(json.dumps(metadata))

    def file(self, backend, name) -> Path:
        return self.root / "build" / VARIANTS[backend] / name

    def dry_run(self, *options):
        return invoke("--root", self.root, "--dry-run", *options)


def invoke(*arguments):
    return CliRunner().invoke(publish.main, [str(argument) for argument in arguments])


def sentence(result) -> str:
    """With which the command refused to start: nothing else was printed."""
    assert isinstance(result.exception, SystemExit) and result.exit_code == 1, result.exception
    assert result.stdout == ""
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("Error: ")
    return line.removeprefix("Error: ")


@pytest.fixture
def release(tmp_path, kernel):
    return Release(tmp_path, Path(kernel.__file__).parent)


# -- Without a Hub -----------------------------------------------------------------------------


def test_dry_run_lists_what_would_be_uploaded(release):
    result = release.dry_run()
    assert result.exit_code == 0 and result.stderr == "", result.output
    *lines, last = result.stdout.splitlines()
    assert last == f"{REPO_ID}: {len(lines)} files of commit {release.commit}, nothing was uploaded"
    files = {"main README.md": render_card(release.root, read_toml(release.root)["general"])}
    paths = [*(release.root / "build").rglob("*.*"), *(release.root / "benchmarks").iterdir()]
    for path in paths:
        files[f"v1 {path.relative_to(release.root)}"] = path.read_bytes()
    files["main README.md"] = files["main README.md"].encode()
    expected = {
        (branch, hashlib.sha256(content).hexdigest(), str(len(content)), path)
        for (branch, path), content in ((key.split(), content) for key, content in files.items())
    }
    assert {tuple(line.split()) for line in lines} == expected
    assert sum(line.endswith(".abi3.so") for line in lines) == 2


def test_signatures_are_uploaded_and_bytecode_is_not(release):
    cached = release.file("cpu", "__pycache__/layers.cpython-311.pyc")
    cached.parent.mkdir()
    cached.write_bytes(b"")
    release.file("cpu", "metadata.json.sigstore").write_text("{}")
    result = release.dry_run()
    assert result.exit_code == 0 and "pyc" not in result.stdout
    assert result.stdout.count("metadata.json.sigstore") == 1


def test_one_backend(release):
    shutil.rmtree(release.root / "build" / VARIANTS["cuda"])
    result = release.dry_run("--backend", "cpu")
    assert result.exit_code == 0 and VARIANTS["cpu"] in result.stdout


def kernel_of(release, **changes):
    return {
        "kernel-builder": {"version": "0.17.0"},
        "kernel": {"commit": release.commit, "dirty": False, **changes},
    }


def remove(backend):
    return lambda release: shutil.rmtree(release.root / "build" / VARIANTS[backend])


def change_a_byte(release):
    path = release.file("cuda", "layers.py")
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
    "missing file": (
        lambda release: release.file("cuda", "layers.py").unlink(),
        "{root}/build/{cuda} does not match its metadata.json: Missing file: layers.py",
    ),
    "uncommitted changes": (
        lambda release: release.write("cuda", provenance=kernel_of(release, dirty=True)),
        "{cuda} was built with uncommitted changes: build it again from a clean checkout",
    ),
    "other commit": (
        lambda release: release.write("cuda", provenance=kernel_of(release, commit="1" * 40)),
        "{cuda} was built from commit 1{40}, the checkout is at {commit}: "
        "build it again from a clean checkout",
    ),
    "no commit": (
        lambda release: release.write("cuda", provenance={"kernel-builder": {"version": "1"}}),
        "{cuda} was built from commit unknown, the checkout is at {commit}: "
        "build it again from a clean checkout",
    ),
    "other version": (
        lambda release: release.write("cuda", version=2),
        "{cuda} is of version 2, build.toml has version 1: build it again from a clean checkout",
    ),
    "local build": (
        lambda release: release.write(
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


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda folder: None, None),
        (lambda folder: (folder / "_ops.py").write_text("x"), "File hash mismatch for _ops.py"),
        (lambda folder: (folder / "_ops.py").unlink(), "Missing file: _ops.py"),
        (lambda folder: (folder / "new.py").touch(), "Unknown file: new.py"),
    ],
    ids=["complete", "changed", "missing", "added"],
)
def test_verify(release, change, fault):
    folder = release.root / "build" / VARIANTS["cuda"]
    change(folder)
    result = invoke("--verify", release.root)
    if fault:
        assert f"{folder} does not match its metadata.json: {fault}" in sentence(result)
        return
    assert result.exit_code == 0
    count = sum(path.is_file() for path in folder.rglob("*"))
    names = sorted(VARIANTS.values())
    assert result.stdout == "".join(f"{n}: {count} files match metadata.json\n" for n in names)


def test_source_is_one_repository():
    source = read_toml(CHECKOUT)["general"]["source"]
    assert source.endswith(f"/{REPO_ID}")
    changelog = (CHECKOUT / "CHANGELOG.md").read_text()
    assert f"[Unreleased]: {source}/commits/main" in changelog
    card = render_card(CHECKOUT, read_toml(CHECKOUT)["general"])
    assert f"({source})" in card


# -- To a Hub on this machine ------------------------------------------------------------------


@pytest.fixture
def hub():
    with Hub().serve() as hub:
        yield hub


def python(hub, home, code, **more):
    process = run(sys.executable, "-c", code, env=environment(hub, home, **more))
    assert process.returncode == 0, process.stderr
    return process.stdout


def environment(hub, home, **more):
    """Of a user without a local build, a token or a cache."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("HF_", "LOCAL_"))
    }
    kept.pop("KERNELS_CACHE", None)
    settings = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    return {
        **kept,
        **settings,
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "NO_PROXY": "127.0.0.1",
        **more,
    }


def publish_to(hub, root, *options):
    env = environment(hub, root / "home")
    return run(sys.executable, TOOLS / "publish.py", "--root", root, *options, env=env)


def half(content):
    return content[: len(content) // 2]


def flip(content):
    return content[:-1] + bytes([content[-1] ^ 1])


# What is stored, whether the Hub compares sizes, the sentence, the branches afterwards.
UPLOAD_FAULTS = {
    "half, and the Hub reports it": (
        *(half, True),
        r"Error while uploading '\S+\.abi3\.so' to the Hub. .*has \d+ bytes, \d+ were announced",
        {"main"},
    ),
    "half, and only the download shows it": (
        *(half, False),
        r"Consistency check failed: file should be of size \d+ but has size \d+ .*",
        {"main", "v1"},
    ),
    "changed byte": (
        *(flip, True),
        r"the Hub returns other bytes for build/\S+\.abi3\.so than were uploaded",
        {"main", "v1"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", UPLOAD_FAULTS)
def test_an_upload_that_is_not_stored_fails(hub, release, name):
    hub.store, hub.verifies, message, branches = UPLOAD_FAULTS[name]
    process = publish_to(hub, release.root)
    assert process.returncode == 1
    error = process.stderr.strip().splitlines()[-1]
    assert re.fullmatch(f"Error: publishing {REPO_ID} v1 failed: {message}", error), process.stderr
    assert hub.repositories[REPO_ID].branches.keys() == branches


@pytest.mark.slow
def test_an_upload_whose_connection_drops_is_repeated(hub, release):
    hub.dropped_uploads = 1
    process = publish_to(hub, release.root, "--backend", "cpu")
    assert process.returncode == 0, process.stderr
    assert hub.dropped_uploads == 0 and sum("PUT" in request for request in hub.requests) == 2


# A second version: one more public name.
ADDED = """
def rms_norm_twice(x):
    \"\"\"Returns rms_norm of rms_norm of x.\"\"\"
    return rms_norm(rms_norm(x))
"""


def build(root):
    """Builds a copy of this checkout from a commit of its own, with the objects that are there."""
    ninja = CHECKOUT / ".build" / "cpu" / "build.ninja"
    flags = ["--werror"] if ninja.exists() and "-Werror" in ninja.read_text() else []
    command = (sys.executable, TOOLS / "build_variant.py", "--root", root, "--backend", "cpu")
    process = run(*command, *flags)
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A Hub with versions 1 and 2, both built here."""
    root = tmp_path_factory.mktemp("checkout")
    for name in ("kernel_src", "torch-ext", ".build/cpu"):
        if (CHECKOUT / name).exists():
            shutil.copytree(CHECKOUT / name, root / name)
    for name in (*PUBLISHED, ".gitignore"):
        (root / name).parent.mkdir(exist_ok=True)
        shutil.copy(CHECKOUT / name, root / name)
    options = ("--backend", "cpu", "--allow-local-toolchain")
    with Hub().serve() as hub:
        for version in (1, 2):
            if version == 2:
                toml, init = root / "build.toml", root / "torch-ext" / MODULE / "__init__.py"
                toml.write_text(toml.read_text().replace("version = 1", "version = 2", 1))
                text = init.read_text().replace("__all__ = [", '__all__ = [\n    "rms_norm_twice",')
                init.write_text(text + ADDED)
            commit(root)
            build(root)
            process = publish_to(hub, root, *options)
            assert process.returncode == 0, process.stderr
            assert "Warning: torch-stable-abi211-cpu" in process.stderr
        yield hub


LOAD = f"""
import sys
import torch
from kernels import get_kernel

torch.manual_seed(20)
x = torch.randn(5, 64)
norm = torch.nn.functional.rms_norm(x, (64,), eps=1e-6)
one, two = (
    get_kernel({REPO_ID!r}, version=v, backend="cpu", trust_remote_code=[{REPO_ID!r}]) for v in (1, 2)
)
for kernel in (one, two, one):
    torch.testing.assert_close(kernel.rms_norm(x), norm)
twice = torch.nn.functional.rms_norm(norm, (64,), eps=1e-6)
torch.testing.assert_close(two.rms_norm_twice(x), twice)
assert not hasattr(one, "rms_norm_twice")
print(one.__file__, two.__file__)
"""

REFUSED_OFFLINE = f"""
from kernels import get_kernel
for wanted in ({{"version": 1}}, {{"revision": "COMMIT"}}):
    try:
        get_kernel({REPO_ID!r}, backend="cpu", trust_remote_code=True, **wanted)
    except (ValueError, FileNotFoundError) as error:
        print(error)
"""


@pytest.mark.slow
def test_release_has_the_layout_of_kernel_builder(published):
    repository = published.repositories[REPO_ID]
    assert repository.branches.keys() == {"main", "v1", "v2"}
    main, one, two = (repository.commits[commit] for commit in repository.branches.values())
    assert set(main) == {"README.md"}
    assert main["README.md"].content.startswith(
        b"---\nlibrary_name: kernels\nlicense: apache-2.0\n"
    )
    for version, files in enumerate((one, two), start=1):
        build = f"build/{VARIANTS['cpu']}"
        metadata = json.loads(files[f"{build}/metadata.json"].content)
        assert metadata["version"] == version
        extension = files[f"{build}/{metadata['id']}.abi3.so"]
        digest = base64.b64encode(bytes.fromhex(extension.lfs[0])).decode()
        assert metadata["digest"]["files"][f"{metadata['id']}.abi3.so"] == digest
        assert sum(path.endswith(".so") for path in files) == 1
        # Version 2's branch starts at main, which has the card of version 1.
        others = {path for path in files if not path.startswith(f"{build}/")}
        assert others - {"README.md"} == {"benchmarks/benchmark.py"}


@pytest.mark.slow
def test_versions_load_side_by_side_and_without_network(published, tmp_path):
    """With kernels 0.17.2, only a whole snapshot of the version's branch can be loaded offline."""
    one, two = python(published, tmp_path, LOAD).split()
    assert one != two
    commit = published.repositories[REPO_ID].branches["v1"]
    assert Path(one).parents[2].name == commit

    offline = {"HF_HUB_OFFLINE": "1"}
    code = REFUSED_OFFLINE.replace("COMMIT", commit)
    by_version, by_commit = python(published, tmp_path, code, **offline).splitlines()
    assert by_version.startswith(f"Version 1 of '{REPO_ID}' is not available in the local cache")
    assert by_commit.startswith(f"Cannot find a local snapshot for {REPO_ID} (revision: {commit})")

    for version in (1, 2):
        snapshot_download(
            REPO_ID,
            repo_type="kernel",
            revision=f"v{version}",
            endpoint=published.endpoint,
            cache_dir=tmp_path / "hub",
        )
    assert python(published, tmp_path, LOAD, **offline).split() == [one, two]


@pytest.mark.slow
def test_verify_downloads_a_version_and_finds_a_changed_file(published, tmp_path):
    env = environment(published, tmp_path)
    command = (sys.executable, TOOLS / "publish.py", "--verify", REPO_ID, "--version")
    process = run(*command, 1, env=env)
    assert process.returncode == 0, process.stderr
    assert re.fullmatch(rf"{VARIANTS['cpu']}: \d+ files match metadata.json\n", process.stdout)
    (file,) = tmp_path.glob("hub/*/snapshots/*/build/*/layers.py")
    file.resolve().write_bytes(flip(file.read_bytes()))
    assert "File hash mismatch for layers.py" in sentence(invoke("--verify", file.parents[2]))
    process = run(*command, 3, env=env)
    assert process.returncode == 1 and process.stdout == ""
    assert process.stderr.startswith("Error: ") and "Invalid rev id: v3" in process.stderr


@pytest.mark.slow
def test_lock_and_benchmark_need_a_trusted_publisher(published, tmp_path):
    """The pages say so. A newer `kernels` may do without."""
    (tmp_path / "pyproject.toml").write_text(f'[tool.kernels.dependencies]\n"{REPO_ID}" = 1\n')
    kernels, env = Path(sys.executable).parent / "kernels", environment(published, tmp_path)
    process = run(kernels, "benchmark", REPO_ID, "--version", 1, env=env)
    assert process.returncode == 1 and f"/api/models/{REPO_ID}" in process.stderr
    process = run(kernels, "lock", tmp_path, env=env)
    assert process.returncode == 1 and "is not from a trusted publisher" in process.stderr
    assert not (tmp_path / "kernels.lock").exists()


@pytest.mark.slow
def test_publishing_again_replaces_the_files_of_a_variant(hub, release):
    def files():
        repository = hub.repositories[REPO_ID]
        return repository.commits[repository.branches["v1"]]

    assert publish_to(hub, release.root, "--dry-run").returncode == 0
    assert hub.repositories == {}
    assert publish_to(hub, release.root).returncode == 0
    before = files()
    (release.root / "CARD.md").write_text("changed")
    release.commit = commit(release.root)
    release.write("cpu")
    process = publish_to(hub, release.root, "--backend", "cpu")
    assert process.returncode == 0, process.stderr
    cuda = {path for path in before if VARIANTS["cuda"] in path}
    assert cuda and cuda <= files().keys()
    extensions = [path for path in files().keys() - cuda if path.endswith(".so")]
    assert extensions == [f"build/{VARIANTS['cpu']}/_{MODULE}_cpu_{release.commit[:7]}.abi3.so"]
