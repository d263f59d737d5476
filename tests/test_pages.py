"""The pages: each command, name, option and link in them exists, and their examples run."""

import ast
import fnmatch
import functools
import importlib
import importlib.util
import inspect
import re
import shlex
import sys
from pathlib import Path

import click
import pytest
import torch
import yaml
from diffusers import LTXPipeline

from benchmarks import FOLDERS

import render_docs
from builder.card import render_card
from builder.package import read_toml
from conftest import CHECKOUT, REPO_ID, VERSION
from inputs import PLAIN_OPERATIONS, TABLE
from ltx_models import snapshot
from processes import run

sys.path.insert(0, str(CHECKOUT / "examples"))
from pipelines import MODELS, trained_pipeline


def texts(*paths):
    paths = [path for pattern in paths for path in sorted(CHECKOUT.glob(pattern))]
    return {str(p.relative_to(CHECKOUT)): p.read_text(encoding="utf-8") for p in paths}


PAGES = texts("README.md", "docs/**/*.md")
INJECTION = [f"docs/{name}.md" for name in ("using", "models", "limits", "graphs")]
OTHER_PAGES = ("CHANGELOG.md", "SECURITY.md", "docs/architecture.md", *INJECTION)
LINKED = texts("*.md", "docs/**/*.md", "benchmarks/**/*.md", "examples/**/README.md")
BENCHMARKS = [page for page in PAGES if page.startswith("docs/benchmarks")]
every_page = pytest.mark.parametrize("page", PAGES)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
# A number with one of these units is a measurement.
UNIT = r"(?:×|%|[mµn]?s|GB|MB|[TG]B/s|TFLOP/s|times|of eager's)"
MEASUREMENT = re.compile(rf"\b\d+(?:\.\d+)?\s?{UNIT}(?!\w)")


def blocks(text, language):
    return [code for name, code in FENCE.findall(text) if name == language]


def table(page, header):
    """The lines of a table that begins with this header cell."""
    pattern = rf"^\| {header} \|.*?\n\n"
    (found,) = re.findall(pattern, PAGES[page], re.DOTALL | re.MULTILINE)
    return found.strip().splitlines()[2:]


@pytest.mark.parametrize("page", ["README.md", "CARD.md", *BENCHMARKS])
def test_prose_has_no_figure_of_its_own(page):
    """All are rendered from the results."""
    text = LINKED[page]
    for pattern in (render_docs.TABLE, render_docs.FIGURE, FENCE):
        text = pattern.sub(" ", text)
    assert MEASUREMENT.findall("1.67× 12 ms 0.45 s 3 TB/s 2.0 times 10 % 49 frames a 2 B model")
    assert not MEASUREMENT.findall(text)


# -- Commands ----------------------------------------------------------------------------------


MAKEFILE = (CHECKOUT / "Makefile").read_text(encoding="utf-8")
MAKE_TARGETS = set(re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split())


def click_command(script):
    """The command line of a Python script."""
    path = CHECKOUT / script
    folder = str(path.parent)
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(path.stem).main
    finally:
        sys.path.remove(folder)


def check_python(script, *words):
    """The script is there, and takes the options."""
    assert (CHECKOUT / script).is_file(), f"there is no {script}"
    known = {
        option
        for parameter in click_command(script).params
        if isinstance(parameter, click.Option)
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    asked = {word.split("=")[0] for word in words if word.startswith("-")}
    assert asked <= known, f"{script} has no {asked - known}"


def imported(script):
    """The modules that a script imports, in their order."""
    for node in ast.parse((CHECKOUT / script).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            yield node.module.partition(".")[0]
        elif isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)


SCRIPTS = [
    p
    for p in sorted(str(p.relative_to(CHECKOUT)) for p in (CHECKOUT / "benchmarks").rglob("*.py"))
    if "sys.path.insert" in (CHECKOUT / p).read_text("utf-8")
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_benchmark_finds_what_it_imports(script):
    """Importing benchmarks puts other folders on the path of a script."""
    found = {path.stem for folder in FOLDERS for path in (CHECKOUT / folder).glob("*.py")}
    modules = list(imported(script))
    assert not found.intersection(modules[: modules.index("benchmarks")])


def check_command(line):
    """What a command of these pages calls exists here, with the options that it is given."""
    program, *words = shlex.split(re.sub(r"\s#.*", "", line))
    if program == "make":
        assert set(words) <= MAKE_TARGETS, line
    elif program == "python" and words[0] == "-m":
        assert importlib.util.find_spec(words[1]), f"there is no module {words[1]}"
        if words[1] == "pytest":
            assert all((CHECKOUT / word).exists() for word in words[2:]), line
    elif program == "python":
        check_python(*words)
    elif program == "pip":
        assert words[:2] == ["install", "-r"] and (CHECKOUT / words[2]).exists(), line
    elif program == "nix":  # of kernel-builder, which makes the flake's packages
        assert words == ["run", ".#build-and-copy"], line
    elif program == "git":  # which searches, or prints a file's older version
        assert words[0] == "grep" or (CHECKOUT / words[1].partition(":")[2]).is_file(), line
    elif program == "kernels":
        assert words in (["benchmark"], ["benchmark", "."]), line
    else:
        assert (CHECKOUT / program).exists(), f"unknown command: {line}"


def commands(text):
    """Of the shell's blocks, and of those in sentences and tables that name a program."""
    for code in blocks(text, "sh"):
        yield from (line for line in code.splitlines() if line.strip())
    without_code = FENCE.sub("", text)
    for span in re.findall(r"`([^`\n]+)`", without_code):
        if re.match(r"(make|python|pip|nix|kernels) [\w./-]", span) and "CHECKOUT" not in span:
            yield span


@every_page
def test_commands_exist(page):
    for line in commands(PAGES[page]):
        check_command(line)


def test_ci_runs_the_two_commands_and_all_tests():
    two = [line.split("#")[0].strip() for line in blocks(PAGES["README.md"], "sh")[0].splitlines()]
    assert two == ["make example", "make test"]
    ci = (CHECKOUT / ".ci" / "run").read_text(encoding="utf-8")
    for command in (*two, "make test-slow", "make test-versions", "make kernels-ci", "make cross"):
        assert re.search(rf"^step (.* )?{command}( |$)", ci, re.MULTILINE), command


def test_steps_of_gpu_check_are_those_of_the_page():
    cells = [line.split("|")[1] for line in table("docs/benchmarks.md", "step")]
    told = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    process = run("bash", CHECKOUT / "tools" / "gpu_check.sh", "nothing")
    assert process.returncode == 2
    assert process.stderr.split("the steps are ")[1].split() == told


# -- Code --------------------------------------------------------------------------------------


@pytest.fixture
def small_ltx_video(monkeypatch, device):
    """LTXPipeline with the small trained model in the place of the published weights, and short videos."""
    pipe = trained_pipeline(MODELS["ltx"].trained, device, torch.bfloat16).to(device)
    monkeypatch.setattr(LTXPipeline, "from_pretrained", classmethod(lambda cls, *_, **__: pipe))
    monkeypatch.setattr(LTXPipeline, "to", lambda self, place: self)
    small = {"height": 64, "width": 96, "num_frames": 9, "num_inference_steps": 2}
    call = functools.partialmethod(LTXPipeline.__call__, output_type="pt", **small)
    monkeypatch.setattr(LTXPipeline, "__call__", call)
    return pipe


def card():
    """As the Hub shows it, with the values that kernel-builder fills in."""
    return render_card(CHECKOUT, read_toml(CHECKOUT)["general"])


@pytest.mark.usefixtures("_one_thread")
def test_the_first_example(kernel, small_ltx_video):
    before = snapshot(small_ltx_video.transformer)
    code = blocks(PAGES["README.md"], "python")[0]
    begin, end = code.split("kernel.eject_kernels(pipe)")
    namespace = {}
    exec(begin, namespace)
    assert namespace["report"].replaced and namespace["report"].calls
    assert namespace["video"].shape[-1] and torch.isfinite(namespace["video"]).all()
    exec(f"kernel.eject_kernels(pipe){end}", namespace)
    assert snapshot(small_ltx_video.transformer) == before


def test_the_cards_first_example_is_readmes():
    first, cards = (
        ast.dump(ast.parse(blocks(text, "python")[0])) for text in (PAGES["README.md"], card())
    )
    assert cards == first


def test_the_cards_operations(kernel, device):
    rows, heads = torch.randn(2, 24, 128, device=device), torch.randn(2, 24, 2, 64, device=device)
    q, k, v = (t.bfloat16() for t in (heads, heads.flip(1), heads.flip(0)))
    axes = [
        tuple(torch.rand(positions, pairs, device=device) for _ in range(2))
        for positions, pairs in ((2, 12), (3, 10), (4, 10))
    ]
    frame, height, width = axes
    weight, bias = rows[0, :2]
    lengths = torch.tensor([24, 7], device=device, dtype=torch.int32)
    given = {"kernel": kernel, "x": rows, "q": q, "k": k, "v": v, "weight": weight, "bias": bias}
    of_positions = {"frame": frame, "height": height, "width": width, "lengths": lengths}
    namespace = {**given, **of_positions}
    code = blocks(card(), "python")[1].replace("rope_3d(x", "rope_3d(q")
    exec(code, namespace)
    for name in ("normalized", "rotated", "activated", "attended"):
        assert torch.isfinite(namespace[name]).all(), name


@pytest.mark.usefixtures("kernel")  # sets LOCAL_KERNELS
def test_the_operations_example():
    namespace = {}
    for code in blocks(PAGES["docs/operations.md"], "python")[:2]:
        exec(code, namespace)
    for name in ("normalized", "residual", "attended", "y"):
        assert torch.isfinite(namespace[name]).all(), name


def test_the_layers_example(kernel, monkeypatch):
    monkeypatch.chdir(Path(kernel.__file__).parents[2])
    code = blocks(PAGES["docs/operations.md"], "python")[3]
    namespace = {}
    try:
        exec(code, namespace)
    finally:
        for cls in (cls for classes in namespace["CLASSES"].values() for cls in classes):
            del cls.kernel_layer_name, cls.kernel_condition
    assert torch.isfinite(namespace["y"]).all()
    expected = namespace["FeedForward"].forward  # the classes themselves are as they were
    assert expected.__qualname__ == "FeedForward.forward"


# -- Names -------------------------------------------------------------------------------------


@every_page
def test_names_of_the_api_exist(page, kernel):
    for name in re.findall(r"\bkernel\.(\w+)", PAGES[page]):
        assert name in kernel.__all__ or page != "README.md" and hasattr(kernel, name), name
    for name in re.findall(r"`(\w*inject\w*)\(", PAGES[page]):
        assert name in kernel.__all__, name


def test_functions_of_the_table_exist_with_their_arguments(kernel):
    """Each operation is in the table of functions; what stands in brackets are names of its parameters."""
    told = set()
    for line in table("docs/operations.md", "function"):
        names = re.findall(r"`([\w.]+)\(([^)]*)\)`", line.split("|")[1])
        assert names, line
        for name, arguments in names:
            name = re.sub(r"^\.\.\._", "gated_residual_", name)
            told.add(name)
            parameters = inspect.signature(getattr(kernel, name)).parameters
            asked = {word.strip(" =") for word in arguments.split(",")} - {"..."}
            assert asked <= set(parameters), f"{name} takes no {asked - set(parameters)}"
    assert told == {*TABLE, *PLAIN_OPERATIONS}


def test_models_of_the_table_are_those_injected_in_full(kernel):
    told = re.findall(r"`(\w+)`", "\n".join(table("docs/models.md", "family")))
    inject = sys.modules[f"{kernel.__name__}.injection.inject"]
    models = (model for family in inject.FAMILIES for model in family.models)
    assert sorted(told) == sorted(model.path.partition(":")[2] for model in models)


@functools.cache
def files():
    """The project's own, by their paths in it."""
    folders = ["benchmarks", "examples", "kernel_src", "reference", "tests", "tools", "torch-ext"]
    paths = [*CHECKOUT.glob("*.*"), *(p for f in folders for p in (CHECKOUT / f).rglob("*.*"))]
    return [str(path.relative_to(CHECKOUT)) for path in paths]


@functools.cache
def words():
    """All words of the sources."""
    of_sources = re.compile(r"(?!tests/).*\.(cu|cuh|h|cpp|py|toml)")
    sources = [CHECKOUT / path for path in files() if of_sources.fullmatch(path)]
    return set(re.findall(r"\w+", "\n".join(path.read_text() for path in sources)))


@pytest.mark.parametrize("page", OTHER_PAGES)
def test_names_of_files_and_of_code_exist(page):
    names = re.findall(r"`([^`\n]+)`", FENCE.sub("", LINKED[page]))
    assert names
    for name in names:
        if re.fullmatch(r"[\w/*.-]+(\.(py|cuh?|h|cpp|toml|md)|/)", name):
            assert fnmatch.filter(files(), f"*{name}*"), f"{page} names {name}, which is nowhere"
        elif not name.startswith("torch."):
            unknown = set(re.findall(r"[A-Za-z_]\w{3,}", name)) - words()
            assert not unknown, f"{page} names {name}: {unknown} are nowhere in the sources"


def test_issue_forms_ask_for_what_can_be_had(capsys):
    commands = set()
    for form in (CHECKOUT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml"):
        fields = {field["id"]: field for field in yaml.safe_load(form.read_text())["body"]}
        asked = {name: field["attributes"].get("description", "") for name, field in fields.items()}
        assert "str(report)" in asked["report"]
        commands.update(re.findall(r"```sh\n(.*?)```", asked["versions"], re.DOTALL))
    (command,) = commands
    program, option, code = shlex.split(command)
    assert (program, option) == ("python", "-c")
    exec(code, {})
    output = capsys.readouterr().out
    for name in ("Python", "CUDA", "torch", "diffusers", "kernels"):
        assert name in output


def test_the_repository_and_its_version_are_those_of_build_toml():
    """Wherever a page, an example or a docstring names them."""
    folders = ("benchmarks", "examples", "tests", "tools", "torch-ext")
    code = texts(
        "*.toml", ".github/**/*.yml", "examples/*.ipynb", *(f"{f}/**/*.py" for f in folders)
    )
    owner, name = REPO_ID.split("/")
    for path, text in {**LINKED, **code}.items():
        owners = re.findall(rf"([\w.-]+)(?:/|--){name}\b", text)
        assert {found.removeprefix("kernels--") for found in owners} <= {owner}, path
        versions = re.findall(rf"(?:{name}|\.\.\.)\W+[^)]*?\bversion=(\d+)", text)
        assert {int(version) for version in versions} <= {VERSION}, path


# -- Links -------------------------------------------------------------------------------------


def anchors(path):
    """Of the headings, as GitHub makes them."""
    headings = re.findall(
        r"^#+ (.*)$", FENCE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKED)
def test_relative_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", LINKED[page])):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (CHECKOUT / page).parent / name if name else CHECKOUT / page
        assert path.exists(), f"{page} links to {target}"
        assert not anchor or anchor in anchors(path), f"{page} links to {target}"
