"""The same operations in other libraries: Liger and QuACK; for attention cuDNN and flash attention
through Torch, and FlashAttention-3.

Each method has the name and arguments of an operation in this package. It converts the arguments to
the library's form, which is not timed, and returns the timed call, or None if the library lacks the
operation.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


@dataclass(frozen=True)
class Call:
    """The timed call, and the conversion of its result to the operation's outputs."""

    run: Callable[[], object]
    outputs: Callable[[object], list[Tensor]] = lambda result: [result]


class Library:
    distribution: str

    def version(self) -> str:
        return importlib.metadata.version(self.distribution)


class Liger(Library):
    """liger_kernel: https://github.com/linkedin/Liger-Kernel.

    Its rotary embedding is left out because it is a different operation: it overwrites its input, so
    half of the traffic stays in the L2 cache.
    """

    distribution = "liger-kernel"

    def __init__(self) -> None:
        from liger_kernel.ops import (
            geglu,
            group_norm,
            layer_norm,
            modulated_rms_norm,
            rms_norm,
            swiglu,
        )
        from liger_kernel.ops import softmax as softmax_

        self._rms_norm = rms_norm.LigerRMSNormFunction.apply
        self._layer_norm = layer_norm.LigerLayerNormFunction.apply
        self._modulate = modulated_rms_norm.LigerModulatedRMSNormFunction.apply
        self._group_norm = group_norm.LigerGroupNormFunction.apply
        self._geglu = geglu.LigerGELUMulFunction.apply
        self._swiglu = swiglu.LigerSiLUMulFunction.apply
        self._softmax = softmax_.LigerSoftmaxFunction.apply

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float = 1e-6) -> Call:
        return Call(lambda: self._rms_norm(x, weight, eps, 0.0, "llama", False))

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Call:
        return Call(lambda: self._layer_norm(x, weight, bias, eps))

    def rms_norm_modulate(self, x: Tensor, scale: Tensor, shift: Tensor, eps: float = 1e-6) -> Call:
        scale, shift = (t.reshape(-1, t.shape[-1]).contiguous() for t in (scale, shift))
        return Call(lambda: self._modulate(x, None, scale, shift, eps, 0.0, "llama", False))

    def group_norm(
        self,
        x: Tensor,
        num_groups: int,
        weight: Tensor,
        bias: Tensor,
        eps: float = 1e-5,
        channel_bias: Tensor | None = None,
        activation: str = "none",
    ) -> Call | None:
        """Only the norm, of contiguous tensors."""
        if channel_bias is not None or activation != "none" or not x.is_contiguous():
            return None
        channels = x.shape[1]
        return Call(lambda: self._group_norm(x, weight, bias, channels, num_groups, eps))

    def geglu(
        self, x: Tensor, approximate: str = "none", bias: Tensor | None = None
    ) -> Call | None:
        """On two contiguous tensors, unlike the joint result of one product for both halves."""
        if approximate != "tanh" or bias is not None:
            return None
        hidden, gate = (t.contiguous() for t in x.chunk(2, dim=-1))
        return Call(lambda: self._geglu(gate, hidden))

    def swiglu(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        activated: str = "second",
        out: Tensor | None = None,
    ) -> Call | None:
        """On two contiguous tensors, as `geglu`."""
        if bias is not None or out is not None:
            return None
        hidden, gate = (t.contiguous() for t in x.chunk(2, dim=-1))
        if activated == "first":
            hidden, gate = gate, hidden
        return Call(lambda: self._swiglu(gate, hidden))

    def softmax(self, x: Tensor) -> Call:
        return Call(lambda: self._softmax(x))


class Quack(Library):
    """quack-kernels: https://github.com/Dao-AILab/quack."""

    distribution = "quack-kernels"

    def __init__(self) -> None:
        from quack.rmsnorm import layernorm_fwd, rmsnorm
        from quack.rotary import apply_rotary_emb
        from quack.softmax import softmax

        self._rms_norm, self._layer_norm = rmsnorm, layernorm_fwd
        self._rope, self._softmax = apply_rotary_emb, softmax

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float = 1e-6) -> Call:
        return Call(lambda: self._rms_norm(x, weight, eps=eps))

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Call:
        """With float32 parameters, which it requires."""
        rows, weight, bias = x.flatten(0, -2), weight.float(), bias.float()
        return Call(
            lambda: self._layer_norm(rows, weight, bias, eps),
            lambda result: [result.view(x.shape)],
        )

    def rope(
        self, x: Tensor, cos: Tensor, sin: Tensor | None = None, layout: str = "interleaved"
    ) -> Call | None:
        """Only from real tables with one value per pair."""
        if sin is None or 2 * cos.shape[-1] != x.shape[-1]:
            return None
        is_interleaved = layout == "interleaved"
        return Call(lambda: self._rope(x, cos, sin, interleaved=is_interleaved))

    def softmax(self, x: Tensor) -> Call:
        rows = x.flatten(0, -2)
        return Call(lambda: self._softmax(rows), lambda result: [result.view(x.shape)])


class TorchAttention(Library):
    """torch.nn.functional.scaled_dot_product_attention by one of its backends, on transposed views."""

    distribution = "torch"
    backend: SDPBackend

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, key_bias: Tensor | None = None
    ) -> Call | None:
        """The key bias has diffusers' shape, (B, 1, 1, Sk)."""
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mask = None if key_bias is None else key_bias[:, None, None]

        def run() -> Tensor:
            with sdpa_kernel(self.backend):
                return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

        return Call(run, lambda result: [result.transpose(1, 2)])


class CudnnAttention(TorchAttention):
    backend = SDPBackend.CUDNN_ATTENTION

    def version(self) -> str:
        return f"{torch.backends.cudnn.version()}, of Torch {super().version()}"


class TorchFlashAttention(TorchAttention):
    """It takes no mask."""

    backend = SDPBackend.FLASH_ATTENTION

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, key_bias: Tensor | None = None
    ) -> Call | None:
        return super().attention(q, k, v) if key_bias is None else None


class FlashAttention3(Library):
    """fa3-fwd, the forward of FlashAttention-3 as a wheel: https://pypi.org/project/fa3-fwd.

    It takes no mask.
    """

    distribution = "fa3-fwd"

    def __init__(self) -> None:
        from fa3_fwd_interface import flash_attn_func

        self._attention = flash_attn_func

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, key_bias: Tensor | None = None
    ) -> Call | None:
        return Call(lambda: self._attention(q, k, v)) if key_bias is None else None


LIBRARIES = {"liger": Liger, "quack": Quack}
ATTENTION_LIBRARIES = {
    "cudnn": CudnnAttention,
    "flash": TorchFlashAttention,
    "fa3": FlashAttention3,
}


def load(
    device: torch.device, known: Mapping[str, type[Library]] = LIBRARIES
) -> tuple[dict[str, object], dict[str, str]]:
    """The libraries that this machine can run, and each library's version or the reason to leave it out."""
    libraries, notes = {}, {}
    for name, library in known.items():
        try:
            if device.type != "cuda":
                raise ImportError("it needs a GPU")
            loaded = library()
            notes[name] = loaded.version()
            libraries[name] = loaded
        except Exception as error:  # any error while loading leaves the library out
            notes[name] = f"left out: {type(error).__name__}: {error}"
    return libraries, notes
