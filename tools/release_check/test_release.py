"""A rehearsal: two versions are built and laid on a Hub on this machine, and clients load them.

python -m pytest tools/release_check
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hub_server import Hub
from huggingface_hub import snapshot_download

from builder.card import render_card
from builder.package import hub_name, read_toml

CHECKOUT = Path(__file__).resolve().parents[2]
TOOLS = CHECKOUT / "tools"
REPO_ID, VERSION = hub_name(CHECKOUT)
MODULE = "h100_diffusers_kernels"
VARIANT = "torch-stable-abi211-cpu-x86_64-linux"

# The next version has one more public name.
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


def build(root: Path) -> None:
    """Builds the checkout's copy from a commit of its own, with the objects that are there."""
    ninja = root / ".build" / "cpu" / "build.ninja"
    flags = ["--werror"] if ninja.exists() and "-Werror" in ninja.read_text() else []
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    for command in (("init", "-q"), ("add", "-A"), (*identity, "commit", "-q", "-m", "release")):
        succeeds("git", "-C", root, *command)
    build_variant = (sys.executable, TOOLS / "build_variant.py")
    succeeds(*build_variant, "--root", root, "--backend", "cpu", *flags)


def upload(hub: Hub, root: Path) -> None:
    """Leaves what kernel-builder's upload leaves: the branch of the version, and the page on main."""
    general = read_toml(root)["general"]
    paths = [*(root / "build").rglob("*"), *root.glob("benchmarks/benchmark*.py")]
    files = {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(paths) if p.is_file()}
    hub.commit(REPO_ID, "main", {"README.md": render_card(root, general).encode()})
    hub.commit(REPO_ID, f"v{general['version']}", files)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A Hub with this version and the next one."""
    first, second = (tmp_path_factory.mktemp("release") / name for name in ("this", "next"))
    for name in ("kernel_src", "torch-ext", ".build/cpu"):
        if (CHECKOUT / name).exists():
            shutil.copytree(CHECKOUT / name, first / name)
    for name in ("build.toml", "CARD.md", "benchmarks/benchmark.py", ".gitignore"):
        (first / name).parent.mkdir(exist_ok=True)
        shutil.copy(CHECKOUT / name, first / name)
    build(first)
    shutil.copytree(first, second)
    toml, init = second / "build.toml", second / "torch-ext" / MODULE / "__init__.py"
    lines = toml.read_text()
    toml.write_text(lines.replace(f"version = {VERSION}", f"version = {VERSION + 1}", 1))
    text = init.read_text().replace("__all__ = [", '__all__ = [\n    "rms_norm_twice",')
    init.write_text(text + ADDED)
    build(second)
    with Hub().serve() as hub:
        for root in (first, second):
            upload(hub, root)
        yield hub


VERSIONS = (VERSION, VERSION + 1)

LOAD = f"""
import torch
from kernels import get_kernel

torch.manual_seed(20)
x = torch.randn(5, 64)
norm = torch.nn.functional.rms_norm(x, (64,), eps=1e-6)
one, two = (
    get_kernel({REPO_ID!r}, version=v, backend="cpu", trust_remote_code=[{REPO_ID!r}]) for v in {VERSIONS}
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
for wanted in ({{"version": {VERSION}}}, {{"revision": "COMMIT"}}):
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
    commit = published.repositories[REPO_ID].branches[f"v{VERSION}"]
    assert Path(one).parents[2].name == commit

    code = REFUSED_OFFLINE.replace("COMMIT", commit)
    by_version, by_commit = python(code, HF_HUB_OFFLINE="1").splitlines()
    assert by_version.startswith(
        f"Version {VERSION} of '{REPO_ID}' is not available in the local cache"
    )
    assert by_commit.startswith(f"Cannot find a local snapshot for {REPO_ID} (revision: {commit})")

    where = {"endpoint": published.endpoint, "cache_dir": tmp_path / "hub"}
    for version in VERSIONS:
        snapshot_download(REPO_ID, repo_type="kernel", revision=f"v{version}", **where)
    assert python(LOAD, HF_HUB_OFFLINE="1").split() == [one, two]


def test_a_changed_file_of_a_download_is_found(published, tmp_path):
    def check(*arguments):
        command = (sys.executable, TOOLS / "check_release.py", *arguments)
        return run(*command, env=environment(published, tmp_path))

    process = check("--download")
    assert process.returncode == 0, process.stderr
    assert re.fullmatch(rf"{VARIANT}: \d+ files match metadata.json\n", process.stdout)
    (file,) = tmp_path.glob("hub/*/snapshots/*/build/*/layers.py")
    file.resolve().write_bytes(file.read_bytes() + b"#")
    process = check(file.parents[2])
    assert process.returncode == 1 and "File hash mismatch for layers.py" in process.stderr
    file.unlink()
    process = check(file.parents[2])
    assert process.returncode == 1 and "layers.py" in process.stderr


def test_lock_and_benchmark_need_a_trusted_publisher(published, tmp_path):
    """docs/releasing.md says so. A newer `kernels` may do without."""
    (tmp_path / "pyproject.toml").write_text(
        f'[tool.kernels.dependencies]\n"{REPO_ID}" = {VERSION}\n'
    )
    kernels, env = Path(sys.executable).parent / "kernels", environment(published, tmp_path)
    process = run(kernels, "benchmark", REPO_ID, "--version", VERSION, env=env)
    assert process.returncode == 1 and f"/api/models/{REPO_ID}" in process.stderr
    process = run(kernels, "lock", tmp_path, env=env)
    assert process.returncode == 1 and "is not from a trusted publisher" in process.stderr
    assert not (tmp_path / "kernels.lock").exists()
