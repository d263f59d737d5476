"""The tools for building and checking a variant, on a package that compiles in seconds."""

import os
import re
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner
from kernels._rust import Digest, DigestAlgorithm, Metadata

import build_variant
from builder.package import Revision, tomllib
from conftest import CHECKOUT
from kernel_resources import Kernel
from processes import TOOLS, run, run_python

BUILD_VARIANT = TOOLS / "build_variant.py"
BINDING = "torch-ext/torch_binding.cpp"
FLAGS = tomllib.loads((CHECKOUT / "build.toml").read_text())["torch"]["cxx-flags"]
TINY = {
    "build.toml": f"""
[general]
name = "tiny-kernel"
version = 3
edition = 5
license = "Apache-2.0"
backends = ["cpu"]

[torch]
cxx-flags = {FLAGS}
include = ["src"]
src = ["torch-ext/torch_binding.cpp"]

[torch.stable-abi]
cpu = "2.11"

[kernel.tiny]
backend = "cpu"
depends = ["torch"]
cxx-flags = {FLAGS}
src = ["src/twice.cpp", "src/twice.h"]
""",
    "src/twice.h": "constexpr float kFactor = 2;\nvoid twice(float* x, long count);\n",
    "src/twice.cpp": """
#include "twice.h"
void twice(float* x, long count) {
  for (long i = 0; i < count; ++i) x[i] *= kFactor;
}
""",
    "torch-ext/torch_binding.cpp": """
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "registration.h"

void twice(float* x, long count);
void twice_(torch::stable::Tensor x) {
  twice(static_cast<float*>(x.mutable_data_ptr()), x.numel());
}
STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) { ops.def("twice_(Tensor(a!) x) -> ()"); }
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) {
  ops.impl("twice_", TORCH_BOX(&twice_));
}
REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
""",
    "torch-ext/tiny_kernel/__init__.py": """
from ._ops import ops
from .parts.names import LAST

__all__ = ["LAST", "twice_"]


def twice_(x):
    ops.twice_(x)
""",
    "torch-ext/tiny_kernel/parts/__init__.py": "",
    "torch-ext/tiny_kernel/parts/names.py": "LAST = 1\n",
}


CLASHING = """
template <typename T>
struct Factor {
  static T value;
};
template <typename T>
T Factor<T>::value = 2;
inline long calls() {
  static long count = 0;
  return ++count;
}
"""


class TinyPackage:
    """A package with one operation, which builds in seconds."""

    def __init__(self, root: Path):
        self.root = root

    @classmethod
    def write(cls, root: Path) -> "TinyPackage":
        for path, text in TINY.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
        return cls(root)

    def build(self, *options) -> str:
        command = (sys.executable, BUILD_VARIANT, "--root", self.root, "--backend", "cpu")
        process = run(*command, *options)
        return process.stdout + process.stderr if process.returncode else process.stdout

    def failure(self) -> str:
        """Returns the one-sentence error of the build."""
        arguments = ["--root", str(self.root), "--backend", "cpu"]
        result = CliRunner().invoke(build_variant.main, arguments)
        assert isinstance(result.exception, SystemExit) and result.exit_code == 1, result.exception
        (sentence,) = result.stderr.strip().splitlines()
        assert sentence.startswith("Error: ")
        return sentence.removeprefix("Error: ")

    def edit(self, path: str, old: str, new: str):
        file = self.root / path
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new))

    def compiled(self, output: str) -> list:
        return re.findall(r"\] C\+\+ (\S+)", output)

    def commit(self):
        identity = ("-c", "user.name=test", "-c", "user.email=test@example.org")
        for command in (("add", "-A"), (*identity, "commit", "-q", "-m", "state")):
            assert run("git", "-C", self.root, *command).returncode == 0

    @property
    def variant(self) -> Path:
        (variant,) = (self.root / "build").iterdir()
        return variant

    @property
    def extension_id(self) -> str:
        (extension,) = self.variant.glob("*.so")
        return extension.name.removesuffix(".abi3.so")

    def state(self) -> dict:
        files = (path for path in self.root.rglob("*") if path.is_file())
        ignored = {".ninja_log", "lock"}
        return {path: path.stat().st_mtime_ns for path in files if path.name not in ignored}

    def doubled(self) -> str:
        return run_python(
            "from pathlib import Path; import torch; from kernels import get_local_kernel\n"
            f"k = get_local_kernel(Path({str(self.root)!r}), backend='cpu')\n"
            "x = torch.ones(3); k.twice_(x)\n"
            "print(x.tolist())"
        )


@pytest.fixture
def tiny(tmp_path):
    return TinyPackage.write(tmp_path)


@pytest.fixture(scope="module")
def built_once(tmp_path_factory):
    package = TinyPackage.write(tmp_path_factory.mktemp("built"))
    assert "built" in package.build()
    return package


@pytest.fixture
def built(built_once, tmp_path):
    """A built package, which is not compiled again while its C++ is unchanged."""
    shutil.copytree(built_once.root, tmp_path, dirs_exist_ok=True)
    return TinyPackage(tmp_path)


def test_build_is_incremental(built):
    built.build()  # the copied folder's files are newer
    for cache in built.root.rglob("__pycache__"):
        for file in cache.iterdir():
            file.unlink()

    before = built.state()
    output = built.build()
    assert "no work to do" in output and "up to date" in output
    assert built.state() == before

    header = built.root / "src/twice.h"
    header.write_text(header.read_text().replace("kFactor = 2", "kFactor = 3"))
    assert built.compiled(built.build()) == ["src/twice.cpp"]
    assert built.doubled() == "[3.0, 3.0, 3.0]"


def test_build_follows_the_python_files(built):
    assert (built.variant / "parts/names.py").is_file()
    package = built.root / "torch-ext/tiny_kernel"
    (package / "parts/names.py").unlink()
    (package / "parts/__init__.py").unlink()
    (package / "names.py").write_text("LAST = 2\n")
    init = package / "__init__.py"
    init.write_text(init.read_text().replace(".parts.names", ".names"))
    assert built.compiled(built.build()) == []
    assert not (built.variant / "parts").exists()
    metadata = Metadata.read_from_file(built.variant / "metadata.json")
    assert "names.py" in metadata.digest.files
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, built.variant))
    assert built.doubled() == "[2.0, 2.0, 2.0]"


def test_extension_is_named_by_the_commit(built):
    def provenance():
        return Metadata.read_from_file(built.variant / "metadata.json").provenance

    assert built.extension_id == "_tiny_kernel_cpu_local"  # no Git
    assert provenance().kernel is None
    (built.root / ".gitignore").write_text("/build/\n/.build/\n")
    assert run("git", "init", "-q", built.root).returncode == 0
    assert Revision.read(built.root).suffix == "local"  # no commit yet
    built.commit()
    head = run("git", "-C", built.root, "rev-parse", "HEAD").stdout.strip()
    assert Revision.read(built.root) == Revision(head, False)
    assert Revision.read(built.root / "src").commit is None, "a copy in another checkout"

    (built.root / "src/twice.h").write_text("// changed\n" + TINY["src/twice.h"])
    assert sorted(built.compiled(built.build())) == ["src/twice.cpp", BINDING]
    assert built.extension_id == f"_tiny_kernel_cpu_{head[:7]}_dirty"
    assert (provenance().kernel.commit, provenance().kernel.dirty) == (head, True)
    assert built.doubled() == "[2.0, 2.0, 2.0]"


def toml(old: str, new: str):
    return lambda tiny: tiny.edit("build.toml", old, new)


SOURCES = '"src/twice.cpp", "src/twice.h"'
# Packages that kernel-builder would build differently or not at all.
BAD_PACKAGES = {
    "unlisted header": (
        lambda tiny: (tiny.root / "src/more.cuh").write_text(""),
        "build.toml does not list src/more.cuh: add it to a src, or remove the file",
    ),
    "missing source": (
        lambda tiny: (tiny.root / "src/twice.h").unlink(),
        "build.toml lists src/twice.h, which does not exist",
    ),
    "source twice": (
        toml(SOURCES, SOURCES + ', "src/./twice.h"'),
        "build.toml lists src/twice.h twice",
    ),
    "source in two tables": (
        toml('"torch-ext/torch_binding.cpp"', '"torch-ext/torch_binding.cpp", "src/twice.cpp"'),
        "build.toml lists src/twice.cpp in two tables of one backend",
    ),
    "source outside": (
        toml(SOURCES, SOURCES + ', "../other.cpp"'),
        "build.toml lists ../other.cpp, which is outside of {root}",
    ),
    "unknown key": (
        toml("edition", "version-of"),
        "{root}/build.toml is not valid: did not match .*version-of.*",
    ),
    "no stable ABI": (
        toml('cpu = "2.11"', 'cuda = "2.11"'),
        "build.toml has no version for cpu in [torch.stable-abi]: "
        "only builds of Torch's stable ABI can be made here",
    ),
    "newer stable ABI": (
        toml('cpu = "2.11"', 'cpu = "99.0"'),
        "the build needs Torch 99.0 or later, got .*",
    ),
}


@pytest.mark.parametrize("name", BAD_PACKAGES)
def test_build_says_what_is_wrong_with_a_package(tiny, name):
    change, message = BAD_PACKAGES[name]
    change(tiny)
    parts = message.replace("{root}", str(tiny.root)).split(".*")
    assert re.fullmatch(".*".join(map(re.escape, parts)), tiny.failure())
    assert not (tiny.root / "build").exists()


def test_builds_side_by_side_keep_to_their_own_symbols(tiny, tmp_path):
    # With default visibility a loader gives both builds one `twice`, one `count` and one `kFactor`.
    tiny.edit("src/twice.h", "constexpr float kFactor = 2;", CLASHING)
    tiny.edit("src/twice.cpp", "x[i] *= kFactor;", "x[i] = x[i] * Factor<float>::value + calls();")
    other = TinyPackage.write(tmp_path / "other")
    for path in ("src/twice.h", "src/twice.cpp"):
        (other.root / path).write_text((tiny.root / path).read_text())
    other.edit("src/twice.h", "value = 2", "value = 3")
    assert run("git", "init", "-q", other.root).returncode == 0
    other.commit()
    for package in (tiny, other):
        package.build()
        process = run(sys.executable, TOOLS / "check_abi.py", package.variant)
        assert process.returncode == 0, process.stdout
    for flags in ("os.RTLD_NOW", "os.RTLD_NOW | os.RTLD_GLOBAL"):
        results = run_python(
            "import os, sys; from pathlib import Path; import torch\n"
            "from kernels import get_local_kernel\n"
            f"sys.setdlopenflags({flags})\n"
            f"roots = [Path({str(tiny.root)!r}), Path({str(other.root)!r})]\n"
            "kernels = [get_local_kernel(root, backend='cpu') for root in roots]\n"
            "for kernel in kernels * 2:\n"
            "    x = torch.ones(2); kernel.twice_(x); print(x.tolist())\n"
        )
        assert results.splitlines() == ["[3.0, 4.0]", "[4.0, 5.0]", "[5.0, 6.0]", "[6.0, 7.0]"]


def test_werror_fails_on_a_warning(built):
    source = built.root / "src/twice.cpp"
    source.write_text(source.read_text() + "static int unused() { return 1; }\n")
    assert built.compiled(built.build()) == ["src/twice.cpp"]
    assert "-Werror=unused-function" in built.build("--werror")


@pytest.mark.parametrize(
    ("source", "requirement"),
    [
        (
            'extern "C" void PyUnicode_AsUTF8(); void f() { PyUnicode_AsUTF8(); }',
            "PyUnicode_AsUTF8",
        ),
        ("namespace at { void empty(); } void f() { at::empty(); }", "at::empty()"),
        ("void other(); void f() { other(); }", "libother.so"),
        ("namespace own { void f() {} }", "own::f()"),
    ],
    ids=["newer Python", "Torch C++", "library", "symbol of its own"],
)
def test_check_abi_fails(tmp_path, source, requirement):
    (tmp_path / "other.cpp").write_text("void other() {}")
    (tmp_path / "f.cpp").write_text(source)
    variant = tmp_path / "variant"
    variant.mkdir()
    shared = (os.environ.get("CXX", "g++"), "-shared", "-fPIC")
    assert run(*shared, tmp_path / "other.cpp", "-o", tmp_path / "libother.so").returncode == 0
    link = ("-L", tmp_path, "-Wl,--as-needed", "-lother")
    extension = variant / "f.abi3.so"
    assert run(*shared, tmp_path / "f.cpp", "-o", extension, *link).returncode == 0
    (tmp_path / "fit.cpp").touch()
    (tmp_path / "fit").mkdir()
    fit = tmp_path / "fit" / "f.abi3.so"
    assert run(*shared, tmp_path / "fit.cpp", "-o", fit).returncode == 0
    assert run(sys.executable, TOOLS / "check_abi.py", fit.parent).returncode == 0
    process = run(sys.executable, TOOLS / "check_abi.py", variant, fit.parent)
    assert process.returncode == 1
    assert re.search(rf"FAILED: .*{re.escape(requirement)}", process.stdout)


VECTOR = "void rows<float, (h100_diffusers_kernels::Access)0>(float*)"
SCALAR = "void rows<float, (h100_diffusers_kernels::Access)1>(float*)"
SCALAR_KERNEL = "void h100_diffusers_kernels::scalar_rope_kernel<float>(float*)"
QUANTIZATION = "void h100_diffusers_kernels::quantize_fp8_kernel<float, 32, 2, false>(float*)"
PRODUCTS, WAIT = ["HGMMA.64x128x16.F32.BF16"] * 4, "WARPGROUP.DEPBAR.LE"
FP8_PRODUCTS = ["QGMMA.64x192x32.F32.E4M3.E4M3"] * 4


@pytest.mark.parametrize(
    ("name", "spills", "opcodes", "faults"),
    [
        (VECTOR, 0, ["LDG.E.128.CONSTANT", "STG.E.128"], []),
        (VECTOR, 0, ["UBLKCP.S.G", "UBLKCP.G.S"], []),
        (VECTOR, 8, ["LDG.E.128", "STG.E.128"], ["spills 8 bytes"]),
        (VECTOR, 0, ["LDG.E.64", "STG.E.128"], ["no 16-byte loads"]),
        (VECTOR, 0, ["LDG.E.LTC128B.64", "STG.E.128"], ["no 16-byte loads"]),
        (VECTOR, 0, ["LDG.E.128", "STG.E", "STS.128"], ["no 16-byte stores"]),
        (VECTOR, 0, ["UTMALDG.4D", *PRODUCTS, WAIT, "UTMASTG.4D"], []),
        (
            VECTOR,
            0,
            ["UTMALDG.4D", *(op for product in PRODUCTS for op in (product, WAIT)), "UTMASTG.4D"],
            ["matrix products wait for each other"],
        ),
        (VECTOR, 0, ["UTMALDG.2D", *FP8_PRODUCTS, WAIT, "UTMASTG.2D"], []),
        (
            VECTOR,
            0,
            ["UTMALDG.2D", *(op for p in FP8_PRODUCTS for op in (p, WAIT)), "UTMASTG.2D"],
            ["matrix products wait for each other"],
        ),
        (QUANTIZATION, 0, ["LDG.E.128", "STG.E.64"], []),
        (QUANTIZATION, 0, ["LDG.E.128", "STG.E"], ["no 16-byte stores"]),
        (SCALAR, 0, ["LDG.E.U16", "STG.E.U16"], []),
        (SCALAR_KERNEL, 0, ["LDG.E.U16", "STG.E.U16"], []),
        (SCALAR, 4, ["LDG.E.U16", "STG.E.U16"], ["spills 4 bytes"]),
    ],
)
def test_kernel_resources_finds_faults(name, spills, opcodes, faults):
    kernel = Kernel(name, registers=32, stack=0, spills=spills, shared=0, opcodes=Counter(opcodes))
    assert kernel.faults() == faults
