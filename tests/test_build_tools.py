"""The tools for building and checking a variant, on a package that compiles in seconds."""

import os
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
import tomllib
from click.testing import CliRunner
from kernels._rust import Digest, DigestAlgorithm, Metadata

import build_variant
import check_abi
from builder.package import Revision
from conftest import CHECKOUT
from kernel_resources import Kernel
from processes import run, run_python

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
    "src/twice.h": """
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
void twice(float* x, long count);
""",
    "src/twice.cpp": """
#include "twice.h"
void twice(float* x, long count) {
  for (long i = 0; i < count; ++i) x[i] = x[i] * Factor<float>::value + calls();
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


# A binding without operators compiles in no time.
BARE = '#include "registration.h"\nREGISTER_EXTENSION(TORCH_EXTENSION_NAME)\n'


class TinyPackage:
    """A package that builds in seconds: with one operation, or with a binding without any."""

    def __init__(self, root: Path):
        self.root = root

    @classmethod
    def write(cls, root: Path, **changes: str) -> "TinyPackage":
        for path, text in (TINY | changes).items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
        return cls(root)

    def invoke(self, *options):
        arguments = ["--root", str(self.root), "--backend", "cpu", *options]
        return CliRunner().invoke(build_variant.main, arguments)

    def failure(self) -> str:
        """Returns the one-sentence error of the build."""
        result = self.invoke()
        assert isinstance(result.exception, SystemExit) and result.exit_code == 1, result.exception
        (sentence,) = result.stderr.strip().splitlines()
        assert sentence.startswith("Error: ")
        return sentence.removeprefix("Error: ")

    def edit(self, path: str, old: str, new: str):
        file = self.root / path
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new))

    def commit(self) -> str:
        identity = ("-c", "user.name=test", "-c", "user.email=test@example.org")
        for command in (("init", "-q"), ("add", "-A"), (*identity, "commit", "-q", "-m", "state")):
            assert run("git", "-C", self.root, *command).returncode == 0
        return run("git", "-C", self.root, "rev-parse", "HEAD").stdout.strip()

    @property
    def variant(self) -> Path:
        (variant,) = (self.root / "build").iterdir()
        return variant

    @property
    def extension(self) -> Path:
        (extension,) = self.variant.glob("*.so")
        return extension

    @property
    def metadata(self) -> Metadata:
        return Metadata.read_from_file(self.variant / "metadata.json")

    def state(self) -> dict:
        files = (path for path in self.root.rglob("*") if path.is_file())
        ignored = {".ninja_log", "lock"}
        return {path: path.stat().st_mtime_ns for path in files if path.name not in ignored}


@pytest.fixture
def tiny(tmp_path):
    return TinyPackage.write(tmp_path)


@pytest.fixture(scope="module")
def built_once(tmp_path_factory):
    package = TinyPackage.write(tmp_path_factory.mktemp("built"), **{BINDING: BARE})
    assert "built" in package.invoke().output
    return package


@pytest.fixture
def built(built_once, tmp_path):
    """A built package with a bare binding."""
    shutil.copytree(built_once.root, tmp_path, dirs_exist_ok=True)
    return TinyPackage(tmp_path)


@pytest.fixture
def compiled(capfd):
    """Builds a package and returns the sources that were compiled."""

    def build(package, *options):
        capfd.readouterr()
        result = package.invoke(*options)
        output = capfd.readouterr().out
        assert result.exit_code == 0, output + result.output
        return sorted(re.findall(r"\] C\+\+ (\S+)", output))

    return build


def test_build_is_incremental(built, compiled):
    before, binary = built.state(), built.extension.read_bytes()
    assert compiled(built) == []
    assert built.state() == before
    built.edit("src/twice.h", "value = 2", "value = 3")
    assert compiled(built) == ["src/twice.cpp"]
    assert built.extension.read_bytes() != binary


def test_build_follows_the_python_files(built, compiled):
    assert (built.variant / "parts/names.py").is_file()
    (built.variant / "stray.py").touch()
    assert compiled(built) == [] and not (built.variant / "stray.py").exists()
    package = built.root / "torch-ext/tiny_kernel"
    shutil.rmtree(package / "parts")
    (package / "names.py").write_text("LAST = 2\n")
    built.edit("torch-ext/tiny_kernel/__init__.py", ".parts.names", ".names")
    assert compiled(built) == []
    assert not (built.variant / "parts").exists()
    digest = built.metadata.digest
    assert "names.py" in digest.files
    digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, built.variant))


def test_extension_is_named_by_the_commit(built, compiled):
    assert built.extension.name == "_tiny_kernel_cpu_local.abi3.so"  # no Git
    assert built.metadata.provenance.kernel is None
    (built.root / ".gitignore").write_text("/build/\n/.build/\n")
    assert run("git", "init", "-q", built.root).returncode == 0
    assert Revision.read(built.root).suffix == "local"  # no commit yet
    head = built.commit()
    assert Revision.read(built.root) == Revision(head, False)
    assert Revision.read(built.root / "src").commit is None, "a copy in another checkout"

    built.edit("torch-ext/tiny_kernel/parts/names.py", "LAST = 1", "LAST = 2")
    assert compiled(built) == [BINDING], "only the file that uses the name"
    assert built.extension.name == f"_tiny_kernel_cpu_{head[:7]}_dirty.abi3.so"
    kernel = built.metadata.provenance.kernel
    assert (kernel.commit, kernel.dirty) == (head, True)


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


def test_builds_side_by_side_keep_to_their_own_symbols(tiny, compiled, tmp_path_factory):
    # With default visibility a loader gives both builds one `twice`, one `count` and one `value`.
    other = TinyPackage.write(tmp_path_factory.mktemp("other"))
    other.edit("src/twice.h", "value = 2", "value = 3")
    other.commit()  # gives it another name
    for package in (tiny, other):
        compiled(package)
        assert check(package.variant).exit_code == 0
    results = run_python(
        "import os, sys; from pathlib import Path; import torch\n"
        "from kernels import get_local_kernel\n"
        "sys.setdlopenflags(os.RTLD_NOW | os.RTLD_GLOBAL)\n"
        f"roots = [Path({str(tiny.root)!r}), Path({str(other.root)!r})]\n"
        "kernels = [get_local_kernel(root, backend='cpu') for root in roots]\n"
        "for kernel in kernels * 2:\n"
        "    x = torch.ones(2); kernel.twice_(x); print(x.tolist())\n"
    )
    assert results.splitlines() == ["[3.0, 4.0]", "[4.0, 5.0]", "[5.0, 6.0]", "[6.0, 7.0]"]


def test_werror_fails_on_a_warning(built, compiled, capfd):
    with open(built.root / "src/twice.cpp", "a") as source:
        source.write("static int unused() { return 1; }\n")
    assert compiled(built) == ["src/twice.cpp"]
    assert built.invoke("--werror").exit_code == 1
    assert "-Werror=unused-function" in capfd.readouterr().out


def check(*variants):
    return CliRunner().invoke(check_abi.main, [str(variant) for variant in variants])


def link(target, source, *options):
    """Returns the folder of the shared library of this source."""
    command = (os.environ.get("CXX", "g++"), "-shared", "-fPIC", "-x", "c++", "-", "-o", target)
    assert run(*command, *options, input=source).returncode == 0
    return target.parent


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """Folders of an extension that is fit for use, and of a library that others may use."""
    fit, other = (tmp_path_factory.mktemp(name) for name in ("fit", "other"))
    return link(fit / "f.abi3.so", ""), link(other / "libother.so", "void other() {}")


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
def test_check_abi_fails(libraries, tmp_path, source, requirement):
    fit, other = libraries
    assert check(fit).exit_code == 0
    link(tmp_path / "f.abi3.so", source, "-L", other, "-Wl,--as-needed", "-lother")
    result = check(tmp_path, fit)
    assert result.exit_code == 1
    assert re.search(rf"FAILED: .*{re.escape(requirement)}", result.output)


VECTOR = "void rows<float, (h100_diffusers_kernels::Access)0>(float*)"
SCALAR = "void rows<float, (h100_diffusers_kernels::Access)1>(float*)"
SCALAR_KERNEL = "void h100_diffusers_kernels::scalar_rope_kernel<float>(float*)"
QUANTIZATION = "void h100_diffusers_kernels::quantize_fp8_kernel<float, 32, 2, false>(float*)"
PRODUCTS, WAIT = ["HGMMA.64x128x16.F32.BF16"] * 4, "WARPGROUP.DEPBAR.LE"
FP8_PRODUCTS = ["QGMMA.64x192x32.F32.E4M3.E4M3"] * 4
SERIAL = "matrix products wait for each other"


def serial(products):
    return [opcode for product in products for opcode in (product, WAIT)]


@pytest.mark.parametrize(
    ("name", "spills", "opcodes", "fault"),
    [
        (VECTOR, 0, ["LDG.E.128.CONSTANT", "STG.E.128"], None),
        (VECTOR, 0, ["UBLKCP.S.G", "UBLKCP.G.S"], None),
        (VECTOR, 8, ["LDG.E.128", "STG.E.128"], "spills 8 bytes"),
        (VECTOR, 0, ["LDG.E.64", "STG.E.128"], "no 16-byte loads"),
        (VECTOR, 0, ["LDG.E.LTC128B.64", "STG.E.128"], "no 16-byte loads"),
        (VECTOR, 0, ["LDG.E.128", "STG.E", "STS.128"], "no 16-byte stores"),
        (VECTOR, 0, ["UTMALDG.4D", *PRODUCTS, WAIT, "UTMASTG.4D"], None),
        (VECTOR, 0, ["UTMALDG.4D", *serial(PRODUCTS), "UTMASTG.4D"], SERIAL),
        (VECTOR, 0, ["UTMALDG.2D", *FP8_PRODUCTS, WAIT, "UTMASTG.2D"], None),
        (VECTOR, 0, ["UTMALDG.2D", *serial(FP8_PRODUCTS), "UTMASTG.2D"], SERIAL),
        (QUANTIZATION, 0, ["LDG.E.128", "STG.E.64"], None),
        (QUANTIZATION, 0, ["LDG.E.128", "STG.E"], "no 16-byte stores"),
        (SCALAR, 0, ["LDG.E.U16", "STG.E.U16"], None),
        (SCALAR_KERNEL, 0, ["LDG.E.U16", "STG.E.U16"], None),
        (SCALAR, 4, ["LDG.E.U16", "STG.E.U16"], "spills 4 bytes"),
    ],
)
def test_kernel_resources_finds_faults(name, spills, opcodes, fault):
    kernel = Kernel(name, registers=32, stack=0, spills=spills, shared=0, opcodes=Counter(opcodes))
    assert kernel.faults() == ([fault] if fault else [])
