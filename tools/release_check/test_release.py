"""A rehearsal: two versions are built and published to a Hub on this machine, and clients load them.

python -m pytest tools/release_check
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hub_server import File, Hub
from huggingface_hub import snapshot_download

from builder.package import hub_name

CHECKOUT = Path(__file__).resolve().parents[2]
TOOLS = CHECKOUT / "tools"
REPO_ID, VERSION = hub_name(CHECKOUT)
MODULE = "h100_diffusers_kernels"
VARIANT = "torch-stable-abi211-cpu-x86_64-linux"
REHEARSAL = ("--backend", "cpu", "--allow-local-toolchain")

# A second version: one more public name.
ADDED = """
def rms_norm_twice(x):
    \"\"\"Returns rms_norm of rms_norm of x.\"\"\"
    return rms_norm(rms_norm(x))
"""


def run(*command, **options) -> subprocess.CompletedProcess:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)


def succeeds(*command, **options) -> str:
    process = run(*command, **options)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def environment(hub: Hub, home: Path, **more: str) -> dict[str, str]:
    """Of a user without a local build, a token or a cache."""
    ignored = ("HF_", "LOCAL_KERNELS", "KERNELS_CACHE")
    settings = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    settings |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "NO_PROXY": "127.0.0.1"}
    return {k: v for k, v in os.environ.items() if not k.startswith(ignored)} | settings | more


def commit(root: Path) -> None:
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    for command in (("init", "-q"), ("add", "-A"), (*identity, "commit", "-q", "-m", "release")):
        succeeds("git", "-C", root, *command)


def build(root: Path) -> None:
    """Builds the checkout's copy from a commit of its own, with the objects that are there."""
    ninja = root / ".build" / "cpu" / "build.ninja"
    flags = ["--werror"] if ninja.exists() and "-Werror" in ninja.read_text() else []
    commit(root)
    command = (sys.executable, TOOLS / "build_variant.py", "--root", root, "--backend", "cpu")
    succeeds(*command, *flags)


def publish(hub: Hub, root: Path) -> subprocess.CompletedProcess:
    command = (sys.executable, TOOLS / "publish.py", "--root", root, *REHEARSAL)
    return run(*command, env=environment(hub, root.with_name("home")))


@pytest.fixture(scope="module")
def checkouts(tmp_path_factory) -> list[Path]:
    """Copies of this checkout with builds of versions 1 and 2."""
    first, second = (tmp_path_factory.mktemp("release") / f"v{version}" for version in (1, 2))
    for name in ("kernel_src", "torch-ext", ".build/cpu"):
        if (CHECKOUT / name).exists():
            shutil.copytree(CHECKOUT / name, first / name)
    for name in ("build.toml", "CARD.md", "benchmarks/benchmark.py", ".gitignore"):
        (first / name).parent.mkdir(exist_ok=True)
        shutil.copy(CHECKOUT / name, first / name)
    build(first)
    shutil.copytree(first, second)
    toml, init = second / "build.toml", second / "torch-ext" / MODULE / "__init__.py"
    toml.write_text(toml.read_text().replace("version = 1", "version = 2", 1))
    text = init.read_text().replace("__all__ = [", '__all__ = [\n    "rms_norm_twice",')
    init.write_text(text + ADDED)
    build(second)
    return [first, second]


@pytest.fixture
def hub():
    with Hub().serve() as hub:
        yield hub


@pytest.fixture(scope="module")
def published(checkouts):
    """A Hub with both versions."""
    with Hub().serve() as hub:
        for root in checkouts:
            process = publish(hub, root)
            assert process.returncode == 0, process.stderr
            assert f"Warning: {VARIANT}" in process.stderr
        yield hub


# -- Uploads -----------------------------------------------------------------------------------


def half(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flip(content: bytes) -> bytes:
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


@pytest.mark.parametrize("name", UPLOAD_FAULTS)
def test_an_upload_that_is_not_stored_fails(hub, checkouts, name):
    hub.store, hub.verifies, message, branches = UPLOAD_FAULTS[name]
    process = publish(hub, checkouts[0])
    assert process.returncode == 1
    error = process.stderr.strip().splitlines()[-1]
    assert re.fullmatch(f"Error: publishing {REPO_ID} v1 failed: {message}", error), process.stderr
    assert hub.repositories[REPO_ID].branches.keys() == branches


def test_publishing_again_replaces_the_files_of_a_variant(hub, checkouts, tmp_path):
    """The first upload's connection drops, and it is repeated."""

    def files():
        repository = hub.repositories[REPO_ID]
        return repository.commits[repository.branches["v1"]]

    hub.dropped_uploads = 1
    process = publish(hub, checkouts[0])
    assert process.returncode == 0, process.stderr
    assert hub.dropped_uploads == 0 and hub.uploads == 2
    before, of_another = set(files()), "build/another-variant/metadata.json"
    files()[of_another] = File(b"{}")
    shutil.copytree(checkouts[0], tmp_path / "v1")
    (tmp_path / "v1" / "CARD.md").write_text("changed")
    build(tmp_path / "v1")
    process = publish(hub, tmp_path / "v1")
    assert process.returncode == 0, process.stderr
    (old,) = before - set(files())
    (new,) = set(files()) - before - {of_another}
    assert of_another in files() and old.endswith(".so") and new.endswith(".so")


def test_release_has_the_layout_of_kernel_builder(published):
    repository = published.repositories[REPO_ID]
    assert repository.branches.keys() == {"main", "v1", "v2"}
    main, one, two = (repository.commits[commit] for commit in repository.branches.values())
    assert set(main) == {"README.md"}
    card = main["README.md"].content
    assert card.startswith(b"---\nlibrary_name: kernels\nlicense: apache-2.0\n")
    for version, files in enumerate((one, two), start=1):
        build = f"build/{VARIANT}"
        metadata = json.loads(files[f"{build}/metadata.json"].content)
        assert metadata["version"] == version
        extension = files[f"{build}/{metadata['id']}.abi3.so"]
        digest = base64.b64encode(bytes.fromhex(extension.lfs[0])).decode()
        assert metadata["digest"]["files"][f"{metadata['id']}.abi3.so"] == digest
        assert sum(path.endswith(".so") for path in files) == 1
        # Version 2's branch starts at main, which has the card of version 1.
        others = {path for path in files if not path.startswith(f"{build}/")}
        assert others - {"README.md"} == {"benchmarks/benchmark.py"}


# -- Downloads ---------------------------------------------------------------------------------


LOAD = f"""
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


def test_versions_load_side_by_side_and_without_network(published, tmp_path):
    """With kernels 0.17.2, only a whole snapshot of the version's branch can be loaded offline."""

    def python(code, **more):
        return succeeds(sys.executable, "-c", code, env=environment(published, tmp_path, **more))

    one, two = python(LOAD).split()
    assert one != two
    commit = published.repositories[REPO_ID].branches["v1"]
    assert Path(one).parents[2].name == commit

    code = REFUSED_OFFLINE.replace("COMMIT", commit)
    by_version, by_commit = python(code, HF_HUB_OFFLINE="1").splitlines()
    assert by_version.startswith(f"Version 1 of '{REPO_ID}' is not available in the local cache")
    assert by_commit.startswith(f"Cannot find a local snapshot for {REPO_ID} (revision: {commit})")

    where = {"endpoint": published.endpoint, "cache_dir": tmp_path / "hub"}
    for version in (1, 2):
        snapshot_download(REPO_ID, repo_type="kernel", revision=f"v{version}", **where)
    assert python(LOAD, HF_HUB_OFFLINE="1").split() == [one, two]


def test_verify_downloads_a_version_and_finds_a_changed_file(published, tmp_path):
    def verify(*arguments):
        command = (sys.executable, TOOLS / "publish.py", "--verify", *arguments)
        return run(*command, env=environment(published, tmp_path))

    process = verify(REPO_ID, "--version", 1)
    assert process.returncode == 0, process.stderr
    assert re.fullmatch(rf"{VARIANT}: \d+ files match metadata.json\n", process.stdout)
    (file,) = tmp_path.glob("hub/*/snapshots/*/build/*/layers.py")
    file.resolve().write_bytes(flip(file.read_bytes()))
    process = verify(file.parents[2])
    assert process.returncode == 1 and "File hash mismatch for layers.py" in process.stderr
    process = verify(REPO_ID, "--version", 3)
    assert process.returncode == 1 and process.stdout == ""
    assert process.stderr.startswith("Error: ") and "Invalid rev id: v3" in process.stderr


def test_lock_and_benchmark_need_a_trusted_publisher(published, tmp_path):
    """docs/releasing.md says so. A newer `kernels` may do without."""
    (tmp_path / "pyproject.toml").write_text(f'[tool.kernels.dependencies]\n"{REPO_ID}" = 1\n')
    kernels, env = Path(sys.executable).parent / "kernels", environment(published, tmp_path)
    process = run(kernels, "benchmark", REPO_ID, "--version", 1, env=env)
    assert process.returncode == 1 and f"/api/models/{REPO_ID}" in process.stderr
    process = run(kernels, "lock", tmp_path, env=env)
    assert process.returncode == 1 and "is not from a trusted publisher" in process.stderr
    assert not (tmp_path / "kernels.lock").exists()
