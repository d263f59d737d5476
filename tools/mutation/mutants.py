"""Random mutants of the sources, and the line ranges around a mutant."""

from __future__ import annotations

import ast
import contextlib
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

Mutation = tuple[str, int]  # operator, occurrence


def is_left_out(node: Any) -> bool:
    """Whether a syntax node is an annotation, a parameter marker or in code for type checkers."""
    while (parent := node.parent) is not None:
        if node.type == "if_stmt" and "TYPE_CHECKING" in node.children[1].get_code():
            return True
        in_annotation = (
            (parent.type == "tfpdef" and node is not parent.children[0])
            or (parent.type == "annassign" and node is parent.children[1])
            or (parent.type == "funcdef" and node is parent.annotation)
        )
        is_marker = node.type == "operator" and parent.type in ("parameters", "lambdef", "param")
        if in_annotation or is_marker:
            return True
        node = parent
    return False


def mutations(source: str) -> dict[tuple, list[Mutation]]:
    """Returns the mutations of a file by position. Occurrences count as in cosmic-ray."""
    classes = {name: plugins.get_operator(name) for name in plugins.operator_names()}
    operators = {name: cls() for name, cls in classes.items() if not cls.arguments()}
    occurrences: Counter[str] = Counter()
    found: dict[tuple, list[Mutation]] = {}
    for node in ast_nodes(get_ast(source)):
        for name, operator in operators.items():
            for position in operator.mutation_positions(node):
                if not is_left_out(node):
                    found.setdefault(position, []).append((name, occurrences[name]))
                occurrences[name] += 1
    return found


def draw_mutants(
    sources: dict[str, str], count: int, rng: random.Random
) -> Iterator[dict[str, Any]]:
    """Draws mutants of the files `sources`, at most one for each position."""
    positions = [
        (file, position, choices)
        for file, source in sorted(sources.items())
        for position, choices in mutations(source).items()
    ]
    rng.shuffle(positions)
    for file, ((line, _), _), choices in positions:
        operator, occurrence = rng.choice(choices)
        mutated = mutate_code(sources[file], plugins.get_operator(operator)(), occurrence)
        with contextlib.suppress(SyntaxError):
            compile(mutated, file, "exec")
            place = {"file": file, "line": line, "operator": operator.split("/")[1]}
            text = [code.splitlines()[line - 1].strip() for code in (sources[file], mutated)]
            yield {**place, "occurrence": occurrence, "change": text, "mutated": mutated}
            count -= 1
        if count == 0:
            return


def line_ranges(source: str, line: int) -> Iterator[tuple[int, int]]:
    """Line ranges around `line`: the statement without its body, then each enclosing block."""
    ranges = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt):
            decorators = [d.lineno for d in getattr(node, "decorator_list", [])]
            first, last = min([node.lineno, *decorators]), node.end_lineno or node.lineno
            if first <= line <= last:
                ranges.append((last - first, first, last, getattr(node, "body", [])))
    _, first, last, body = min(ranges, key=lambda entry: entry[0])
    head = body[0].lineno - 1 if body else last
    yield (first, head) if line <= head else (line, line)
    yield from ((first, last) for _, first, last, _ in sorted(ranges, key=lambda entry: entry[0]))
    yield 1, source.count("\n") + 1
