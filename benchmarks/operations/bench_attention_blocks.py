"""Attention by blocks, compared with attention to all keys and with PyTorch's FlexAttention, compiled.

Random masks choose blocks for each head. The mask "near and far" is like those of NABLA (Kandinsky 5) and of
sliding tiles: blocks of 64, each attends to its neighbors in the video, which adjacent blocks share, and to
random blocks. "frame-causal" is that of Wan's 480p and 720p videos of 21 latent frames. All functions of a
shape take turns, each call with a cold L2 cache. Rates count the products of the keys that a query attends
to. Errors are relative L2 distances from float64, over a sample of heads and queries. All are measured on
scores as in a trained model ("std 3"), and then ours on other kinds of inputs, which take turns with these.
Writes to benchmarks/results/attention_blocks:

    python benchmarks/operations/bench_attention_blocks.py
    python benchmarks/operations/bench_attention_blocks.py --device cpu --tiny --output /tmp/blocks.json
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import click
import torch
from tabulate import tabulate
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from benchmarks import models
from benchmarks.harness import record, timing
from benchmarks.harness.options import DEVICE
from benchmarks.operations.bench_attention import TOLERANCE, flops

from accuracy import finite_distance
from attention_inputs import INPUTS, NORMAL

PEAKED = "std 3"
# Without "steps", where every implementation's error grows with the length, here beyond TOLERANCE.
OTHER_INPUTS = (NORMAL, "std 6", "trained", "sink", "rising", "jump")
SAMPLED_QUERIES = 64
DENSE, OURS, FLEX = "all keys", "ours", "flex"


class Blocks:
    """Key blocks of each head and query block: (H, Nq, Nk), bool."""

    def __init__(self, is_listed: Tensor, rows: int, tokens: int) -> None:
        self.is_listed, self.rows, self.tokens = is_listed, rows, tokens
        counts = is_listed.sum(-1, dtype=torch.int32)[None]
        indices = is_listed.int().argsort(dim=-1, descending=True, stable=True).int()[None]
        self.lists = counts, indices
        sizes = torch.full(is_listed.shape[1:2], rows, dtype=torch.float64, device=is_listed.device)
        sizes[-1] -= rows * len(sizes) - tokens
        products = (is_listed.double() @ sizes) @ sizes
        self.share = products.mean().item() / tokens**2

    def ours(self, kernel: ModuleType) -> Any:
        return kernel.KeyBlocks(None, None, *self.lists, (self.rows, self.rows))

    def flex(self) -> BlockMask:
        none = torch.zeros_like(self.lists[0]), self.lists[1]
        sizes = {"BLOCK_SIZE": self.rows, "seq_lengths": (self.tokens, self.tokens)}
        return BlockMask.from_kv_blocks(*none, *self.lists, **sizes)

    def of(self, head: int, queries: Tensor, keys: int) -> Tensor:
        blocks = self.is_listed[head, queries // self.rows]
        return blocks.repeat_interleave(self.rows, 1)[:, :keys]


class FrameCausal:
    """Queries attend to the keys of their frame and of those before."""

    rows = 128

    def __init__(self, tokens: int, frame: int, device: torch.device) -> None:
        first = torch.zeros(tokens, dtype=torch.int32, device=device)
        query = torch.arange(tokens, device=device)
        self.tokens, self.frame = tokens, frame
        self.end = (query // frame + 1) * frame
        self.bounds = torch.stack([first, self.end.int()], -1)[None, None]
        self.share = self.end.double().mean().item() / tokens

    def ours(self, kernel: ModuleType) -> Any:
        return kernel.KeyBlocks(key_bounds=self.bounds)

    def flex(self) -> BlockMask:
        def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return key // self.frame <= query // self.frame

        sizes = (None, None, self.tokens, self.tokens)
        return create_block_mask(mask, *sizes, device=self.bounds.device, _compile=True)

    def of(self, head: int, queries: Tensor, keys: int) -> Tensor:
        return torch.arange(keys, device=queries.device) < self.end[queries, None]


def random_blocks(share: float, rows: int) -> Callable:
    def make(shape: tuple, device: torch.device) -> Blocks:
        _, tokens, _, heads, _ = shape
        count = -(-tokens // rows)
        return Blocks(torch.rand(heads, count, count, device=device) < share, rows, tokens)

    return make


def near_and_far(window: int, share: float) -> Callable:
    """Blocks of 64: the ``window`` ones around every pair of blocks, and random ones."""

    def make(shape: tuple, device: torch.device) -> Blocks:
        _, tokens, _, heads, _ = shape
        count = -(-tokens // 64)
        block = torch.arange(count, device=device)
        is_near = (block[:, None] // 2 * 2 - block).abs() <= window // 2
        return Blocks(
            is_near | (torch.rand(heads, count, count, device=device) < share), 64, tokens
        )

    return make


def frame_causal(shape: tuple, device: torch.device) -> FrameCausal:
    return FrameCausal(shape[1], -(-shape[1] // 21), device)


@dataclass(frozen=True)
class Workload:
    shape: tuple[int, int, int, int, int]  # (batch, queries, keys, heads, head dim)
    masks: dict[str, Callable]


_RANDOM = {f"random, {100 - 100 * s:.0f}% left out": random_blocks(s, 128) for s in (0.5, 0.1)}
_NEAR = {
    "random blocks of 64, 90% left out": random_blocks(0.1, 64),
    "near and far, blocks of 64": near_and_far(96, 0.03),
}
WORKLOADS = (
    Workload((1, 75600, 75600, 40, 128), {**_RANDOM, **_NEAR, "frame-causal": frame_causal}),
    Workload((1, 32760, 32760, 40, 128), {"frame-causal": frame_causal}),
    # Kandinsky 5 Lite, 10 s
    Workload((1, 93696, 93696, 28, 64), {**_RANDOM, **_NEAR, "frame-causal": frame_causal}),
)
TINY_WORKLOADS = (
    Workload((1, 420, 420, 2, 64), {"random": random_blocks(0.5, 128), "frame": frame_causal}),
)


def error(out: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> float:
    tokens, heads = q.shape[1], q.shape[2]
    count = min(tokens, SAMPLED_QUERIES)
    queries = torch.linspace(0, tokens - 1, count, dtype=torch.float64).long().to(q.device)
    distances = []
    for head in {0, heads // 2, heads - 1}:
        one_q, one_k, one_v = (t[0, :, head].double() for t in (q[:, queries], k, v))
        scores = one_q @ one_k.T / q.shape[3] ** 0.5
        scores = scores.masked_fill(~mask.of(head, queries, tokens), -torch.inf)
        exact = scores.softmax(-1).nan_to_num(0) @ one_v
        distances.append(finite_distance(out[0, queries, head], exact))
    return max(distances)


def measure(
    workload: Workload, kernel: ModuleType, device: torch.device, rounds: int, has_flex: bool
) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    shape = workload.shape
    inputs = {kind: INPUTS[kind](shape, device) for kind in (PEAKED, *OTHER_INPUTS)}
    q, k, v = inputs[PEAKED]
    masks = {name: make(shape, device) for name, make in workload.masks.items()}
    functions = {("", DENSE): functools.partial(kernel.attention, q, k, v)}
    errors: dict[tuple, float] = {}
    of_inputs: dict[tuple, Callable] = {}
    by_head = [t.transpose(1, 2) for t in (q, k, v)]
    for name, mask in masks.items():
        blocks = mask.ours(kernel)
        for kind, tensors in inputs.items():
            ours = functools.partial(kernel.attention, *tensors, blocks=blocks)
            of_inputs[name, kind] = ours
            errors[name, OURS if kind == PEAKED else kind] = error(ours(), *tensors, mask)
        functions[name, OURS] = of_inputs[name, PEAKED]
        if has_flex:
            options = {"block_mask": mask.flex()}
            if mask.rows != 128:  # Its default tiles may be larger than the blocks.
                options["kernel_options"] = {"BLOCK_M": mask.rows, "BLOCK_N": mask.rows}
            compiled = torch.compile(flex_attention, dynamic=False)
            flex = functools.partial(compiled, *by_head, **options)
            functions[name, FLEX] = flex
            errors[name, FLEX] = error(flex().transpose(1, 2), q, k, v, mask)
    for (name, which), distance in errors.items():
        if not distance <= TOLERANCE:
            raise click.ClickException(
                f"{name}, {which}: the result is {distance:.3g} from float64"
            )
    times = timing.cold_microseconds(functions, rounds, device)
    times_of_inputs = timing.cold_microseconds(of_inputs, rounds, device)
    dense = times["", DENSE]
    entries = []
    for name, mask in masks.items():
        of_mask = {which: times[name, which] for which in (OURS, FLEX) if (name, which) in times}
        ours = of_mask[OURS]["median"]
        of_kinds = {kind: times_of_inputs[name, kind]["median"] for kind in inputs}
        rates = {w: flops(shape) * mask.share / t["median"] * 1e-6 for w, t in of_mask.items()}
        entries.append(
            {
                "shape": list(shape),
                "mask": name,
                "share": mask.share,
                "microseconds": {**of_mask, DENSE: dense},
                "teraflops_per_second": {**rates, DENSE: flops(shape) / dense["median"] * 1e-6},
                "over_flex": of_mask[FLEX]["median"] / ours if FLEX in of_mask else None,
                "time_over_all_keys": ours / dense["median"],
                f"rate_over_{PEAKED}": {k: of_kinds[PEAKED] / of_kinds[k] for k in OTHER_INPUTS},
                "errors": {which: of for (of_name, which), of in errors.items() if of_name == name},
            }
        )
    return entries


@click.command(help="Measure attention by blocks.")
@DEVICE
@click.option("--tiny", is_flag=True, help="Tiny shapes, to try the benchmark.")
@click.option("--rounds", type=click.IntRange(min=1), default=9, show_default=True)
@record.output_option("attention_blocks")
@torch.no_grad()
def main(device, tiny, rounds, output) -> None:
    kernel, _ = models.load_kernel()
    result: dict[str, Any] = {
        "environment": record.environment(device),
        "inputs": PEAKED,
        "rounds": rounds,
        "flush_bytes": timing.FLUSH_BYTES if device.type == "cuda" else 0,
        "attention_blocks": [],
    }
    output = record.destination(output, "attention_blocks")
    for workload in TINY_WORKLOADS if tiny else WORKLOADS:
        result["attention_blocks"] += measure(
            workload, kernel, device, rounds, device.type == "cuda"
        )
        models.free(device)
        record.write(output, result)
    rows = [
        [
            "x".join(map(str, e["shape"])),
            e["mask"],
            e["share"],
            *(e["teraflops_per_second"].get(which) for which in (OURS, FLEX, DENSE)),
            e["over_flex"],
            e["time_over_all_keys"],
            e["microseconds"][OURS]["spread"],
            e["errors"][OURS],
        ]
        for e in result["attention_blocks"]
    ]
    names = ["TFLOP/s ours", "flex", DENSE, "x flex", f"time over {DENSE}", "spread", "error"]
    click.echo(tabulate(rows, ["", "mask", "share", *names], floatfmt=".4g"))
    record.say_where(output)


if __name__ == "__main__":
    main()
