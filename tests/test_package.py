"""The package from the view of the Hub and its loader."""

import ast
import importlib
import json
import re
import sys
from pathlib import Path
from types import FunctionType, ModuleType

import pytest
from click.testing import CliRunner
from kernels._rust import Backend, Build, Digest, DigestAlgorithm, Metadata

import check_abi
from builder.card import render_card
from builder.package import Package, read_toml
from conftest import CHECKOUT, VERSION
from processes import run_python

MODULE = "h100_diffusers_kernels"
SOURCES = CHECKOUT / "torch-ext" / MODULE

# The public names besides the operations. An addition to either needs a new version in build.toml.
OTHER_NAMES = {
    "CoordinateRope",
    "InjectionReport",
    "KeyBlocks",
    "eject_kernels",
    "inject_kernels",
    "layers",
}
OTHER_NAMES |= {"context_parallel_plan", "register_attention_backend"}
OTHER_NAMES |= {"enable_guidance_parallelism", "enable_tile_parallelism"}


def literal_all() -> list:
    """`__all__`, read without running the module, as by kernel-builder."""
    for statement in ast.parse((SOURCES / "__init__.py").read_text()).body:
        if isinstance(statement, ast.Assign) and statement.targets[0].id == "__all__":
            assert isinstance(statement.value, ast.List)
            return [ast.literal_eval(element) for element in statement.value.elts]
    raise AssertionError("no __all__ in __init__.py")


@pytest.fixture(scope="session")
def variant(kernel) -> Path:
    return Path(kernel.__file__).parent


@pytest.fixture(scope="session")
def extension(variant) -> Path:
    (extension,) = variant.glob("*.abi3.so")
    return extension


# -- build.toml, flake and card ----------------------------------------------------------------


def test_build_toml_is_accepted_by_kernel_builder():
    """`Package.read` checks too that each source is listed once."""
    assert Build.open(CHECKOUT).general.backends == [Backend.CUDA, Backend.CPU]
    for backend in ("cuda", "cpu"):
        package = Package.read(CHECKOUT, backend)
        assert package.stable_abi == (2, 11)
    assert Package.read(CHECKOUT, "cuda").capabilities == ["9.0a"]


def test_flake_inputs_are_locked():
    inputs = set(re.findall(r"^\s+([\w-]+)\.url =", (CHECKOUT / "flake.nix").read_text(), re.M))
    nodes = json.loads((CHECKOUT / "flake.lock").read_text())["nodes"]
    assert inputs and inputs == set(nodes["root"]["inputs"])
    assert all(re.fullmatch("[0-9a-f]{40}", nodes[name]["locked"]["rev"]) for name in inputs)


def test_card_is_a_template_that_kernel_builder_can_fill():
    card = render_card(CHECKOUT, read_toml(CHECKOUT)["general"])
    assert card.startswith("---\nlibrary_name: kernels\nlicense: apache-2.0\n")
    for name in set(literal_all()) - {"layers"}:
        assert f"- `{name}`" in card


# -- Python sources ----------------------------------------------------------------------------

# Arguments that Python 3.9 does not have.
NEWER_ARGUMENTS = {"zip": {"strict"}, "dataclass": {"slots", "kw_only"}}


@pytest.mark.parametrize(
    "path", sorted(SOURCES.rglob("*.py")), ids=lambda path: path.relative_to(SOURCES).as_posix()
)
def test_python_source_is_for_3_9_and_imports_only_torch(path):
    tree = ast.parse(path.read_text(), feature_version=(3, 9))
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported.update(name.name.split(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            imported.add(node.module.split(".")[0])
        elif isinstance(node, ast.Call):
            newer = NEWER_ARGUMENTS.get(ast.unparse(node.func), set())
            assert newer.isdisjoint(keyword.arg for keyword in node.keywords), node.lineno
    assert imported - set(sys.stdlib_module_names) <= {"torch"}


# The folders of injection, from below; "" are the files beside them.
FLOORS = {"core": 1, "quantized": 2, "parallel": 2, "parts": 3, "attention": 4, "families": 5}
FLOORS |= {"decoders": 5, "graphs": 6, "": 6}


@pytest.mark.parametrize("folder", FLOORS)
def test_imports_go_down(folder):
    """A file of injection imports only from floors below its own and from its own folder."""
    injection = SOURCES / "injection"
    for path in (injection / folder).glob("*.py"):
        if path.name == "__init__.py" and not folder:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                parent = path.parents[node.level - 1]
                parts = [*parent.relative_to(SOURCES).parts, *(node.module or "").split(".")]
                if parts[0] == "injection" and parent.is_relative_to(injection):
                    target = parts[1] if parts[1] in FLOORS else ""
                    is_below = FLOORS[target] < FLOORS[folder] or target == folder or not folder
                    assert is_below, f"{path.relative_to(injection)} imports {'.'.join(parts)}"


def test_public_names(kernel):
    operations = {
        name for name, value in vars(kernel.operations).items() if isinstance(value, FunctionType)
    }
    names = sorted(operations | OTHER_NAMES)
    assert literal_all() == kernel.__all__ == names
    public = {
        name
        for name, value in vars(kernel).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert public | {"layers"} == set(names)
    assert isinstance(kernel.layers, ModuleType)
    for name in names:
        assert getattr(kernel, name).__doc__, f"{name} has no docstring"


# -- The built variant -------------------------------------------------------------------------


def test_metadata(variant, extension, device):
    metadata = Metadata.read_from_file(variant / "metadata.json")
    assert metadata.name.python_name == MODULE
    assert (metadata.version, metadata.license) == (VERSION, "Apache-2.0")
    assert metadata.backend.backend_type == Backend.from_str(device)
    assert metadata.backend.archs == (["9.0a"] if device == "cuda" else None)
    assert metadata.python_depends == []
    assert extension.name == f"{metadata.id}.abi3.so"
    assert metadata.id.startswith(f"_{MODULE}_{device}_")
    assert metadata.provenance is not None
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))


def test_variant_holds_the_package_and_nothing_else(variant, extension):
    files = {path.relative_to(variant).as_posix() for path in variant.rglob("*") if path.is_file()}
    files = {path for path in files if not path.endswith(".pyc")}
    package = {path.relative_to(SOURCES).as_posix() for path in SOURCES.rglob("*.py")}
    assert files == package | {"_ops.py", "metadata.json", extension.name, f"{MODULE}/__init__.py"}


@pytest.mark.whole
def test_loads(kernel, variant, device, monkeypatch):
    """By the compatibility folder too: after `get_kernel`, and as the first import in a process."""
    monkeypatch.syspath_prepend(variant)
    importlib.import_module(MODULE)
    assert sys.modules.pop(MODULE).rms_norm is kernel.rms_norm
    names, total = run_python(
        f"import sys; sys.path.insert(0, {str(variant)!r})\nimport {MODULE} as k\n"
        "import torch; from pathlib import Path; from kernels import get_local_kernel\n"
        f"assert get_local_kernel(Path({str(variant.parent)!r})).rms_norm is k.rms_norm\n"
        f"x = torch.ones(2, 8, device={device!r})\n"
        "print(len(k.__all__), float(k.rms_norm(x).sum()))"
    ).split()
    assert int(names) == len(literal_all())
    assert float(total) == pytest.approx(16, rel=1e-4)


def test_abi(variant):
    result = CliRunner().invoke(check_abi.main, [str(variant)])
    assert result.exit_code == 0, result.output
    assert re.search(r"limited API of Python 3\.9 +ok", result.output)
