"""Times the operations of an LTX-Video block against eager PyTorch and against the memory's copy rate.

Each call starts with a flushed L2 cache. A rate counts the bytes that must move: every input read once,
every output written once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
import ltx
import record
import timing
import torch
from tabulate import tabulate

FLUSH_BYTES = 256 << 20  # five times the L2 cache
HEAD_START_CYCLES = 1_000_000  # about half a millisecond, for the host to run ahead
COPY_BYTES = 1 << 30


@dataclass
class Case:
    name: str
    bytes: int
    ours: Callable[[], object]
    eager: Callable[[], object]


def eager_rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """As diffusers' RMSNorm."""
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    x = (x * torch.rsqrt(variance + eps)).to(x.dtype)
    return x if weight is None else x * weight


def eager_rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As apply_rotary_emb of diffusers' LTX-Video."""
    real, imaginary = x.unflatten(2, (-1, 2)).unbind(-1)
    rotated = torch.stack([-imaginary, real], dim=-1).flatten(2)
    return (x.float() * cos + rotated.float() * sin).to(x.dtype)


def cases(
    kernel, batch: int, size: ltx.VideoSize, dim: int, heads: int, device, dtype
) -> list[Case]:
    seq = size.tokens
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    x, residual, q, k = (random(batch, seq, dim) for _ in range(4))
    scale, shift, gate = random(batch, 1, 6, dim).unbind(2)[:3]
    weight = random(dim)
    wide = random(batch, seq, 4 * dim)
    tensor = x.numel() * x.element_size()
    axes = [torch.linspace(-1, 1, n, device=device) for n in size.latent]
    coordinates = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).reshape(1, seq, 3)
    frequencies = 10000.0 ** torch.linspace(0, 1, dim // 6, device=device) * torch.pi / 2
    rope = kernel.CoordinateRope(coordinates, frequencies)
    tables = tuple(t.expand(batch, -1, -1).contiguous() for t in rope.tables(dim))
    eps = 1e-6

    def eager_modulate(h):
        return eager_rms_norm(h, None, eps) * (1 + scale) + shift

    def eager_residual_modulate():
        h = residual + x * gate
        return h, eager_modulate(h)

    def eager_qk():
        return [
            eager_rotate(torch.nn.functional.rms_norm(t, (dim,), weight, eps), *tables)
            for t in (q, k)
        ]

    return [
        Case(
            "rms_norm",
            2 * tensor,
            lambda: kernel.rms_norm(x, weight, eps),
            lambda: torch.nn.functional.rms_norm(x, (dim,), weight, eps),
        ),
        Case(
            "rms_norm_modulate",
            2 * tensor,
            lambda: kernel.rms_norm_modulate(x, scale, shift, None, eps),
            lambda: eager_modulate(x),
        ),
        Case(
            "layer_norm_modulate",
            2 * tensor,
            lambda: kernel.layer_norm_modulate(x, scale, shift, None, None, eps),
            lambda: torch.nn.functional.layer_norm(x, (dim,), eps=eps) * (1 + scale) + shift,
        ),
        Case(
            "gated_residual",
            3 * tensor,
            lambda: kernel.gated_residual(residual, x, gate),
            lambda: residual + x * gate,
        ),
        Case(
            "gated_residual_rms_norm_modulate",
            4 * tensor,
            lambda: kernel.gated_residual_rms_norm_modulate(
                residual, x, gate, scale, shift, None, eps
            ),
            eager_residual_modulate,
        ),
        Case(
            "qk_norm_rope, coordinates",
            4 * tensor,
            lambda: kernel.qk_norm_rope(q, k, weight, weight, rope, heads=heads, eps=eps),
            eager_qk,
        ),
        Case(
            "qk_norm_rope, float32 tables (B, S, D)",
            4 * tensor + 2 * tables[0].numel() * 4,
            lambda: kernel.qk_norm_rope(q, k, weight, weight, tables, heads=heads, eps=eps),
            eager_qk,
        ),
        Case(
            "gelu tanh",
            8 * tensor,
            lambda: kernel.gelu(wide, "tanh"),
            lambda: torch.nn.functional.gelu(wide, approximate="tanh"),
        ),
        Case(
            "geglu",
            6 * tensor,
            lambda: kernel.geglu(wide),
            lambda: wide.chunk(2, -1)[0] * torch.nn.functional.gelu(wide.chunk(2, -1)[1]),
        ),
    ]


def flushed_microseconds(function: Callable[[], object], device: torch.device) -> float:
    """Time of one call after the L2 cache was overwritten; the host runs ahead of the device."""
    if device.type != "cuda":
        return timing.milliseconds(function, device) * 1e3
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(HEAD_START_CYCLES)  # else a slow host's launch time would be measured too
    flush.zero_()
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


@click.command()
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--tiny", is_flag=True, help="A few rows, to try the script itself.")
@click.option("--rounds", default=30, show_default=True, help="Timed calls of each function.")
@click.option("--output", default=str(record.RESULTS / "operations.json"), show_default=True)
def main(device: str, tiny: bool, rounds: int, output: str) -> None:
    device = torch.device(device)
    kernel, _ = ltx.load_kernel()
    dim, heads = 2048, 32
    sizes = [ltx.VideoSize(9, 64, 64)] if tiny else [ltx.VideoSize(n, 512, 768) for n in (49, 161)]
    copy_bytes = COPY_BYTES >> 10 if tiny else COPY_BYTES
    source = torch.randint(256, (copy_bytes // 2,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    results = []
    with torch.no_grad():
        for size in sizes:
            for case in cases(kernel, 2, size, dim, heads, device, torch.bfloat16):
                functions = {
                    "ours": case.ours,
                    "eager": case.eager,
                    "copy": lambda: target.copy_(source),
                }
                for function in functions.values():
                    function()
                samples = timing.interleave(functions, rounds, device, flushed_microseconds)
                times = {name: timing.summarize(values) for name, values in samples.items()}
                rates = {
                    name: moved / times[name]["median"] * 1e-6
                    for name, moved in (
                        ("ours", case.bytes),
                        ("eager", case.bytes),
                        ("copy", copy_bytes),
                    )
                }
                results.append(
                    {
                        "operation": case.name,
                        "shape": [2, size.tokens, dim],
                        "bytes": case.bytes,
                        "microseconds": times,
                        "terabytes_per_second": rates,
                        "over_eager": times["eager"]["median"] / times["ours"]["median"],
                        "of_copy_rate": rates["ours"] / rates["copy"],
                    }
                )
    record.write(Path(output), {"environment": record.environment(device), "operations": results})
    print(
        tabulate(
            [
                [
                    r["operation"],
                    "×".join(map(str, r["shape"])),
                    r["microseconds"]["ours"]["median"],
                    r["microseconds"]["eager"]["median"],
                    r["over_eager"],
                    r["terabytes_per_second"]["ours"],
                    r["of_copy_rate"],
                ]
                for r in results
            ],
            headers=["operation", "shape", "µs", "eager µs", "over eager", "TB/s", "of copy rate"],
            floatfmt=".2f",
        )
    )


if __name__ == "__main__":
    main()
