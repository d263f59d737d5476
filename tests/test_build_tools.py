"""The tools that build a variant and check it, on a package that compiles in seconds."""

import os
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from kernels._rust import Digest, DigestAlgorithm, Metadata

from builder.package import Revision
from compare_machine_code import compare
from kernel_resources import Kernel, digest
from processes import TOOLS, run, run_python

TINY = {
    "build.toml": """
[general]
name = "tiny-kernel"
version = 3
edition = 5
license = "Apache-2.0"
backends = ["cpu"]

[torch]
include = ["src"]
src = ["torch-ext/torch_binding.cpp"]

[torch.stable-abi]
cpu = "2.11"

[kernel.tiny]
backend = "cpu"
depends = ["torch"]
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


class TinyPackage:
    """A package of one operation, which builds in seconds."""

    def __init__(self, root: Path):
        self.root = root
        for path, text in TINY.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)

    def build(self, *options) -> str:
        tool = TOOLS / "build_variant.py"
        process = run(sys.executable, tool, "--root", self.root, "--backend", "cpu", *options)
        return process.stdout + process.stderr if process.returncode else process.stdout

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
    return TinyPackage(tmp_path)


def test_build_is_incremental(tiny):
    binding = "torch-ext/torch_binding.cpp"
    assert sorted(tiny.compiled(tiny.build())) == ["src/twice.cpp", binding]
    assert tiny.doubled() == "[2.0, 2.0, 2.0]"
    for cache in tiny.root.rglob("__pycache__"):
        for file in cache.iterdir():
            file.unlink()

    before = tiny.state()
    output = tiny.build()
    assert "no work to do" in output and "up to date" in output
    assert tiny.state() == before

    header = tiny.root / "src/twice.h"
    header.write_text(header.read_text().replace("kFactor = 2", "kFactor = 3"))
    assert tiny.compiled(tiny.build()) == ["src/twice.cpp"]
    assert tiny.doubled() == "[3.0, 3.0, 3.0]"


def test_build_follows_the_python_files(tiny):
    tiny.build()
    assert (tiny.variant / "parts/names.py").is_file()
    package = tiny.root / "torch-ext/tiny_kernel"
    (package / "parts/names.py").unlink()
    (package / "parts/__init__.py").unlink()
    (package / "names.py").write_text("LAST = 2\n")
    init = package / "__init__.py"
    init.write_text(init.read_text().replace(".parts.names", ".names"))
    assert tiny.compiled(tiny.build()) == []
    assert not (tiny.variant / "parts").exists()
    metadata = Metadata.read_from_file(tiny.variant / "metadata.json")
    assert "names.py" in metadata.digest.files
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, tiny.variant))
    assert tiny.doubled() == "[2.0, 2.0, 2.0]"


def test_extension_is_named_by_the_commit(tiny):
    tiny.build()
    assert tiny.extension_id == "_tiny_kernel_cpu_local"  # no Git
    assert Metadata.read_from_file(tiny.variant / "metadata.json").provenance.kernel is None

    (tiny.root / ".gitignore").write_text("/build/\n/.build/\n")
    assert run("git", "init", "-q", tiny.root).returncode == 0
    tiny.build()
    assert tiny.extension_id == "_tiny_kernel_cpu_local"  # no commit yet

    tiny.commit()
    assert tiny.compiled(tiny.build()) == ["torch-ext/torch_binding.cpp"]
    head = run("git", "-C", tiny.root, "rev-parse", "HEAD").stdout.strip()
    assert tiny.extension_id == f"_tiny_kernel_cpu_{head[:7]}"
    provenance = Metadata.read_from_file(tiny.variant / "metadata.json").provenance
    assert (provenance.kernel.commit, provenance.kernel.dirty) == (head, False)

    (tiny.root / "src/twice.h").write_text("// changed\n" + TINY["src/twice.h"])
    tiny.build()
    assert tiny.extension_id == f"_tiny_kernel_cpu_{head[:7]}_dirty"
    assert Metadata.read_from_file(tiny.variant / "metadata.json").provenance.dirty
    assert tiny.doubled() == "[2.0, 2.0, 2.0]"


def test_copy_in_another_checkout_has_no_revision(tiny):
    assert run("git", "init", "-q", tiny.root).returncode == 0
    tiny.commit()
    assert Revision.read(tiny.root).commit is not None
    assert Revision.read(tiny.root / "src").commit is None


def test_build_says_what_is_wrong(tiny):
    (tiny.root / "src/twice.h").unlink()
    assert "build.toml lists src/twice.h, which does not exist" in tiny.build()
    (tiny.root / "build.toml").write_text(TINY["build.toml"].replace("edition", "version-of"))
    assert "Error: " in tiny.build() and "version-of" in tiny.build()


def test_werror_fails_on_a_warning(tiny):
    source = tiny.root / "src/twice.cpp"
    source.write_text(source.read_text() + "static int unused() { return 1; }\n")
    assert "built" in tiny.build()
    assert "-Werror=unused-function" in tiny.build("--werror")


@pytest.mark.parametrize(
    ("source", "requirement"),
    [
        (
            'extern "C" void PyUnicode_AsUTF8(); void f() { PyUnicode_AsUTF8(); }',
            "PyUnicode_AsUTF8",
        ),
        ("namespace at { void empty(); } void f() { at::empty(); }", "at::empty()"),
        ("void other(); void f() { other(); }", "libother.so"),
    ],
    ids=["newer Python", "Torch C++", "library"],
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
    process = run(sys.executable, TOOLS / "check_abi.py", variant)
    assert process.returncode == 1
    assert re.search(rf"FAILED: .*{re.escape(requirement)}", process.stdout)


VECTOR = "void rows<float, (h100_diffusers_kernels::Access)0>(float*)"
SCALAR = "void rows<float, (h100_diffusers_kernels::Access)1>(float*)"
PRODUCTS, WAIT = ["HGMMA.64x128x16.F32.BF16"] * 4, "WARPGROUP.DEPBAR.LE"


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
        (SCALAR, 0, ["LDG.E.U16", "STG.E.U16"], []),
        (SCALAR, 4, ["LDG.E.U16", "STG.E.U16"], ["spills 4 bytes"]),
    ],
)
def test_kernel_resources_finds_faults(name, spills, opcodes, faults):
    kernel = Kernel(name, registers=32, stack=0, spills=spills, shared=0, opcodes=Counter(opcodes))
    assert kernel.faults() == faults


LISTING = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;  /* 0x00000a00ff017b82 */
                                                           /* 0x000fe20000000800 */
        /*0010*/                   EXIT ;                  /* 0x000000000000794d */
                                                           /* 0x000fea0003800000 */
"""


def test_compare_machine_code_tells_what_became_of_each_kernel():
    def kernel(name, listing=LISTING, registers=32):
        return Kernel(
            name, registers, stack=0, spills=0, shared=0, code=digest(listing.splitlines())
        )

    other = LISTING.replace("4d */", "4e */")
    before = [kernel("a"), kernel("b<true>"), kernel("c"), kernel("d", other), kernel("e")]
    after = [kernel("a"), kernel("b<B::kOn>"), kernel("c", other), kernel("e", registers=40)]
    after += [kernel("f", other, registers=40)]
    result = compare(before, after)
    assert (result.same, result.renamed) == (["a"], ["b<true> -> b<B::kOn>"])
    assert (result.changed, result.added, result.gone) == (["c", "e"], ["f"], ["d"])
    assert not result.is_same
    assert compare(before, before).is_same
