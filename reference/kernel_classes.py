"""Classes of GPU kernels and of CPU operators, by name: for the benchmarks and the examples."""

import re

PACKAGE = "h100_diffusers_kernels"
CLASSES = {
    "gemm": "matrix products",
    "attention": "attention",
    "convolution": "convolutions",
    "other": "everything else",
}

# The names of Inductor's pointwise and reduction kernels list the operators fused into them, and so
# may say addmm or attention; only its templates (triton_tem) are matrix products or attention.
_INDUCTOR_LOOP = re.compile(r"^triton_(poi|red|per|for|split_scan)_")
_ATTENTION = re.compile(r"flash|fmha|sdpa|attention", re.IGNORECASE)
# Of a library also the changes of layout around it. cuDNN's attention is an "fprop" too.
_CONVOLUTION = re.compile(
    r"conv(?!ert)|fprop|dgrad|wgrad|implicit_gemm|winograd|im2col|vol2col|nchwTo|nhwcTo|ncdhwTo|ndhwcTo",
    re.IGNORECASE,
)
# These may be fused with what follows a convolution.
_MATRIX_TEMPLATE = re.compile(r"^triton_(tem|mm).*mm")
_GEMM = re.compile(
    r"nvjet|gemm|gemv|cutlass|cublas|splitk|triton_tem|triton_mm|linear_fp8|product_kernel|linears_lora"
    r"|^aten::(add|b|baddb)?mm$",
    re.IGNORECASE,
)


def classify(name: str) -> str:
    """Key of CLASSES for a kernel, by the names that cuBLAS, cuDNN, ATen and Triton give theirs.

    On the CPU the names are those of operators.
    """
    if _INDUCTOR_LOOP.match(name):
        return "other"
    if _ATTENTION.search(name):
        return "attention"
    if _CONVOLUTION.search(name) and not _MATRIX_TEMPLATE.match(name):
        return "convolution"
    return "gemm" if _GEMM.search(name) else "other"
