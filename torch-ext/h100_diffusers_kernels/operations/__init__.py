"""The operations: one documented function each.

``T`` is bfloat16, float16 or float32. Arithmetic is float32, rounded once, at the output; attention also
rounds its softmax probabilities to 16 bits, or all operands to 8. Leading dimensions are rows. Inputs may be
strided in every dimension except the last and are not copied.

Results are new contiguous tensors. Some operations take ``out``, a tensor of the result's shape and dtype,
strided in any dimension except the last; they write and return it. ``out`` must not share memory with an
input unless the operation allows it.

If an input requires grad, forward runs the kernel and backward differentiates the operation's formula.
Forward-mode derivatives and transforms of ``torch.func`` run the formula. In these cases ``out`` and
in-place writes are refused. The FP8 operations and ``linears_lora`` have no derivatives.

A wrong argument raises ValueError, or TypeError if its type is wrong, in one sentence, before any launch or
write. Failure to allocate a result raises torch.OutOfMemoryError.

A family is a file, named as in ``torch-ext/operations`` and ``kernel_src``: formulas, public functions, and
a fake of each operator. ``calls`` and ``conditions`` are shared.
"""

# ruff: noqa: F401 -- exported

from .activation import geglu, geglu_fp8, gelu, gelu_fp8, silu, swiglu, swiglu_fp8
from .attention import attention, attention_int8
from .channel_rms_norm import channel_rms_norm
from .conv3d import conv3d
from .fp8 import (
    linear_fp8,
    linear_gated_residual_fp8,
    linear_gelu_fp8,
    linears_fp8,
    quantize_fp8,
)
from .group_norm import group_norm
from .key_blocks import KeyBlocks
from .linear import linears_lora, lora_down
from .norm import (
    gated_residual,
    gated_residual_layer_norm_modulate,
    gated_residual_layer_norm_modulate_fp8,
    gated_residual_layer_norm_modulate_pair,
    gated_residual_rms_norm_modulate,
    gated_residual_rms_norm_modulate_fp8,
    layer_norm,
    layer_norm_fp8,
    layer_norm_modulate,
    layer_norm_modulate_fp8,
    layer_norm_modulate_pair,
    rms_norm,
    rms_norm_fp8,
    rms_norm_modulate,
    rms_norm_modulate_fp8,
)
from .qk_norm_rope import CoordinateRope, qk_norm_rope
from .rope import rope, rope_3d
from .softmax import softmax
