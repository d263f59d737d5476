"""Results by benchmark: benchmarks/results/<benchmark>.json is a list of the newest ones of each card.

Older ones are in Git's history. Related benchmarks, such as models/flux and models/wan, have one file, where
"name" of a result says whose it is. The documents show one result per benchmark, chosen by
`shown`, or the newest parts of several, chosen by `gathered`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "results"
# Of these a run may measure a part: a new result replaces only one of as many GPUs with the same options.
IN_PARTS = (
    *("models", "cuda_graphs", "host", "parallel", "adapters"),
    *("pipelines", "few_steps", "decoders", "block_masks", "in_part"),
)
LINE = 200  # characters: what fits is not broken into several lines
# What ranks share in a mode of bench_parallel.py, in the order of a mesh.
SPLITS = ("guidance", "ring", "ulysses", "tiles")


def card(environment: Mapping) -> str:
    """A short name of the card: "h100" for "NVIDIA H100 80GB HBM3"."""
    device = environment["device"]
    model = re.search(r"\b[A-Z]+\d+\b", device) if device.startswith("NVIDIA") else None
    return (model[0] if model else re.sub(r"\W+", "-", device).strip("-")).lower()


def commit(environment: Mapping) -> str | None:
    """The commit of the measured build, with "_dirty" if the sources differed; without a build, the
    checkout's. None if neither was recorded."""
    for kernel_id in environment.get("kernel_ids", ()):
        if match := re.search(r"_(?:cuda|cpu)_(\w+)$", kernel_id):
            return match[1]
    return environment.get("commit")


def path(name: str, results: Path = RESULTS) -> Path:
    """The file with the results of a benchmark: for "models/flux" models.json."""
    return results / f"{name.partition('/')[0]}.json"


def load(path: Path) -> list[dict]:
    """All results of a file, which may also be one that --output wrote."""
    loaded = json.loads(path.read_text(encoding="utf-8"))
    return loaded if isinstance(loaded, list) else [loaded]


def compact(value: object) -> str:
    """JSON without spaces, in which only what is longer than a line is broken into lines."""
    line = json.dumps(value, separators=(",", ":"), allow_nan=False)
    if len(line) <= LINE or not isinstance(value, dict | list):
        return line
    if isinstance(value, dict):
        parts = (f"{json.dumps(key)}:{compact(part)}" for key, part in value.items())
        return "{" + ",\n".join(parts) + "}"
    return "[" + ",\n".join(map(compact, value)) + "]"


def degree_of(measured: Mapping) -> int:
    """The number of GPUs of a mode's entry in a result."""
    return math.prod(measured.get(name, 1) for name in SPLITS)


def store(name: str, result: Mapping, results: Path = RESULTS) -> None:
    """Adds a result in the place of the card's older one."""
    part = name.partition("/")[2]
    target = path(name, results)
    result = {"name": part, **result} if part else result
    stored = load(target) if target.exists() else []
    older = replaced(name, result, stored)
    others = [other for other in stored if other not in older]
    ordered = sorted([*others, result], key=lambda one: (one.get("name", ""), date(one)))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(compact(ordered) + "\n", encoding="utf-8")


def replaced(name: str, result: Mapping, stored: Sequence[Mapping]) -> list[Mapping]:
    """The stored results in whose place a new one comes."""

    def identity(result: Mapping) -> Hashable:
        environment, has_parts = result["environment"], name.partition("/")[0] in IN_PARTS
        # The script's path may change.
        options = environment["command"].partition(".py")[2] if has_parts else ""
        return result.get("name"), card(environment), result.get("gpus"), options

    return [other for other in stored if identity(other) == identity(result)]


def date(result: Mapping) -> str:
    return result["environment"]["date"]


def kept_together(name: str, results: Path = RESULTS) -> list[dict]:
    """The results of related benchmarks, such as all models', oldest first, by their recorded time."""
    target = path(name, results)
    return sorted(load(target) if target.exists() else [], key=date)


def kept(name: str, results: Path = RESULTS) -> list[dict]:
    """The results of a benchmark, oldest first, by their recorded time."""
    part = name.partition("/")[2]
    return [one for one in kept_together(name, results) if one.get("name", "") == part]


def newest(name: str, device: str, results: Path = RESULTS) -> dict | None:
    """The newest result of a benchmark on the device with this name."""
    ours = [r for r in kept(name, results) if r["environment"]["device"] == device]
    return ours[-1] if ours else None


def shown(name: str, results: Path = RESULTS) -> dict | None:
    """The result that the documents show: the newest of any GPU, otherwise of any device."""
    stored = kept(name, results)
    of_gpus = [r for r in stored if r["environment"]["device"].startswith("NVIDIA")]
    return (of_gpus or stored or [None])[-1]


def gathered(
    name: str, parts: str, key: Callable[[dict], Hashable], results: Path = RESULTS
) -> dict | None:
    """For a benchmark that may run in parts: the newest entry of each part, on the shown card.

    `parts` is the key of a result's list of parts. The answer has the same key, and the results under "runs".
    """
    newest_ = shown(name, results)
    if newest_ is None:
        return None
    newest_of: dict[Hashable, tuple[dict, dict]] = {}
    for result in kept(name, results):
        if card(result["environment"]) == card(newest_["environment"]):
            newest_of.update({key(part): (part, result) for part in result[parts]})
    runs = {id(result): result for _, result in newest_of.values()}
    return {parts: [part for part, _ in newest_of.values()], "runs": list(runs.values())}
