"""Training with the kernels, compared with eager training.

Small models of each family in bfloat16: the error of all gradients against the float32 model's, over eager's.
LTX-Video's blocks without checkpointing: the time of a forward and of forward and backward, also as GPU time,
their peak memory and the gradients' error. LoRA training of LTX-Video and FLUX.1 with few blocks: the loss of
each step. Eager runs with other data and in float32 show the noise.

Writes to benchmarks/results/training:

    python benchmarks/models/bench_training.py
    python benchmarks/models/bench_training.py --device cpu --tiny --rounds 2 --steps 3 --output out.json
"""

from __future__ import annotations

import copy
import functools
import math
import statistics
import sys
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import click
import torch
from diffusers import FluxTransformer2DModel, LTXVideoTransformer3DModel
from peft import LoraConfig
from tabulate import tabulate
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import models
from benchmarks.harness import kernel_times, record, timing
from benchmarks.harness.options import DEVICE, TINY
from benchmarks.models.flux import FLUX, FLUX2
from benchmarks.models.ltx import LTX_VIDEO, LTXSize
from benchmarks.models.published import Published
from benchmarks.models.qwenimage import QWENIMAGE
from benchmarks.models.stable_diffusion import SD3
from benchmarks.models.wan import WAN

DTYPE = torch.bfloat16
BLOCKS = 4  # of LTX-Video's 28
MODES = ("eager", "injected")
WARM_UP_ROUNDS = 3
PROFILED_CALLS = 3
LEARNING_RATE = 1e-3
LORA = LoraConfig(r=8, target_modules=["to_q", "to_k", "to_v", "to_out.0"])
LORA_SIZES = {LTX_VIDEO: LTXSize(9, 256, 256), FLUX: FLUX.parse_size("256x256")}
SMALL_MODELS = {
    LTX_VIDEO: ("LTX-Video, 2 blocks", LTXVideoTransformer3DModel, {"num_layers": 2}),
    FLUX: (
        "FLUX.1, 1 + 2 blocks",
        FluxTransformer2DModel,
        {"num_layers": 1, "num_single_layers": 2, "guidance_embeds": True},
    ),
}
FAMILIES = (LTX_VIDEO, FLUX, FLUX2, QWENIMAGE, SD3, WAN)
# Without cuDNN's, which returns NaN for FLUX.1's short sequences.
ATTENTION_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# Mode, dtype and data seed of each run.
RUNS = {
    "eager": ("eager", DTYPE, 0),
    "injected": ("injected", DTYPE, 0),
    "eager, other data": ("eager", DTYPE, 1),
    "eager, float32": ("eager", torch.float32, 0),
}


def loss_of(model: torch.nn.Module, arguments: dict[str, object]) -> torch.Tensor:
    return model(**arguments)[0].float().square().mean()


def gradients(model: torch.nn.Module, arguments: dict[str, object]) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss_of(model, arguments).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def relative_error(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """Relative error of all gradients as one vector."""
    difference = sum((found[n].double() - g.double()).square().sum() for n, g in exact.items())
    return (difference / sum(g.double().square().sum() for g in exact.values())).sqrt().item()


def measure_gradients(
    kernel: ModuleType, published: Published, device: torch.device, samples: int
) -> dict:
    """Error of a small model's gradients, against the float32 model's, over that of eager training: geometric
    mean over samples, and the standard error of its logarithm."""
    model = published.transformer(device, DTYPE, True)
    exact, injected = copy.deepcopy(model).float(), copy.deepcopy(model)
    kernel.inject_kernels(injected)
    logarithms = []
    for seed in range(samples):
        how = {"size": published.tiny_sizes[0], "device": device, "dtype": DTYPE, "seed": seed}
        arguments = published.inputs(model, **how)
        with sdpa_kernel(ATTENTION_BACKENDS):
            expected = gradients(exact, models.upcast(arguments))
            mine, eager = (
                relative_error(gradients(candidate, arguments), expected)
                for candidate in (injected, model)
            )
        logarithms.append(math.log(mine / eager))
    return {
        "model": published.tiny_name,
        "samples": samples,
        "error_over_eager": math.exp(statistics.fmean(logarithms)),
        "standard_error": statistics.stdev(logarithms) / math.sqrt(samples),
    }


def measure_blocks(kernel: ModuleType, device: torch.device, tiny: bool, rounds: int) -> dict:
    config = LTX_VIDEO.tiny_config if tiny else {"num_layers": BLOCKS}
    model = models.build(LTXVideoTransformer3DModel, config, device, DTYPE, 0)
    size = (LTX_VIDEO.tiny_sizes if tiny else LTX_VIDEO.sizes)[0]
    arguments = LTX_VIDEO.inputs(model, size, device, DTYPE)
    exact = gradients(copy.deepcopy(model).float(), models.upcast(arguments))
    functions, entries = {}, {}
    for mode in MODES:
        instance = copy.deepcopy(model)
        if mode == "injected":
            models.inject(kernel, instance, mode)
        step = functools.partial(gradients, instance, arguments)
        entries[mode] = {"gradient_error": relative_error(step(), exact)}
        instance.zero_grad(set_to_none=True)
        entries[mode]["peak_bytes"] = models.peak_bytes(step, device)
        functions[mode, "forward"] = functools.partial(loss_of, instance, arguments)
        functions[mode, "forward and backward"] = step
    timing.interleave(functions, WARM_UP_ROUNDS, device)
    samples = timing.interleave(functions, rounds, device)
    for (mode, what), values in samples.items():
        entries[mode][what] = timing.summarize(values)
    if device.type == "cuda":
        for (mode, what), function in functions.items():
            events = kernel_times.trace(function, PROFILED_CALLS)
            breakdown = kernel_times.breakdown(events, PROFILED_CALLS)
            entries[mode][f"{what}, GPU time"] = breakdown["total"]["ms"]
    eager, injected = (entries[mode] for mode in MODES)
    ratios = {
        f"eager over injected, {what}": eager[what]["median"] / injected[what]["median"]
        for what in ("forward", "forward and backward")
    }
    ratios["gradient error over eager's"] = injected["gradient_error"] / eager["gradient_error"]
    if device.type == "cuda":
        for what in ("forward, GPU time", "forward and backward, GPU time"):
            ratios[f"eager over injected, {what}"] = eager[what] / injected[what]
        ratios["peak memory over eager's"] = injected["peak_bytes"] / eager["peak_bytes"]
    return {
        "model": LTX_VIDEO.tiny_name if tiny else f"LTX-Video 2B, {BLOCKS} of 28 blocks",
        "size": str(size),
        "tokens": [2, size.tokens],
        "modes": entries,
        "ratios": ratios,
    }


def losses(
    published: Published,
    kernel: ModuleType,
    run: tuple[str, torch.dtype, int],
    device: torch.device,
    tiny: bool,
    steps: int,
) -> list[float]:
    """Losses of LoRA training towards random velocities, with one timestep per step."""
    mode, dtype, seed = run
    if tiny:
        model, size = published.transformer(device, DTYPE, True), published.tiny_sizes[0]
    else:
        _, cls, config = SMALL_MODELS[published]
        model, size = models.build(cls, config, device, DTYPE, 0), LORA_SIZES[published]
    model = model.to(dtype).requires_grad_(False)
    torch.manual_seed(0)
    model.add_adapter(LORA)
    if mode == "injected":
        kernel.inject_kernels(model)
    adapters = [p for p in model.parameters() if p.requires_grad]
    for parameter in adapters:
        parameter.data = parameter.data.float()
    optimizer = torch.optim.AdamW(adapters, LEARNING_RATE)
    curve = []
    for step in range(steps):
        arguments = published.inputs(
            model,
            size=size,
            device=device,
            dtype=DTYPE,
            seed=1000 * seed + step,
            timestep=40.0 * step,
        )
        shape = arguments["hidden_states"].shape
        target = models.normal(device, DTYPE, 1000 * seed + step + 500)(*shape)
        if dtype == torch.float32:
            arguments = models.upcast(arguments)
        with sdpa_kernel(ATTENTION_BACKENDS):
            loss = (model(**arguments)[0].float() - target.float()).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        curve.append(loss.item())
    return curve


def largest_deviation(curve: list[float], other: list[float]) -> float:
    return max(abs(a - b) / b for a, b in zip(curve, other, strict=True))


def measure_lora(kernel: ModuleType, device: torch.device, tiny: bool, steps: int) -> list[dict]:
    entries = []
    for published, (name, *_) in SMALL_MODELS.items():
        curves = {}
        for run, how in RUNS.items():
            curves[run] = losses(published, kernel, how, device, tiny, steps)
            models.free(device)
        entries.append(
            {
                "model": published.tiny_name if tiny else name,
                "losses": curves,
                "largest_deviation_from_eager": {
                    run: largest_deviation(curve, curves["eager"])
                    for run, curve in curves.items()
                    if run != "eager"
                },
            }
        )
    return entries


def show(result: dict) -> None:
    blocks = result["blocks"]
    click.echo(f"{blocks['model']}, {blocks['tokens']} tokens")
    click.echo(tabulate(blocks["ratios"].items(), floatfmt=".3f"))
    click.echo("Gradients' error over eager's")
    click.echo(tabulate(result["gradients"], "keys", floatfmt=".3f"))
    for entry in result["lora"]:
        click.echo(f"{entry['model']}: largest relative deviation of a step's loss from eager's")
        click.echo(tabulate(entry["largest_deviation_from_eager"].items(), floatfmt=".2e"))


@click.command()
@DEVICE
@TINY
@click.option("--rounds", type=click.IntRange(min=1), default=20, show_default=True)
@click.option("--steps", type=click.IntRange(min=1), default=20, show_default=True)
@click.option("--samples", type=click.IntRange(min=2), default=40, show_default=True)
@record.output_option("training")
def main(device, tiny, rounds, steps, samples, output) -> None:
    """Time training of LTX-Video's blocks, and compare gradients and loss curves of LoRA training."""
    kernel, _ = models.load_kernel()
    result = {"environment": record.environment(device), "dtype": record.dtype_name(DTYPE)}
    output = record.destination(output, "training")
    result["blocks"] = measure_blocks(kernel, device, tiny, rounds)
    models.free(device)
    record.write(output, {**result, "lora": [], "gradients": []})
    result["gradients"] = [measure_gradients(kernel, f, device, samples) for f in FAMILIES]
    result["lora"] = measure_lora(kernel, device, tiny, steps)
    show(result)
    record.finish(output, result)


if __name__ == "__main__":
    main()
