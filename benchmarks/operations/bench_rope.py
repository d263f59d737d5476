"""Rotary embeddings: query and key with their norm, one tensor from tables, one from three axes' tables.

A workload's bytes are those of this package's arguments. LTX-Video's query and key are rotated from
coordinates, so only query and key count (and 12 bytes per token), not the float32 tables (B, S, D) of
diffusers that the peers read. Likewise rope_3d counts no table of S rows, although eager reads one for cosine
and one for sine. rope has both kinds of tables: one value per element, as in diffusers, and one per pair, the
only kind that QuACK takes. Of a complex table the peers read the two parts as separate tables. With joint
buffers the values are also copied, as in a model that attends to two streams at once. There the peers copy
their results, as torch.cat does.

Writes to benchmarks/results/rope:

    python benchmarks/operations/bench_rope.py
    python benchmarks/operations/bench_rope.py --device cpu --tiny --no-compile --output /tmp/rope.json
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from benchmarks.harness.comparison import Case, Family, Workload, command, normal

COORDINATES, TABLES, PER_HEAD = "coordinates", "tables (B, S, D)", "per head"
JOINT, COMPLEX = ", joint buffers", ", complex table"  # after the variant
LAYOUTS = ("interleaved", "half")
PAIR_TABLES = ", pair tables"  # after the layout: one value per pair
HEAD_DIM = 64  # of LTX-Video
# (frame, height, width) of a sequence length
GRIDS = {
    6: (1, 2, 3),
    16: (4, 2, 2),
    480: (6, 8, 10),
    2688: (7, 16, 24),
    8064: (21, 16, 24),
    32760: (21, 30, 52),
}
EPS = 1e-6


def angles(device: torch.device, positions: int, pairs: int) -> Tensor:
    """Angles (positions, pairs) with the usual geometric frequencies."""
    frequencies = 10000.0 ** -(torch.arange(pairs, device=device) / max(pairs, 1))
    return torch.arange(positions, device=device)[:, None] * frequencies


def tables(angle: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Float32 cosine and sine, with each angle at both elements of its pair in the layout."""
    if layout == "interleaved":
        angle = angle.repeat_interleave(2, dim=-1)
    else:
        angle = torch.cat([angle, angle], dim=-1)
    return angle.cos(), angle.sin()


def build_across_heads(workload: Workload, kernel: ModuleType, device: torch.device) -> Case:
    """LTX-Video's query and key."""
    batch, seq, hidden = workload.shape
    q, k = (normal(device, *workload.shape) for _ in range(2))
    q_weight, k_weight = (normal(device, hidden, std=0.1, mean=1.0) for _ in range(2))
    axes = [torch.linspace(-1, 1, n, device=device) for n in GRIDS[seq]]
    coordinates = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).reshape(1, seq, 3)
    frequencies = 10000.0 ** torch.linspace(0, 1, hidden // 6, device=device) * (math.pi / 2)
    rope = kernel.CoordinateRope(coordinates.expand(batch, -1, -1).contiguous(), frequencies)
    arguments = (q, k, q_weight, k_weight)
    read = (*arguments, rope.tables(hidden))
    options = {"heads": hidden // HEAD_DIM, "eps": EPS}
    if workload.variant == COORDINATES:
        return Case((*arguments, rope), options, eager_arguments=read)
    return Case(read, options)


def build_per_head(workload: Workload, device: torch.device) -> Case:
    """FLUX; Qwen-Image with a complex table; with joint buffers the image stream, after 512 text tokens."""
    batch, seq, heads, head_dim = workload.shape
    tensors = [normal(device, *workload.shape) for _ in range(2)]
    weights = [normal(device, head_dim, std=0.1, mean=1.0) for _ in tensors]
    angle = angles(device, seq, head_dim // 2)
    pairs = (angle.cos(), angle.sin())
    options: dict[str, object] = {"heads": heads, "norm": "per_head", "eps": EPS}
    if workload.variant.endswith(COMPLEX):
        arguments = (*tensors, *weights, torch.complex(*pairs))
        return Case(arguments, options, eager_arguments=(*tensors, *weights, pairs))
    arguments = (*tensors, *weights, tables(angle, LAYOUTS[0]))
    if not workload.variant.endswith(JOINT):
        return Case(arguments, options)
    text = 512 if seq > 512 else 2
    joint = [torch.zeros(batch, text + seq, heads, head_dim, **like(device)) for _ in range(3)]
    options["v"] = normal(device, *workload.shape)
    options["out"] = tuple(buffer[:, text:] for buffer in joint)
    return Case(arguments, options, eager_operation="qk_norm_rope_joined")


def like(device: torch.device) -> dict[str, object]:
    return {"dtype": torch.bfloat16, "device": device}


def build(workload: Workload, kernel: ModuleType, device: torch.device) -> Case:
    if workload.variant in (COORDINATES, TABLES):
        return build_across_heads(workload, kernel, device)
    _, seq, heads, head_dim = workload.shape
    x = normal(device, *workload.shape)
    if workload.operation == "qk_norm_rope":
        return build_per_head(workload, device)
    layout = workload.variant.removesuffix(PAIR_TABLES).removesuffix(COMPLEX)
    if workload.operation == "rope":
        angle = angles(device, seq, head_dim // 2)
        if workload.variant.endswith(COMPLEX):
            cos, sin = angle.cos(), angle.sin()
            table = torch.complex(cos, sin)
            return Case((x, table), {"layout": layout}, eager_arguments=(x, cos, sin))
        is_per_pair = workload.variant.endswith(PAIR_TABLES)
        cos, sin = (angle.cos(), angle.sin()) if is_per_pair else tables(angle, layout)
        return Case((x, cos, sin), {"layout": layout})
    # As in Wan: height and width get a third of a head's pairs each, the frame gets the rest.
    pairs = head_dim // 2
    share = pairs // 3
    grid = GRIDS[seq]
    axes = [
        angles(device, n, p) for n, p in zip(grid, (pairs - 2 * share, share, share), strict=True)
    ]
    spread = [
        angle.reshape([-1 if i == axis else 1 for i in range(3)] + [angle.shape[-1]]).expand(
            *grid, -1
        )
        for axis, angle in enumerate(axes)
    ]
    return Case(
        (x, *((angle.cos(), angle.sin()) for angle in axes)),
        {"layout": layout},
        eager_operation="rope",
        eager_arguments=(x, *tables(torch.cat(spread, dim=-1).reshape(seq, pairs), layout)),
    )


WAN_SHAPES = ((1, 32760, 12, 128), (1, 32760, 40, 128))  # 1.3B and 14B
SMALL_SHAPE = (2, 480, 8, 64)
FLUX_SHAPE = (1, 4608, 24, 128)
IMAGE_SHAPE = (1, 4096, 24, 128)
FAMILY = Family(
    "rope",
    [
        *(Workload("qk_norm_rope", (2, seq, 2048), COORDINATES) for seq in (2688, 8064)),
        Workload("qk_norm_rope", (2, 8064, 2048), TABLES),
        Workload("qk_norm_rope", FLUX_SHAPE, PER_HEAD),
        *(Workload("qk_norm_rope", IMAGE_SHAPE, PER_HEAD + form) for form in ("", JOINT, COMPLEX)),
        Workload("rope", FLUX_SHAPE, LAYOUTS[0] + COMPLEX),
        *(
            Workload("rope", shape, layout + form)
            for shape in (SMALL_SHAPE, FLUX_SHAPE, WAN_SHAPES[0])
            for form in ("", PAIR_TABLES)
            for layout in LAYOUTS
        ),
        *(
            Workload("rope_3d", shape, layout)
            for shape in (SMALL_SHAPE, *WAN_SHAPES)
            for layout in LAYOUTS
        ),
    ],
    [
        Workload("qk_norm_rope", (2, 6, 128), COORDINATES),
        Workload("qk_norm_rope", (2, 6, 128), TABLES),
        *(
            Workload("qk_norm_rope", (1, 6, 2, 64), PER_HEAD + form)
            for form in ("", JOINT, COMPLEX)
        ),
        Workload("rope", (2, 6, 2, 64), LAYOUTS[0] + COMPLEX),
        *(
            Workload(operation, (2, 6, 2, 64), layout)
            for operation in ("rope", "rope_3d")
            for layout in LAYOUTS
        ),
        *(Workload("rope", (2, 6, 2, 64), layout + PAIR_TABLES) for layout in LAYOUTS),
    ],
    build,
)
main = command(FAMILY, "Time the rotary embeddings and their peers.")

if __name__ == "__main__":
    main()
