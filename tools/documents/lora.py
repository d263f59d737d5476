"""Tables of LoRA."""

from __future__ import annotations

from pathlib import Path

from benchmarks import models
from benchmarks.harness import history

from .common import MODE_NAMES, card, figure, markdown, setup, span, table, there

NEVER, DELETED = "never loaded", "deleted"
FP8 = "injected+fp8"
VARIANTS = {
    **MODE_NAMES,
    FP8: '`precision="fp8"`',
    f"{FP8}+graphs": '`precision="fp8"`, CUDA graphs',
}


def gathered(results: Path) -> dict:
    """The newest entry of each model."""
    found = history.gathered("adapters", "models", lambda entry: entry["model"], results)
    return there(found, "adapters")


def flux_run(results: Path) -> tuple[dict, dict]:
    """The newest run of FLUX.1, all blocks, and its variants."""
    found = gathered(results)
    entry = next(entry for entry in found["models"] if entry["model"] == "flux")
    return next(run for run in found["runs"] if entry in run["models"]), entry["variants"]


def over_none(states: dict, name: str) -> float:
    """A state's time over that of the model that never had an adapter, measured beside it."""
    base = states[name].get("never_loaded_ms", states[NEVER]["step_ms"])
    return states[name]["step_ms"]["median"] / base["median"]


def changed_in(state: dict) -> str:
    seconds = state["change_s"]["median"]
    return f"{1e3 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


@table
def lora_models(results: Path) -> str:
    """Steps with adapters, beside the model that never had one."""
    found = gathered(results)
    rows = []
    for entry in found["models"]:
        for variant, states in entry["variants"].items():
            for name, state in states.items():
                if "step_ms" not in state:
                    continue
                step = state["step_ms"]
                title = f"{entry['name']}, {entry['blocks']} blocks"
                row = [title, VARIANTS.get(variant, variant), name, f"{step['median']:.1f} ms"]
                row += [f"{100 * step['spread']:.0f}%"]
                row += [f"{over_none(states, name):.2f}" if name != NEVER else ""]
                row += [f"{1e3 * state['first_s']['median']:.0f} ms" if name != NEVER else ""]
                row += [changed_in(state) if name not in (NEVER, DELETED) else ""]
                rows.append(row)
    runs = found["runs"]
    headers = ["model", "mode", "adapters", f"step, {card(runs[0])}", "spread", "over none"]
    return markdown(rows, [*headers, "first step", "change"]) + setup(*runs)


@table
def summary_lora(results: Path) -> str:
    """FLUX.1 with and without adapters."""
    result, variants = flux_run(results)
    names = [name for name in variants["injected"] if name in (NEVER, "fused") or " rank " in name]
    rows = []
    for name in names:
        row = [name]
        for variant in ("eager", "injected", FP8):
            state = variants[variant].get(name)
            missing = state is None
            row.append("not measured" if missing else f"{state['step_ms']['median']:.0f} ms")
            if variant != "eager":
                row.append(f"{over_none(variants[variant], name):.2f}")
        rows.append(row)
    headers = [f"FLUX.1, {card(result)}", "eager", "injected", "over none", '`precision="fp8"`']
    return markdown(rows, [*headers, "over none"]) + setup(result)


def one_adapter(states: dict) -> str:
    """The name of the state with one adapter, of the model's own rank."""
    return next(name for name in states if name.startswith("one of rank"))


def flux_over_none(results: Path, variant: str) -> str:
    states = flux_run(results)[1][variant]
    return span([over_none(states, one_adapter(states))])


def flux_over_eager(results: Path, variant: str) -> str:
    _, variants = flux_run(results)
    name = one_adapter(variants["eager"])
    eager, ours = (variants[each][name]["step_ms"]["median"] for each in ("eager", variant))
    return span([eager / ours])


@figure
def lora_over_none(results: Path) -> str:
    return flux_over_none(results, "injected")


@figure
def lora_fp8_over_none(results: Path) -> str:
    return flux_over_none(results, FP8)


@figure
def lora_over_eager(results: Path) -> str:
    return flux_over_eager(results, "injected")


@figure
def lora_fp8_over_eager(results: Path) -> str:
    return flux_over_eager(results, FP8)


@figure
def lora_at_most_over_none(results: Path) -> str:
    """Of one or two adapters of any measured rank, in 16 bits: the slowest."""
    in_16_bits = ("injected", models.GRAPHS)
    entries = [entry["variants"] for entry in gathered(results)["models"]]
    each = [entry[mode] for entry in entries for mode in in_16_bits if mode in entry]
    return span([max(over_none(states, n) for states in each for n in states if " rank " in n)])
