"""Accuracy compared with eager PyTorch: each operation, and the injected LTX-Video 2B.

Operations, at LTX-Video's shapes: relative L2 distance from the float64 formula, for the kernel and for
the eager expression in the same dtype on the same inputs (expressions and formulas: reference/). Model:
distance of the injected and the eager model's output from the float32 model's, with the same weights.

Writes to benchmarks/results/accuracy:

    python benchmarks/models/bench_accuracy.py
    python benchmarks/models/bench_accuracy.py --device cpu --tiny --output /tmp/accuracy.json
"""

from __future__ import annotations

import copy
import math
import sys
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import click
import torch
from tabulate import tabulate

from benchmarks import models
from benchmarks.harness import record
from benchmarks.harness.options import DEVICE, DTYPE, SIZES, TINY
from benchmarks.models.ltx import LTX_VIDEO, LTXSize
from benchmarks.operations import bench_attention

import attention_inputs
import eager
import references
from accuracy import finite_distance

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Early, middle and late in denoising, each with its own noise and prompt.
DRAWS = ((0, 950.0), (1, 600.0), (2, 150.0))
DEFAULT_SIZE, TINY_SIZE = LTXSize(49, 512, 768), LTXSize(9, 64, 96)
# (batch, sequence, heads, head dim) of LTX-Video 2B at the default size
SHAPE, TINY_SHAPE = (2, 2688, 32, 64), (2, 12, 2, 64)


def cases(
    kernel: ModuleType, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> dict[str, tuple[str, list, dict]]:
    """{label of each case: (operation, positional and keyword arguments)}, with new random inputs."""
    batch, seq, heads, head_dim = shape
    hidden = heads * head_dim

    def normal(*size, std=1.0, mean=0.0):
        return (torch.randn(size, device=device) * std + mean).to(dtype)

    x = normal(batch, seq, hidden, std=1.5, mean=0.25)
    residual = normal(batch, seq, hidden, std=2.0)
    scale, shift, gate = (normal(batch, 1, hidden, std=0.5) for _ in range(3))
    weight, bias = normal(hidden, std=0.2, mean=1.0), normal(hidden, std=0.2)
    q, k = normal(batch, seq, hidden, std=1.5), normal(batch, seq, hidden, std=1.5)
    head_weight = normal(head_dim, std=0.2, mean=1.0)
    wide = normal(batch, seq, 8 * hidden, std=1.5)

    coordinates = torch.rand(batch, seq, 3, device=device) * 2 - 1
    exponents = torch.linspace(0, 1, hidden // 6, device=device)
    rope = kernel.CoordinateRope(coordinates, 10000.0**exponents * (math.pi / 2))
    angle = torch.rand(seq, head_dim // 2, device=device) * (2 * math.pi)
    interleaved = [t.repeat_interleave(2, dim=-1) for t in (angle.cos(), angle.sin())]
    half = [torch.cat([t, t], dim=-1) for t in (angle.cos(), angle.sin())]
    grid = next(size.latent for size in (DEFAULT_SIZE, TINY_SIZE) if size.tokens == seq)
    share = head_dim // 2 // 3
    pairs = (head_dim // 2 - 2 * share, share, share)
    angles = [
        torch.rand(n, p, device=device) * (2 * math.pi) for n, p in zip(grid, pairs, strict=True)
    ]
    axes = [(axis.cos(), axis.sin()) for axis in angles]
    by_head = q.unflatten(-1, (heads, head_dim))
    wide_bias = normal(wide.shape[-1], std=0.2)
    image, added = x.mT.contiguous(), normal(batch, hidden, std=0.5)  # tokens as pixels
    keys, values = (t.unflatten(-1, (heads, head_dim)) for t in (k, x))
    text = [t[:, : LTX_VIDEO.text_tokens] for t in (keys, values)]
    text_bias = bench_attention.text_bias(batch, text[0].shape[1], device).to(dtype)

    modulation = [scale, shift]
    second_modulation = [normal(batch, 1, hidden, std=0.5) for _ in range(2)]
    wide_modulation = [t.float() * 1.001 for t in modulation]  # not of 16 bits
    result = {
        "rms_norm": ("rms_norm", [x, weight], {}),
        "layer_norm": ("layer_norm", [x, weight, bias], {}),
        "rms_norm_modulate": ("rms_norm_modulate", [x, *modulation], {}),
        "layer_norm_modulate": ("layer_norm_modulate", [x, *modulation], {}),
        "layer_norm_modulate, float32 modulation": (
            "layer_norm_modulate",
            [x, *wide_modulation],
            {},
        ),
        "layer_norm_modulate_pair": (
            "layer_norm_modulate_pair",
            [x, *modulation, *second_modulation],
            {},
        ),
        "gated_residual": ("gated_residual", [residual, x, gate], {}),
        "gated_residual_rms_norm_modulate": (
            "gated_residual_rms_norm_modulate",
            [residual, x, gate, *modulation],
            {},
        ),
        "gated_residual_layer_norm_modulate": (
            "gated_residual_layer_norm_modulate",
            [residual, x, gate, *modulation],
            {},
        ),
        "gated_residual_layer_norm_modulate, float32 modulation": (
            "gated_residual_layer_norm_modulate",
            [residual, x, gate.float() * 1.001, *wide_modulation],
            {},
        ),
        "gated_residual_layer_norm_modulate_pair": (
            "gated_residual_layer_norm_modulate_pair",
            [residual, x, gate, *modulation, *second_modulation],
            {},
        ),
        "qk_norm_rope, across heads, coordinates": (
            "qk_norm_rope",
            [q, k, weight, weight, rope],
            {"heads": heads, "eps": 1e-5},
        ),
        "qk_norm_rope, per head, interleaved": (
            "qk_norm_rope",
            [q, k, head_weight, head_weight, interleaved],
            {"heads": heads, "norm": "per_head"},
        ),
        "qk_norm_rope, per head, half": (
            "qk_norm_rope",
            [q, k, head_weight, head_weight, half],
            {"heads": heads, "norm": "per_head", "layout": "half"},
        ),
        "qk_norm_rope, per head, complex table": (
            "qk_norm_rope",
            [q, k, head_weight, head_weight, torch.complex(*(t[..., ::2] for t in interleaved))],
            {"heads": heads, "norm": "per_head"},
        ),
        "rope, interleaved": ("rope", [by_head, *interleaved], {}),
        "rope, half": ("rope", [by_head, *half], {"layout": "half"}),
        "rope_3d, interleaved": ("rope_3d", [by_head, *axes], {}),
        "rope_3d, half": ("rope_3d", [by_head, *axes], {"layout": "half"}),
        "gelu, tanh": ("gelu", [wide], {"approximate": "tanh"}),
        "gelu, exact": ("gelu", [wide], {}),
        "silu": ("silu", [wide], {}),
        "geglu": ("geglu", [wide], {}),
        "swiglu": ("swiglu", [wide], {}),
        "gelu, tanh, bias": ("gelu", [wide], {"approximate": "tanh", "bias": wide_bias}),
        "silu, bias": ("silu", [wide], {"bias": wide_bias}),
        "geglu, bias": ("geglu", [wide], {"bias": wide_bias}),
        "swiglu, bias": ("swiglu", [wide], {"bias": wide_bias}),
        "softmax": ("softmax", [x], {}),
        "group_norm": ("group_norm", [image, 32, weight, bias], {}),
        "group_norm, bias, SiLU": (
            "group_norm",
            [image, 32, weight, bias],
            {"channel_bias": added, "activation": "silu"},
        ),
        "group_norm, bias, SiLU, channels last": (
            "group_norm",
            [x.mT, 32, weight, bias],
            {"channel_bias": added, "activation": "silu"},
        ),
        "channel_rms_norm, SiLU": ("channel_rms_norm", [image, weight], {"activation": "silu"}),
        "channel_rms_norm, scale, shift, SiLU": (
            "channel_rms_norm",
            [image],
            {"scale": added, "shift": added, "activation": "silu"},
        ),
    }
    if dtype != torch.float32:
        result["attention"] = ("attention", [by_head, keys, values], {})
        result["attention, text mask"] = ("attention", [by_head, *text], {"key_bias": text_bias})
        spread = attention_inputs.INPUTS["std 3"]((batch, seq, seq, heads, head_dim), device)
        result["attention, std 3"] = ("attention", [t.to(dtype) for t in spread], {})
    return result


def ratio(kernel: float, eager: float) -> float:
    """The kernel's error over eager's; 1 if both are exact."""
    if eager == 0:
        return 1.0 if kernel == 0 else math.inf
    return kernel / eager


def outputs(result: object) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


def measure_operations(
    kernel: ModuleType, shape: tuple[int, int, int, int], device: torch.device
) -> list[dict[str, object]]:
    """One entry per dtype, case and output."""
    entries = []
    for dtype in DTYPES:
        torch.manual_seed(0)
        for label, (name, args, kwargs) in cases(kernel, shape, dtype, device).items():
            exact, plain, ours = (
                outputs(getattr(module, name)(*args, **kwargs))
                for module in (references, eager, kernel)
            )
            for index, reference in enumerate(exact):
                errors = {
                    "kernel": finite_distance(ours[index], reference),
                    "eager": finite_distance(plain[index], reference),
                }
                entries.append(
                    {
                        "operation": label,
                        "output": index,
                        "dtype": record.dtype_name(dtype),
                        **errors,
                        "ratio": ratio(**errors),
                    }
                )
    return entries


def measure_model(
    model: torch.nn.Module,
    kernel: ModuleType,
    size: LTXSize,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, object]:
    """Distances from the float32 model, one set of inputs at a time."""
    draws = [
        (seed, timestep, LTX_VIDEO.inputs(model, size, device, dtype, seed, timestep))
        for seed, timestep in DRAWS
    ]
    wide = copy.deepcopy(model).float()
    references_ = [wide(**models.upcast(arguments))[0] for _, _, arguments in draws]
    del wide
    injected = models.twin(model)
    kernel.inject_kernels(injected)

    entries = []
    for (seed, timestep, arguments), reference in zip(draws, references_, strict=True):
        errors = {
            "kernel": finite_distance(injected(**arguments)[0], reference),
            "eager": finite_distance(model(**arguments)[0], reference),
        }
        entries.append({"seed": seed, "timestep": timestep, **errors, "ratio": ratio(**errors)})
    together = {
        key: math.sqrt(sum(entry[key] ** 2 for entry in entries) / len(entries))
        for key in ("kernel", "eager")
    }
    return {
        "size": str(size),
        "tokens": size.tokens,
        "batch": 2,
        "dtype": record.dtype_name(dtype),
        "draws": entries,
        **together,
        "ratio": ratio(**together),
    }


@click.command()
@SIZES
@DEVICE
@DTYPE
@TINY
@record.output_option("accuracy")
@torch.no_grad()
def main(sizes, device, dtype, tiny, output) -> None:
    """Measure the accuracy of each operation and of the injected LTX-Video 2B, compared with eager.

    --dtype and --sizes apply to the model. The operations are measured in all three dtypes.
    """
    torch.set_float32_matmul_precision("highest")
    kernel, _ = models.load_kernel()
    operations = measure_operations(kernel, TINY_SHAPE if tiny else SHAPE, device)
    rows = [
        [f"{e['operation']} [{e['output']}]", e["dtype"], e["kernel"], e["eager"], e["ratio"]]
        for e in operations
    ]
    headers = ["", "dtype", "kernel", "eager", "ratio"]
    formats = ("", "", ".3e", ".3e", ".3f")
    click.echo(tabulate(rows, headers, floatfmt=formats))

    model = LTX_VIDEO.transformer(device, dtype, tiny)
    sizes = sizes or [TINY_SIZE if tiny else DEFAULT_SIZE]
    distances = [measure_model(model, kernel, size, dtype, device) for size in sizes]
    for result in distances:
        rows = [
            [f"timestep {e['timestep']:.0f}", e["kernel"], e["eager"], e["ratio"]]
            for e in result["draws"]
        ]
        rows.append(["together", result["kernel"], result["eager"], result["ratio"]])
        click.echo(f"\nLTX, {result['size']}, {result['dtype']}: distance from the float32 model")
        click.echo(tabulate(rows, ["", "injected", "eager", "ratio"], floatfmt=formats[1:]))

    names = ("batch", "sequence", "heads", "head_dim")
    shape = dict(zip(names, TINY_SHAPE if tiny else SHAPE, strict=True))
    results = {
        "environment": record.environment(device),
        "shape": shape,
        "operations": operations,
        "models": distances,
    }
    output = record.destination(output, "accuracy")
    record.finish(output, results)


if __name__ == "__main__":
    main()
