"""CPU time of one whole forward of published models, eager and injected, or in other modes (--modes).

Measured from call to return on an idle GPU, without waiting for it, under torch.no_grad and under
torch.inference_mode. Models have all blocks; those that other benchmarks leave out share weights with the
others. There are so few tokens that the GPU keeps up and its queue never fills; GPU time and number of
kernels are also recorded. Modes take turns, each with its own modules over one set of weights. On a CPU the
figure includes the operations' work. --operators also times the forward's operator calls alone, replayed from
a list: the rest is Python. --condition applies hooks on blocks or unmerged adapters, the changes by users
that cost the most CPU time, in all modes.

Writes to benchmarks/results/host_forward:

    python benchmarks/models/bench_host_forward.py
    python benchmarks/models/bench_host_forward.py --model ltx,flux --rounds 100
    python benchmarks/models/bench_host_forward.py --condition "LoRA adapters"
    python benchmarks/models/bench_host_forward.py --device cpu --tiny --rounds 2 --output /tmp/host.json
"""

from __future__ import annotations

import functools
import itertools
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import click
import torch
from peft import LoraConfig
from tabulate import tabulate
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import models
from benchmarks.harness import cuda_graphs, kernel_times, record, timing
from benchmarks.harness.options import (
    ALL,
    DEVICE,
    DTYPE,
    MODELS,
    TINY,
    Models,
    modes_on,
    modes_option,
)
from benchmarks.models.published import Published

CONTEXTS = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
WARM_UP_ROUNDS = 3  # a CUDA graph is captured in the second call
PROFILED_CALLS = 3
DEFAULT_WEIGHTS = "random"
LORA_RANK = 8


def add_hooks(*indices: int) -> Callable[[torch.nn.Module], None]:
    """A function that puts forward hooks on the blocks with these indices; on all blocks without indices."""

    def add(model: torch.nn.Module) -> None:
        blocks = [block for stack in models.block_lists(model) for block in stack]
        for block in [blocks[index] for index in indices] if indices else blocks:
            block.register_forward_hook(lambda module, args, output: None)

    return add


def add_adapters(model: torch.nn.Module) -> None:
    """LoRA adapters on query, key, value and output of each attention, not merged."""
    model.add_adapter(LoraConfig(r=LORA_RANK, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))


# Changes of the model before injection, by their names in results.
PUBLISHED = "as published"
CONDITIONS: dict[str, Callable[[torch.nn.Module], None]] = {
    PUBLISHED: lambda model: None,
    "a hook on the first block": add_hooks(0),
    "a hook on the last block": add_hooks(-1),
    "a hook on every block": add_hooks(),
    "LoRA adapters": add_adapters,
}


def under(context: Callable[[], object], forward: Callable[[], object]) -> Callable[[], None]:
    def call() -> None:
        with context():
            forward()

    return call


class Recorder(TorchDispatchMode):
    """Records operator calls: the operator, its arguments and keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def operator_calls(kernel: ModuleType | None, forward: Callable[[], object]) -> Callable[[], None]:
    """A function that calls the operators of a forward with its arguments."""
    if kernel is not None:  # injected models run the kernels under this mode
        sys.modules[f"{kernel.__name__}.injection.core.checks"].TRANSPARENT_MODES.add(Recorder)
    with Recorder() as recorder:
        forward()

    def call() -> None:
        for operator, args, kwargs in recorder.calls:
            operator(*args, **kwargs)

    return call


def measure_model(
    published: Published,
    kernel: ModuleType | None,
    modes: list[str],
    rounds: int,
    device: torch.device,
    dtype: torch.dtype,
    tiny: bool,
    condition: str = PUBLISHED,
    weights: str = DEFAULT_WEIGHTS,
    has_operators: bool = False,
) -> list[dict[str, object]]:
    """One entry per context and mode."""
    model = published.transformer(device, dtype, tiny)
    name = published.tiny_name if tiny else published.complete(model)
    arguments = published.inputs(model, device=device, dtype=dtype, **published.small)
    forwards, reports = {}, []
    for context, enter in CONTEXTS.items():
        for mode in modes:
            instance = models.twin_for(model, mode)  # contexts do not share state
            CONDITIONS[condition](instance)
            if mode.startswith("injected"):
                report = models.inject(kernel, instance, mode)
                reports += [report] if mode in models.GRAPHS_MODES else []
            models.compile_as(instance, mode)
            forwards[context, mode] = under(enter, functools.partial(instance, **arguments))

    with models.weights(model, weights):
        timing.interleave(forwards, WARM_UP_ROUNDS, device, timing.host_microseconds)
        samples = timing.interleave(forwards, rounds, device, timing.host_microseconds)
        operators = {}
        if has_operators:
            for (context, mode), forward in forwards.items():
                alone = {mode: under(CONTEXTS[context], operator_calls(kernel, forward))}
                timing.interleave(alone, WARM_UP_ROUNDS, device, timing.host_microseconds)
                timed = timing.interleave(alone, rounds, device, timing.host_microseconds)
                operators[context, mode] = timing.summarize([v / 1e3 for v in timed[mode]])
    for report in reports:
        cuda_graphs.check_replayed(report, rounds)
    entries = []
    for (context, mode), values in samples.items():
        summary = timing.summarize([value / 1e3 for value in values])
        entry = {
            "model": name,
            "batch": published.batch,
            "tokens": published.small["size"].tokens,
            "text_tokens": published.small.get("text_tokens", published.text_tokens),
            "condition": condition,
            "weights": weights,
            "context": context,
            "mode": mode,
            "ms": summary,
        }
        if has_operators:
            entry["operators_ms"] = operators[context, mode]
        if device.type == "cuda":
            events = kernel_times.trace(forwards[context, mode], PROFILED_CALLS)
            entry["kernels"] = kernel_times.breakdown(events, PROFILED_CALLS)["total"]
        entries.append(entry)
    eager = {e["context"]: e["ms"]["median"] for e in entries if e["mode"] == "eager"}
    for entry in entries:
        if entry["context"] in eager:
            entry["over_eager"] = entry["ms"]["median"] / eager[entry["context"]]
    return entries


def show(entries: list[dict]) -> None:
    rows = [
        [
            *(entry[key] for key in ("model", "condition", "weights", "context", "mode")),
            entry["ms"]["median"],
            100 * entry["ms"]["spread"],
            entry.get("over_eager"),
            entry.get("operators_ms", {}).get("median"),
            *(entry.get("kernels", {}).get(key) for key in ("ms", "launches")),
        ]
        for entry in entries
    ]
    headers = [
        "model",
        "condition",
        "weights",
        "context",
        "mode",
        "host ms",
        "spread %",
        "over eager",
        "operators ms",
        "GPU ms",
        "launches",
    ]
    click.echo(tabulate(rows, headers, floatfmt=".2f"))


@click.command()
@click.option(
    "--model",
    "chosen",
    type=Models(),
    default=ALL,
    show_default=True,
    help=f"Comma-separated: {', '.join(MODELS)}; or {ALL}.",
)
@click.option(
    "--condition",
    "conditions",
    type=click.Choice(list(CONDITIONS)),
    multiple=True,
    default=[PUBLISHED],
    show_default=True,
    help="Change of the models; may be given several times.",
)
@click.option(
    "--weights",
    type=click.Choice(list(models.WEIGHTS)),
    multiple=True,
    default=[DEFAULT_WEIGHTS],
    show_default=True,
    help="May be given twice.",
)
@modes_option(("eager", "injected"))
@DEVICE
@click.option("--operators", is_flag=True, help="Also time the operator calls alone.")
@DTYPE
@TINY
@click.option("--rounds", type=click.IntRange(min=1), default=50, show_default=True)
@record.output_option("host/forward")
@torch.no_grad()
def main(
    chosen, conditions, weights, modes, device, operators, dtype, tiny, rounds, output
) -> None:
    """Measure the CPU time of one forward of each model in each mode."""
    modes = modes_on(device, modes)
    injected = any(mode.startswith("injected") for mode in modes)
    kernel, _ = models.load_kernel() if injected else (None, None)
    result = {
        "environment": record.environment(device),
        "processor": record.processor_name(),
        "dtype": record.dtype_name(dtype),
        "rounds": rounds,
        "forwards": [],
    }
    has_default = PUBLISHED in conditions and DEFAULT_WEIGHTS in weights
    neutral = ("conditions", "weights") if has_default else ()
    output = record.destination(output, "host/forward", neutral)
    failed: list[str] = []
    for published, condition, of_weights in itertools.product(chosen, conditions, weights):
        try:
            result["forwards"] += measure_model(
                published,
                kernel,
                modes,
                rounds,
                device,
                dtype,
                tiny,
                condition,
                of_weights,
                operators,
            )
            if output is not None:
                record.write(output, result)  # also if a later model takes too long
        except Exception:
            if len(chosen) == 1:
                raise
            failed.append(published.key)  # the other models are still measured
            click.echo(traceback.format_exc(), err=True)
        models.free(device)
    show(result["forwards"])
    if output is not None and result["forwards"]:
        click.echo(f"Wrote {output}")
    if failed:
        raise click.ClickException(f"not measured: {', '.join(failed)}")


if __name__ == "__main__":
    main()
