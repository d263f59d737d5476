"""What the pages beside the README name is there, and what the issue forms ask for can be had."""

import fnmatch
import os
import re
import sys
from pathlib import Path

import pytest
import yaml

from conftest import CHECKOUT
from processes import run

PAGES = ["CHANGELOG.md", "SECURITY.md", "docs/architecture.md", "docs/injection.md"]
FORMS = sorted((CHECKOUT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml"))


@pytest.fixture(scope="module")
def files() -> list[str]:
    """The project's own, by their paths in it."""
    folders = ("benchmarks", "examples", "kernel_src", "tests", "tools", "torch-ext")
    paths = [
        *CHECKOUT.glob("*.*"),
        *(path for name in folders for path in (CHECKOUT / name).rglob("*.*")),
    ]
    return [str(path.relative_to(CHECKOUT)) for path in paths]


@pytest.fixture(scope="module")
def words(files) -> set[str]:
    """All words of the sources."""
    of_sources = re.compile(r"(?!tests/).*\.(cu|cuh|h|cpp|py|toml)")
    sources = [CHECKOUT / path for path in files if of_sources.fullmatch(path)]
    return set(re.findall(r"\w+", "\n".join(path.read_text() for path in sources)))


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_what_there_is(page, files, words):
    text = re.sub(r"```.*?```", "", (CHECKOUT / page).read_text(), flags=re.DOTALL)
    names = re.findall(r"`([^`\n]+)`", text)
    assert names
    for name in names:
        if re.fullmatch(r"[\w/*.-]+(\.(py|cuh?|h|cpp|toml|md)|/)", name):
            assert fnmatch.filter(files, f"*{name}*"), f"{page} names {name}, which is nowhere"
        elif not name.startswith("torch."):
            unknown = set(re.findall(r"[A-Za-z_]\w{3,}", name)) - words
            assert not unknown, f"{page} names {name}: {unknown} are nowhere in the sources"


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages_lead_somewhere(page):
    page = CHECKOUT / page
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / link).exists(), f"{page} links to {link}"


def test_issue_forms_ask_for_what_can_be_had():
    commands = set()
    for form in FORMS:
        fields = {field["id"]: field for field in yaml.safe_load(form.read_text())["body"]}
        asked = {name: field["attributes"].get("description", "") for name, field in fields.items()}
        assert "str(report)" in asked["report"]
        commands.update(re.findall(r"```sh\n(.*?)```", asked["versions"], re.DOTALL))
    (command,) = commands
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    process = run("bash", "-c", command, env={**os.environ, "PATH": path})
    assert process.returncode == 0, process.stderr
    for name in ("Python", "CUDA", "torch", "diffusers", "kernels"):
        assert name in process.stdout
