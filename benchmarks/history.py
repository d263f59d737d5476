"""Results, stored by date, commit and card: benchmarks/results/<benchmark>/<date>-<commit>-<card>.json.

No result is overwritten. The documents show one result per benchmark, chosen by `shown`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
# What earlier versions had. Results keep what was measured of it, and nothing shows it.
REMOVED_OPERATIONS = (
    *("norm_rope", "gated_gelu", "gated_silu"),
    *("rms_norm_modulate_pair", "gated_residual_rms_norm_modulate_pair"),
)


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


def path(name: str, environment: Mapping, results: Path = RESULTS) -> Path:
    """The path of a benchmark's result from this environment."""
    date, time, _ = environment["date"].split()
    moment = f"{date}T{time.replace(':', '')}"
    stem = "-".join(filter(None, [moment, commit(environment), card(environment)]))
    return results / name / f"{stem}.json"


def load(path: Path) -> dict:
    """The result without its entries of REMOVED_OPERATIONS."""
    result = json.loads(path.read_text(encoding="utf-8"))
    for part in ("workloads", "operations", "calls", "kernels"):
        if part in result:
            result[part] = [e for e in result[part] if operation(e) not in REMOVED_OPERATIONS]
    return result


def operation(entry: Mapping) -> str:
    """The operation of a result's entry, without its variant and shape."""
    return re.split(r"[, ]", entry.get("operation") or entry["workload"])[0]


def kept(name: str, results: Path = RESULTS) -> list[dict]:
    """All results of a benchmark, oldest first, by their recorded time."""
    loaded = [load(path) for path in sorted((results / name).glob("*.json"))]
    return sorted(loaded, key=lambda result: result["environment"]["date"])


def newest(name: str, device: str, results: Path = RESULTS) -> dict | None:
    """The newest result of a benchmark on the device with this name."""
    ours = [r for r in kept(name, results) if r["environment"]["device"] == device]
    return ours[-1] if ours else None


def shown(
    name: str,
    results: Path = RESULTS,
    counts: Callable[[dict], bool] = lambda result: True,
    cards: Sequence[str] = (),
) -> dict | None:
    """The result that the documents show: the newest that counts, of the first of `cards` that has one,
    otherwise of any GPU, otherwise of any device."""
    counted = [result for result in kept(name, results) if counts(result)]
    of_card = {card(result["environment"]): result for result in counted}
    for wanted in cards:
        if wanted in of_card:
            return of_card[wanted]
    of_gpus = [r for r in counted if r["environment"]["device"].startswith("NVIDIA")]
    return (of_gpus or counted or [None])[-1]


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
