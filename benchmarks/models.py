"""What the benchmarks of models share: the kernel package, random weights, and the modes compared.

A published model is a module, ltx.py or flux.py, which defines NAME and TINY_NAME, the RESULT that
bench_models.py writes, BATCH and TEXT_TOKENS, SIZES and TINY_SIZES with `parse_size` for others, and makes
the `transformer` and the `inputs` of a forward.
"""

from __future__ import annotations

import contextlib
import copy
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import torch

KERNEL_ID = "org/h100-diffusers-kernels"
CHECKOUT = Path(__file__).resolve().parents[1]
NO_ATTENTION = "injected-no-attention"  # the model's own attention between the kernels
MODES = ("eager", "compiled", "injected", NO_ATTENTION, "injected+compiled")
# Standard deviation, or about that, of the scores of the image's own attention, in nats.
WEIGHTS = {"random": 1.0, "peaked": 3.0}
QUERY_AND_KEY_NORMS = tuple(f"norm_{name}.weight" for name in ("q", "k", "added_q", "added_k"))


def load_kernel() -> tuple[ModuleType, float]:
    """The kernel package through get_kernel, and the seconds that loading took.

    This checkout's build unless LOCAL_KERNELS says otherwise.
    """
    from kernels import get_kernel

    if (CHECKOUT / "build").is_dir():
        os.environ.setdefault("LOCAL_KERNELS", f"{KERNEL_ID}={CHECKOUT}")
    begin = time.perf_counter()
    kernel = get_kernel(KERNEL_ID, version=1, trust_remote_code=True)
    return kernel, time.perf_counter() - begin


def load_local_kernel(checkout: Path) -> ModuleType:
    """The kernel package as built in a checkout; those of several may be loaded at a time."""
    from kernels import get_local_kernel

    try:
        return get_local_kernel(checkout, trust_remote_code=True)
    except FileNotFoundError:
        raise FileNotFoundError(f"{checkout} holds no build for this machine") from None


def randomize(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Unit-gain weights: what passes a layer keeps its scale, so no branch vanishes or blows up."""
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if name.endswith("weight") and weight.ndim > 1:
                weight.normal_(std=weight[0].numel() ** -0.5)
            elif ".norm_" in name:
                weight.normal_(mean=1.0, std=0.1)  # of query and key, where trained ones are not 1
            weight.data = weight.data.to(dtype)
    return module.eval()


def name_of(published: ModuleType, is_tiny: bool) -> str:
    return published.TINY_NAME if is_tiny else published.NAME


def twin(model: torch.nn.Module) -> torch.nn.Module:
    """Modules of its own over the same parameters and buffers, which are not copied."""
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


@contextlib.contextmanager
def weights(model: torch.nn.Module, name: str) -> Iterator[None]:
    """Have the model's random weights, and its twins', be those of WEIGHTS for a while, in place.

    What sets the scores is the weights of query's and key's norms, of all attentions.
    """
    norms = [
        weight for key, weight in model.named_parameters() if key.endswith(QUERY_AND_KEY_NORMS)
    ]
    random = [weight.detach().clone() for weight in norms]
    factor = WEIGHTS[name] ** 0.5  # of the query's weights and of the key's
    try:
        with torch.no_grad():
            for weight in norms:
                weight.mul_(factor)
        yield
    finally:
        with torch.no_grad():
            for weight, before in zip(norms, random, strict=True):
                weight.copy_(before)


def inject(kernel: ModuleType, pipe_or_model: object, mode: str) -> None:
    """As a mode that begins with "injected" asks for."""
    kernel.inject_kernels(pipe_or_model, attention=mode != NO_ATTENTION)


def compile_whole(model: torch.nn.Module) -> None:
    """torch.compile in place: one graph, static shapes, default mode."""
    model.compile(fullgraph=True, dynamic=False)


def check_modes(modes: Sequence[str]) -> list[str]:
    """The modes in their order; ValueError names one that there is not."""
    for mode in modes:
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    return [mode for mode in MODES if mode in modes]
