"""CPU time of one call of each operation, compared with PyTorch's own functions on the same input.

Calls on a small input run back to back without waiting for the GPU, in batches that never fill its
queue. On a CPU the figure includes the operation's work.

Writes to benchmarks/results/host:

    python benchmarks/operations/bench_host.py
    python benchmarks/operations/bench_host.py --device cpu --rounds 2 --output /tmp/host.json
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import click
import torch
import torch.nn.functional as F
from tabulate import tabulate

from benchmarks import models
from benchmarks.harness import comparison, record, timing
from benchmarks.harness.comparison import Workload
from benchmarks.harness.options import DEVICE
from benchmarks.operations import (
    bench_activation,
    bench_attention,
    bench_gated_residual,
    bench_group_norm,
    bench_norm,
    bench_rope,
    bench_softmax,
)

BATCH_CALLS = 100  # far fewer launches than the queue holds
SHAPE = (1, 16, 2048)
HEADS_SHAPE = (1, 16, 32, 64)
IMAGE_SHAPE = (1, 320, 8, 8)
YARDSTICK = "torch rms_norm"


def torch_functions(device: torch.device) -> dict[str, Callable[[], object]]:
    """PyTorch's own functions, with one launch each."""
    x = comparison.normal(device, *SHAPE)
    weight, bias = (comparison.normal(device, SHAPE[-1]) for _ in range(2))
    return {
        YARDSTICK: functools.partial(F.rms_norm, x, SHAPE[-1:], weight, 1e-6),
        "torch layer_norm": functools.partial(F.layer_norm, x, SHAPE[-1:], weight, bias, 1e-6),
        "torch gelu": functools.partial(F.gelu, x, approximate="tanh"),
    }


def our_functions(kernel: ModuleType, device: torch.device) -> dict[str, Callable[[], object]]:
    """Every operation, with the models' kinds of arguments."""
    workloads = [
        *(
            (bench_norm, Workload(operation, SHAPE))
            for operation in (*bench_norm.AFFINE, *bench_norm.MODULATED, bench_norm.PAIR)
        ),
        *(
            (bench_gated_residual, Workload(operation, SHAPE))
            for operation in (*bench_gated_residual.OPERATIONS, bench_gated_residual.PAIR)
        ),
        (bench_rope, Workload("qk_norm_rope", SHAPE, bench_rope.COORDINATES)),
        (bench_rope, Workload("qk_norm_rope", HEADS_SHAPE, bench_rope.PER_HEAD)),
        (bench_rope, Workload("qk_norm_rope", HEADS_SHAPE, bench_rope.PER_HEAD + bench_rope.JOINT)),
        (bench_rope, Workload("rope", HEADS_SHAPE, "interleaved")),
        (bench_rope, Workload("rope_3d", HEADS_SHAPE, "interleaved")),
        *(
            (bench_activation, Workload(operation, SHAPE, variant))
            for operation, variant in (
                *bench_activation.VARIANTS,
                *bench_activation.OTHER_VARIANTS,
            )
            if variant != "none"
        ),
        (bench_softmax, Workload("softmax", SHAPE)),
        (bench_group_norm, Workload("group_norm", IMAGE_SHAPE, bench_group_norm.SILU)),
        (bench_group_norm, Workload("group_norm", IMAGE_SHAPE, bench_group_norm.EMBEDDING)),
        (bench_group_norm, Workload("channel_rms_norm", IMAGE_SHAPE, bench_group_norm.SILU)),
        (bench_attention, Workload("attention", (1, 16, 16, 32, 64))),
        (bench_attention, Workload("attention_int8", (1, 16, 16, 32, 64))),
    ]
    functions = {}
    for module, workload in workloads:
        case = module.build(workload, kernel, device)
        name = ", ".join(filter(None, [workload.operation, workload.variant]))
        functions[name] = functools.partial(
            getattr(kernel, workload.operation), *case.arguments, **case.options
        )
    return functions


@click.command()
@DEVICE
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help=f"Number of batches of {BATCH_CALLS} calls per function.",
)
@record.output_option("host")
@torch.no_grad()
def main(device, rounds, output) -> None:
    """Measure the CPU time of a call of each operation."""
    kernel, _ = models.load_kernel()
    torch.manual_seed(0)
    functions = {**torch_functions(device), **our_functions(kernel, device)}
    measure = functools.partial(timing.host_microseconds, calls=BATCH_CALLS)
    timing.interleave(functions, 2, device, measure)
    samples = timing.interleave(functions, rounds, device, measure)
    times = {name: timing.summarize(values) for name, values in samples.items()}
    result = {
        "environment": record.environment(device),
        "processor": record.processor_name(),
        "shape": list(SHAPE),
        "calls_a_batch": BATCH_CALLS,
        "rounds": rounds,
        "yardstick": YARDSTICK,
        "calls": [
            {
                "operation": name,
                "microseconds": summary,
                "over_yardstick": summary["median"] / times[YARDSTICK]["median"],
            }
            for name, summary in times.items()
        ],
    }
    rows = [
        [
            c["operation"],
            c["microseconds"]["median"],
            c["microseconds"]["spread"],
            c["over_yardstick"],
        ]
        for c in result["calls"]
    ]
    click.echo(tabulate(rows, ["", "us a call", "spread", f"over {YARDSTICK}"], floatfmt=".2f"))
    output = record.destination(output, "host")
    record.finish(output, result)


if __name__ == "__main__":
    main()
