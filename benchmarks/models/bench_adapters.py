"""Denoising with LoRA adapters: none, at rest, one, two, of a high rank, fused; also in FP8 and as graphs.

A sample is as many forwards of a published model as --steps says, back to back, as in a denoising loop. The
adapters have random weights, on all linear layers of the blocks. One injected model has all of them, and its
states take turns with a model that never had any. Also recorded: the first forward after a change of the
state, the seconds of the change, and the memory that a forward takes. FLUX.1 has all its blocks. Writes to
benchmarks/results/adapters:

    python benchmarks/models/bench_adapters.py
    python benchmarks/models/bench_adapters.py --models flux --steps 4 --rounds 2
    python benchmarks/models/bench_adapters.py --device cpu --tiny --models flux --output /tmp/adapters.json
"""

from __future__ import annotations

import copy
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import click
import torch
from peft import LoraConfig, get_peft_model_state_dict
from tabulate import tabulate

from benchmarks import models
from benchmarks.harness import clocks, record, timing
from benchmarks.harness.options import DEVICE, DTYPE, MODELS, TINY, measure_each, names_option
from benchmarks.models.published import Published

DEPTH = ("num_layers", "num_single_layers")  # arguments that published.py makes small
EAGER, FP8, GRAPHS, FP8_GRAPHS = "eager", "injected+fp8", "injected+graphs", "injected+fp8+graphs"
OPTIONS: dict[str, dict[str, Any]] = {
    "injected": {},
    FP8: {"precision": "fp8"},
    GRAPHS: {"cuda_graphs": True},  # without the host's time
    FP8_GRAPHS: {"precision": "fp8", "cuda_graphs": True},
}
# Rank, steps and variants of each model.
CASES: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "flux": (16, 28, (EAGER, "injected", FP8, FP8_GRAPHS)),
    "wan": (32, 4, ("injected",)),
    "qwenimage": (32, 50, ("injected", GRAPHS)),
    "ltx": (32, 30, ("injected", GRAPHS)),
    "sdxl": (32, 50, (GRAPHS,)),
}
WHOLE, WARM_UP_STEPS = ("flux",), 2
NEVER, DELETED = "never loaded", "deleted"
HIGH_RANK = 64
WEIGHTS = "peaked"


def states_of(rank: int) -> dict[str, Callable[[Any], None]]:
    """The states of a model that has adapters, each as a change of the one before."""
    weight = 0.8

    def at_rest(model: Any) -> None:
        model.set_adapters(["one"], [weight])
        model.disable_adapters()

    def active(names: list[str], weights: list[float]) -> Callable[[Any], None]:
        def change(model: Any) -> None:
            model.enable_adapters()
            model.set_adapters(names, weights)

        return change

    def fused(model: Any) -> None:
        active(["one"], [weight])(model)
        model.fuse_lora()

    return {
        "disabled": at_rest,
        f"one of rank {rank}": active(["one"], [weight]),
        f"two of rank {rank}": active(["one", "two"], [weight, 0.6]),
        f"one of rank {HIGH_RANK}": active(["high"], [weight]),
        "fused": fused,
    }


def with_adapters(model: Any, rank: int) -> Any:
    twin = models.twin(model)
    targets = models.linear_layers(twin)
    for name, of_rank in (("one", rank), ("two", rank), ("high", HIGH_RANK)):
        config = LoraConfig(r=of_rank, target_modules=targets, init_lora_weights=False)
        twin.add_adapter(config, adapter_name=name)
    for name, weight in twin.named_parameters():
        if "lora_" in name:  # as large as trained ones: a few percent of a layer's result
            weight.data.normal_(std=weight.shape[1] ** -0.5 * (0.2 if "lora_B" in name else 1.0))
    return twin


class Loop:
    """Forwards of one model in one state."""

    def __init__(self, forward: Callable[[], object], steps: int, device: torch.device) -> None:
        self._forward, self._steps, self._device = forward, steps, device
        self.samples: dict[str, list[float]] = defaultdict(list)

    def first(self, change: Callable[[], object]) -> None:
        """The change, and the first forward after it."""
        for name, function in (("change_s", change), ("first_s", self._forward)):
            timing.synchronize(self._device)
            begin = time.perf_counter()
            function()
            timing.synchronize(self._device)
            self.samples[name].append(time.perf_counter() - begin)

    def run(self, steps: int | None = None) -> None:
        calls = self._steps if steps is None else steps
        milliseconds = timing.wall_milliseconds(self._forward, self._device, calls)
        self.samples["step_ms"].append(milliseconds)

    def memory(self) -> None:
        peak = models.peak_bytes(self._forward, self._device)
        if peak is not None:
            self.samples["forward_bytes"].append(peak)

    def summary(self) -> dict[str, Any]:
        return {name: timing.summarize(values) for name, values in self.samples.items()}


def measure_variant(
    kernel: ModuleType,
    model: Any,
    arguments: dict[str, Any],
    variant: str,
    rank: int,
    steps: int,
    rounds: int,
    device: torch.device,
) -> dict[str, Any]:
    """All states of one variant."""
    plain, adapted = models.twin(model), with_adapters(model, rank)
    states = states_of(rank)
    if variant in (GRAPHS, FP8_GRAPHS):
        del states["fused"]  # replayed like a model without adapters
    if variant != EAGER:
        for each in (plain, adapted):
            options = dict(OPTIONS[variant])
            if "precision" in options:  # fusing needs the originals
                options["keep_originals"] = each is adapted and "fused" in states
            kernel.inject_kernels(each, **options)

    def loop(instance: Any) -> Loop:
        return Loop(lambda: instance(**arguments), steps, device)

    if variant == EAGER:
        name = f"one of rank {rank}"
        states = {name: states[name]}
    loops = {NEVER: loop(plain), **{name: loop(adapted) for name in states}}
    for turn in range(-1, rounds):  # the first one warms up
        turn_steps = WARM_UP_STEPS if turn < 0 else None
        loops[NEVER].first(lambda: None)
        loops[NEVER].run(turn_steps)
        for name, change in states.items():
            loops[name].first(lambda change=change: change(adapted))
            loops[name].first(lambda: None)  # a graph is captured in the second call
            loops[name].run(turn_steps)
            loops[name].memory()
            if name == "fused":
                adapted.unfuse_lora()
        if turn < 0:
            for each in loops.values():
                each.samples.clear()
    hotswap = loop(adapted)
    if variant == "injected":
        state = get_peft_model_state_dict(adapted, adapter_name="one")
        states[f"one of rank {rank}"](adapted)
        for _ in range(rounds):
            hotswap.first(
                lambda: adapted.load_lora_adapter(
                    copy.copy(state), prefix=None, adapter_name="one", hotswap=True
                )
            )
    adapted.delete_adapters(["one", "two", "high"])
    loops[DELETED], again = loop(adapted), loop(plain)
    for _ in range(rounds):
        for each in (again, loops[DELETED]):
            each.first(lambda: None)
            each.run()
    result = {name: each.summary() for name, each in loops.items()}
    result[DELETED]["never_loaded_ms"] = timing.summarize(again.samples["step_ms"])
    if hotswap.samples:
        result["hot-swap"] = hotswap.summary()
    return result


def measure(
    published: Published,
    kernel: ModuleType,
    variants: Sequence[str],
    rank: int,
    steps: int,
    rounds: int,
    device: torch.device,
    dtype: torch.dtype,
    tiny: bool,
) -> Iterator[dict[str, Any]]:
    """The model's entry after each variant, with one more of them."""
    if published.key in WHOLE and not tiny:
        published = copy.copy(published)
        published.config = {k: v for k, v in published.config.items() if k not in DEPTH}
    model = published.transformer(device, dtype, tiny)
    size = (published.tiny_sizes if tiny else published.sizes)[0]
    arguments = published.inputs(model, size, device, dtype)
    entry: dict[str, Any] = {
        "model": published.key,
        "name": published.tiny_name if tiny else published.name.partition(",")[0],
        "blocks": sum(map(len, models.block_lists(model))),
        "rank": rank,
        "steps": steps,
        "rounds": rounds,
        "weights": WEIGHTS,
        "variants": {},
    }
    with models.weights(model, WEIGHTS):
        for variant in variants:
            entry["variants"][variant] = measure_variant(
                kernel, model, arguments, variant, rank, steps, rounds, device
            )
            yield entry
            models.free(device)


def show(entry: dict[str, Any]) -> None:
    """The last variant."""
    variant, states = list(entry["variants"].items())[-1]
    never = states[NEVER]["step_ms"]["median"]
    rows = []
    for name, state in states.items():
        step = state.get("step_ms", {})
        base = state.get("never_loaded_ms", {}).get("median", never)
        median = step.get("median")
        row = [variant, name, median, 100 * step.get("spread", 0)]
        row += [median and median / base, 1e3 * state["first_s"]["median"]]
        row += [state["change_s"]["median"]]
        rows.append([*row, state.get("forward_bytes", {}).get("median", 0) / 2**30])
    headers = ["variant", "adapters", "step ms", "spread %", "over none", "first ms", "change s"]
    click.echo(f"\n{entry['name']}, {entry['blocks']} blocks, {entry['steps']} steps")
    click.echo(tabulate(rows, [*headers, "forward GiB"], floatfmt=".3f"))


@click.command(help="Time denoising with LoRA adapters in all states.")
@names_option("--models", {name: name for name in CASES}, "chosen")
@click.option("--steps", type=click.IntRange(min=1), help="In place of each model's own number.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@DEVICE
@DTYPE
@TINY
@record.output_option("adapters")
@torch.no_grad()
def main(chosen, steps, rounds, device, dtype, tiny, output) -> None:
    kernel, _ = models.load_kernel()
    result: dict[str, Any] = {"environment": record.environment(device), "models": []}
    output = record.destination(output, "adapters")

    def run(key: str) -> None:
        rank, own_steps, variants = CASES[key]
        if tiny:
            variants = tuple(variant for variant in variants if variant in (EAGER, "injected"))
        given = (rank, steps or own_steps, rounds, device, dtype, tiny)
        others = result["models"]
        for entry in measure(MODELS[key], kernel, variants, *given):
            result["models"] = [*others, entry]
            show(entry)
            record.write(output, result)

    with clocks.watch(device) as result["clocks"]:
        measure_each({key: partial(run, key) for key in chosen}, device)
    clocks.show(result["clocks"])
    record.finish(output, result)


if __name__ == "__main__":
    main()
