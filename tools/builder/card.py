"""The card of the Hub's page: CARD.md, filled as kernel-builder fills it."""

from __future__ import annotations

import ast
from pathlib import Path

import jinja2


def render_card(root: Path, general: dict) -> str:
    """Returns the Markdown of the card. `general` is the table [general] of build.toml."""

    def statements(name: str) -> list[ast.stmt]:
        package = root / "torch-ext" / general["name"].replace("-", "_")
        return ast.parse((package / name).read_text(encoding="utf-8")).body

    assignments = (node for node in statements("__init__.py") if isinstance(node, ast.Assign))
    (names,) = (node.value for node in assignments if ast.unparse(node.targets[0]) == "__all__")
    classes = [node.name for node in statements("layers.py") if isinstance(node, ast.ClassDef)]
    environment = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined)
    return environment.from_string((root / "CARD.md").read_text(encoding="utf-8")).render(
        repo_id=general["hub"]["repo-id"],
        version=general["version"],
        functions=[name for name in ast.literal_eval(names) if name != "layers"],
        layers=[name for name in classes if not name.startswith("_")],
        has_benchmark=(root / "benchmarks" / "benchmark.py").exists(),
        upstream=general.get("upstream"),
        source=general.get("source"),
        license=general["license"].lower(),
    )
