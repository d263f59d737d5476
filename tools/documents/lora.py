"""Tables of LoRA."""

from __future__ import annotations

from pathlib import Path

from .common import MODE_NAMES, card, figure, load, markdown, setup, span, table

NEVER, DELETED, HOT_SWAP = "never loaded", "deleted", "hot-swap"
FP8 = "injected+fp8"
VARIANTS = {
    **MODE_NAMES,
    FP8: '`precision="fp8"`',
    f"{FP8}+graphs": '`precision="fp8"`, CUDA graphs',
}


def models_of(results: Path) -> list[dict]:
    return load(results, "adapters")["models"]


def flux(results: Path) -> dict:
    """The variants of FLUX.1, all blocks."""
    return next(entry for entry in models_of(results) if entry["model"] == "flux")["variants"]


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
    result = load(results, "adapters")
    rows = []
    for entry in result["models"]:
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
    headers = ["model", "mode", "adapters", f"step, {card(result)}", "spread", "over none"]
    return markdown(rows, [*headers, "first step", "change"]) + setup(result)


@table
def summary_lora(results: Path) -> str:
    """FLUX.1 with and without adapters."""
    result = load(results, "adapters")
    variants = flux(results)
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


def _one(results: Path, variant: str) -> float:
    states = flux(results)[variant]
    return over_none(states, next(name for name in states if name.startswith("one of rank")))


@figure
def lora_over_none(results: Path) -> str:
    return span([_one(results, "injected")])


@figure
def lora_fp8_over_none(results: Path) -> str:
    return span([_one(results, FP8)])


@figure
def lora_over_eager(results: Path) -> str:
    return span([_over_eager(results, "injected")])


@figure
def lora_fp8_over_eager(results: Path) -> str:
    return span([_over_eager(results, FP8)])


def _over_eager(results: Path, variant: str) -> float:
    variants = flux(results)
    name = next(name for name in variants["eager"] if name.startswith("one of rank"))
    return (
        variants["eager"][name]["step_ms"]["median"] / variants[variant][name]["step_ms"]["median"]
    )
