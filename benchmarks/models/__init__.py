"""What the benchmarks of models share: the kernel package, random weights, and the modes compared.

published.py says what a published model is.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from benchmarks import CHECKOUT
from benchmarks.models import outliers

from builder.package import hub_name

KERNEL_ID, VERSION = hub_name(CHECKOUT)
NO_ATTENTION = "injected-no-attention"  # the model's own attention between the kernels
REGIONAL = "compiled-regional"  # block by block, as diffusers recommends
REGIONAL_AND_DECODER = f"{REGIONAL}+decoder"
# Self-attention by FlashAttention-3.
EAGER_FA3, FA3 = "eager+fa3", f"{REGIONAL}+fa3"
FA3_MODES = (EAGER_FA3, FA3)
REDUCE_OVERHEAD = "compiled-reduce-overhead"  # as a whole, replayed from CUDA graphs
GRAPHS = "injected+graphs"  # the kernels, replayed from CUDA graphs
# The blocks' linear layers quantized by torchao, with a scale for each row.
TORCHAO, TORCHAO_COMPILED, INJECTED_FP8 = "eager+fp8", f"{REGIONAL}+fp8", "injected+fp8"
GRAPHS_FP8 = f"{GRAPHS}+fp8"
# Long attention in 8 bits, beside layers in 16 bits and beside torchao's.
INT8_ATTENTION, INT8_FP8 = "injected+int8", f"{INJECTED_FP8}+int8"
INT8_MODES = (INT8_ATTENTION, INT8_FP8)
TORCHAO_MODES = (TORCHAO, TORCHAO_COMPILED, INJECTED_FP8, GRAPHS_FP8, INT8_FP8)
# The layers that inject_kernels(precision=...) quantizes.
PRECISION_FP8, PRECISION_FAST = "injected+precision-fp8", "injected+precision-fp8-fast"
PRECISION_MODES = {PRECISION_FP8: "fp8", PRECISION_FAST: "fp8-fast"}
GRAPHS_PRECISION = {f"{GRAPHS}+precision-{name}": name for name in PRECISION_MODES.values()}
GRAPHS_MODES = (GRAPHS, GRAPHS_FP8, *GRAPHS_PRECISION)
FP8_MODES = (*TORCHAO_MODES, *PRECISION_MODES)
# Arguments of inject_kernels by mode, where they are not the defaults.
INJECT_OPTIONS: dict[str, dict[str, Any]] = {
    NO_ATTENTION: {"attention": False},
    **dict.fromkeys(INT8_MODES, {"attention": "int8"}),
    **dict.fromkeys(GRAPHS_MODES, {"cuda_graphs": True}),
    # Twins keep the weights.
    **{mode: {"precision": p, "keep_originals": False} for mode, p in PRECISION_MODES.items()},
    **{
        mode: {"precision": p, "keep_originals": False, "cuda_graphs": True}
        for mode, p in GRAPHS_PRECISION.items()
    },
}
# The modes whose injection bench_models.py times, and its entry in the result.
INJECTIONS = {
    "injected": "injection",
    INJECTED_FP8: "injection_fp8",
    **{mode: f"injection_precision_{name}" for mode, name in PRECISION_MODES.items()},
}
# Parts of the names of linear layers in blocks that TORCHAO_MODES leave as they are: they modulate.
NOT_QUANTIZED = ("norm", "mod", "adaln")
MODES = (
    *("eager", EAGER_FA3, "compiled", REGIONAL, FA3, REDUCE_OVERHEAD),
    *("injected", NO_ATTENTION, GRAPHS, "injected+compiled", f"injected+{REGIONAL}"),
    *(INT8_ATTENTION, *FP8_MODES),
)
SELF_ATTENTION = ("attn", "attn1", "attention", "self_attention")  # names of modules
# diffusers' backends of FlashAttention-3. The first takes no mask. The second gathers the keys that a mask
# leaves, which cannot be compiled as a full graph.
FLASH_3, FLASH_3_VARLEN = "_flash_3", "_flash_3_varlen_hub"
HAVE_DENSE_MASKS = ("HunyuanVideo15Transformer3DModel",)
NEED_GPU = (REDUCE_OVERHEAD, *GRAPHS_MODES, *FA3_MODES, TORCHAO, TORCHAO_COMPILED)
DEFAULT_MODES = ("eager", REGIONAL, "injected")
# Standard deviation, or about that, of the scores of the image's own attention, in nats.
WEIGHTS = {"random": 1.0, "peaked": 3.0}
OUTLIERS = "outliers"  # peaked, and with outlier channels (outliers.py), for models that it knows
ALL_WEIGHTS = {**WEIGHTS, OUTLIERS: WEIGHTS["peaked"]}
QUERY_AND_KEY_NORMS = (
    *(f"norm_{name}" for name in ("q", "k", "added_q", "added_k")),
    *("query_norm", "key_norm", "attn_q_norm", "attn_k_norm"),  # Kandinsky's and JoyImage's
    *(f"{name}_rms_norm{stream}" for name in "qk" for stream in ("", "_t")),  # HiDream-I1's
)
ADDS_ONE = "Krea2RMSNorm"  # the norm that multiplies by 1 + weight
# The model that reads how many tokens each of its experts has.
BREAKS_GRAPHS = "HiDreamImageTransformer2DModel"
QUERY_AND_KEY_PROJECTIONS = ("to_q", "to_k", "add_q_proj", "add_k_proj")


def load_kernel() -> tuple[ModuleType, float]:
    """The kernel package through get_kernel, and the seconds that loading took.

    This checkout's build unless LOCAL_KERNELS says otherwise.
    """
    from kernels import get_kernel

    if (CHECKOUT / "build").is_dir():
        os.environ.setdefault("LOCAL_KERNELS", f"{KERNEL_ID}={CHECKOUT}")
    begin = time.perf_counter()
    kernel = get_kernel(KERNEL_ID, version=VERSION, trust_remote_code=True)
    return kernel, time.perf_counter() - begin


def load_local_kernel(checkout: Path) -> ModuleType:
    """The kernel package as built in a checkout; those of several may be loaded at a time."""
    from kernels import get_local_kernel

    try:
        return get_local_kernel(checkout, trust_remote_code=True)
    except FileNotFoundError:
        raise FileNotFoundError(f"{checkout} holds no build for this machine") from None


def randomize(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Unit-gain weights: what passes a layer keeps its scale, so no branch vanishes or blows up.

    In the dtypes in which diffusers loads a model: what it keeps in float32 is so.
    """
    kept = set(getattr(module, "_keep_in_fp32_modules", None) or ())
    about_zero = {id(m.weight) for m in module.modules() if type(m).__name__ == ADDS_ONE}
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if name.endswith("weight") and weight.ndim > 1:
                weight.normal_(std=weight[0].numel() ** -0.5)
            elif name.endswith("weight"):
                # Of a norm, where trained ones are not 1.
                weight.normal_(mean=0.0 if id(weight) in about_zero else 1.0, std=0.1)
            if not kept.intersection(name.split(".")):
                weight.data = weight.data.to(dtype)
        saved = module.state_dict(keep_vars=True)
        for name, buffer in module.named_buffers():
            if name in saved and buffer.is_floating_point():
                buffer.data = buffer.data.to(dtype)
    return module.eval()


def build(
    cls: type, config: Mapping[str, object], device: torch.device, dtype: torch.dtype, seed: int
) -> torch.nn.Module:
    """A model of diffusers' with random weights, made on the device."""
    torch.manual_seed(seed)
    with device:
        model = cls(**config)
    return randomize(model.to(device), dtype)  # some tensors are made on the CPU


def small_config(cls: str) -> dict[str, object]:
    """The configuration of the small model of a class that the tests have."""
    import every_model  # it imports all models of diffusers

    return every_model.config_of(cls, head_dim=128)


def normal(device: torch.device, dtype: torch.dtype, seed: int) -> Callable[..., torch.Tensor]:
    """What draws normal tensors of the shapes that it is given, in float32, and rounds them."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    return draw


def positions(device: torch.device, *lengths: int) -> torch.Tensor:
    """Integer positions of tokens along these axes, the last one innermost: (product of lengths, axes)."""
    return torch.cartesian_prod(*[torch.arange(length, device=device) for length in lengths])


def twin(model: torch.nn.Module) -> torch.nn.Module:
    """Modules and parameters of its own over the same values, which are not copied. Buffers are the same.

    inject_kernels(precision=...) moves the values of the parameters that it is given.
    """
    shared: dict[int, torch.Tensor] = {id(buffer): buffer for buffer in model.buffers()}
    for parameter in model.parameters():
        shared[id(parameter)] = torch.nn.Parameter(parameter, parameter.requires_grad)
    return copy.deepcopy(model, shared)


def twin_for(model: torch.nn.Module, mode: str) -> torch.nn.Module:
    """A twin, with quantized linear layers in TORCHAO_MODES."""
    instance = twin(model)
    quantize_for(instance, mode)
    return instance


@contextlib.contextmanager
def weights(model: torch.nn.Module, name: str) -> Iterator[None]:
    """Have the model's random weights, and its twins', be those of ALL_WEIGHTS for a while, in place.

    What sets the scores is the weights of query's and key's norms, of all attentions. Where there is no norm
    it is those of the projections. Where a norm has no weight, a head whose query and key keep only one of
    s² dimensions has scores s times as large: the norm makes these s times as large.
    """
    # Blocks may share their weights.
    norms = list({weight.data_ptr(): (weight, *rest) for weight, *rest in _norms(model)}.values())
    projections = list({w.data_ptr(): (w, *rest) for w, *rest in _projections(model)}.values())
    changed = [weight for weight, *_ in (*norms, *projections)]
    random = [weight.detach().clone() for weight in changed]
    std = ALL_WEIGHTS[name]
    factor = std**0.5  # of the query's weights and of the key's
    try:
        with torch.no_grad():
            for weight, added in norms:
                weight.add_(added).mul_(factor).sub_(added)
            for weight, heads, is_normed in projections:
                if is_normed:
                    by_head = weight.unflatten(0, (heads, -1))
                    by_head[:, round(by_head.shape[1] / std**2) :] = 0
                else:
                    weight.mul_(factor)
        with outliers.placed(model) if name == OUTLIERS else contextlib.nullcontext():
            yield
    finally:
        with torch.no_grad():
            for weight, before in zip(changed, random, strict=True):
                weight.copy_(before)


def _norms(model: torch.nn.Module) -> Iterator[tuple[torch.Tensor, float]]:
    """Weights of query's and key's norms, each with what the norm adds to it."""
    for name, norm in model.named_modules():
        if name.endswith(QUERY_AND_KEY_NORMS) and getattr(norm, "weight", None) is not None:
            yield norm.weight, 1.0 if type(norm).__name__ == ADDS_ONE else 0.0


def _projections(model: torch.nn.Module) -> Iterator[tuple[torch.Tensor, int, bool]]:
    """Weights and biases of what makes query and key, where their norms have no weight or are not there.

    Each with the attention's number of heads, and whether there is a norm.
    """
    for attention in model.modules():
        norm = getattr(attention, "norm_q", None)
        is_one = hasattr(attention, "to_q") and hasattr(
            attention, "heads"
        )  # no pooling of the text
        if is_one and getattr(norm, "weight", None) is None:
            for name in QUERY_AND_KEY_PROJECTIONS:
                linear = getattr(attention, name, None)
                for weight in linear.parameters() if linear is not None else ():
                    yield weight, attention.heads, norm is not None


def float32_output(
    model: torch.nn.Module,
    arguments: Mapping[str, object],
    thousandfold: Collection[str] = (),
) -> torch.Tensor:
    """What the model and the arguments give in float32, by a copy of all weights.

    The arguments named by `thousandfold` are a thousandth of what the model makes of them in its own dtype.
    """
    dtype = next(model.parameters()).dtype
    given = dict(arguments)
    for name in thousandfold:
        given[name] = (given[name].to(dtype) * 1000).float() / 1000
    wide = copy.deepcopy(model).float()
    return output_of(wide(**upcast(given)))


def output_of(result: Sequence[Any]) -> torch.Tensor:
    """What a forward denoised: the first result, and the first one of a list of images."""
    first = result[0]
    return first[0] if isinstance(first, list) else first


def upcast(arguments: Mapping[str, object]) -> dict[str, object]:
    """The arguments, what is a tensor of floats in float32, also within a dict or a list of them."""

    def wide(value: object) -> object:
        if isinstance(value, dict):
            return upcast(value)
        if isinstance(value, list):
            return [wide(one) for one in value]
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.float() if is_float else value

    return {name: wide(value) for name, value in arguments.items()}


def inject(kernel: ModuleType, pipe_or_model: object, mode: str) -> Any:
    """As a mode that begins with "injected" asks for; its report."""
    return kernel.inject_kernels(pipe_or_model, **INJECT_OPTIONS.get(mode, {}))


def compile_whole(model: torch.nn.Module, **options: object) -> None:
    """torch.compile in place: one graph, static shapes, and the default mode unless options say otherwise."""
    model.compile(**{"fullgraph": True, "dynamic": False, **options})


def block_lists(model: torch.nn.Module) -> list[torch.nn.ModuleList]:
    """The model's stacks of blocks, in the order in which they are called."""
    return [child for child in model.children() if isinstance(child, torch.nn.ModuleList)]


def compile_blocks(model: torch.nn.Module, **options: object) -> None:
    """torch.compile of each block in place: of those that diffusers says are repeated, where it names any."""
    options = {"fullgraph": True, "dynamic": False, **options}
    if getattr(model, "_repeated_blocks", None):
        model.compile_repeated_blocks(**options)
        return
    for blocks in block_lists(model):
        for block in blocks:
            block.compile(**options)


def compile_as(model: torch.nn.Module, mode: str) -> bool:
    """As the mode asks for; whether it does."""
    if mode in FA3_MODES:
        use_flash_attention_3(model)
    is_one_graph = type(model).__name__ != BREAKS_GRAPHS
    if REGIONAL in mode:
        is_one_graph &= mode != FA3 or flash_attention_3(model) == FLASH_3
        compile_blocks(model, fullgraph=is_one_graph)
    elif mode == REDUCE_OVERHEAD:
        compile_whole(model, fullgraph=is_one_graph, mode="reduce-overhead")
    elif mode.endswith("compiled"):
        compile_whole(model, fullgraph=is_one_graph)
    else:
        return False
    return True


def flash_attention_3(model: torch.nn.Module) -> str | None:
    """diffusers' backend of FlashAttention-3 for the model's self-attentions, if they take a backend."""
    if not any(_self_attentions(model)):
        return None
    return FLASH_3_VARLEN if type(model).__name__ in HAVE_DENSE_MASKS else FLASH_3


def use_flash_attention_3(model: torch.nn.Module) -> None:
    """Have the self-attentions of a model run on FlashAttention-3, as diffusers' attention backend, from the
    wheel fa3-fwd.

    diffusers finds FlashAttention-3 only as it is built from source, under other names, or on the Hub.
    ValueError if none of the attentions takes a backend.
    """
    import fa3_fwd_interface
    from diffusers.models import attention_dispatch

    backend = flash_attention_3(model)
    if backend is None:
        raise ValueError("its attention has no backend to choose")
    name = attention_dispatch.AttentionBackendName(backend)
    if backend == FLASH_3:
        attention_dispatch.flash_attn_3_func = fa3_fwd_interface.flash_attn_func
        attention_dispatch._CAN_USE_FLASH_ATTN_3 = True
    else:
        on_hub = attention_dispatch._HUB_KERNELS_REGISTRY[name]
        on_hub.kernel_fn = fa3_fwd_interface.flash_attn_varlen_func
    for processor in _self_attentions(model):
        processor._attention_backend = name


def _self_attentions(model: torch.nn.Module) -> Iterator[Any]:
    """The processors of self-attentions that take a backend."""
    for name, module in model.named_modules():
        processor = getattr(module, "processor", None)
        if name.rpartition(".")[2] in SELF_ATTENTION and hasattr(processor, "_attention_backend"):
            yield processor


def linear_layers(model: torch.nn.Module) -> list[str]:
    """Names of the linear layers in the model's stacks of blocks."""
    return [
        f"{stack}.{name}"
        for stack, blocks in model.named_children()
        if isinstance(blocks, torch.nn.ModuleList)
        for name, module in blocks.named_modules()
        if type(module) is torch.nn.Linear
    ]


def fp8_layers(model: torch.nn.Module) -> list[str]:
    """Names of the linear layers that TORCHAO_MODES quantize: all in blocks, except those that modulate."""
    return [
        name
        for name in linear_layers(model)
        if not any(part in name.partition(".")[2] for part in NOT_QUANTIZED)
    ]


def quantize(model: torch.nn.Module, names: Collection[str] | None = None) -> None:
    """Quantizes linear layers by torchao with a scale per row: those of `names`, or of `fp8_layers`. The
    weights of models that share them stay.

    It changes Inductor's configuration: later compilations take minutes. torchao itself quantizes on GPUs
    only; on a CPU its weights are made one by one.
    """
    from torchao.quantization import (
        Float8DynamicActivationFloat8WeightConfig,
        Float8Tensor,
        PerRow,
        quantize_,
    )
    from torchao.quantization.quantize_.workflows.float8.float8_tensor import (
        QuantizeTensorToFloat8Kwargs,
    )

    chosen = set(fp8_layers(model) if names is None else names)
    if next(model.parameters()).is_cuda:
        config = Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())
        quantize_(model, config, filter_fn=lambda _, name: name in chosen)
        return
    of_input = QuantizeTensorToFloat8Kwargs(granularity=PerRow())
    for layer in map(model.get_submodule, chosen):
        weight = Float8Tensor.from_hp(
            layer.weight.detach(), granularity=PerRow(), act_quant_kwargs=of_input
        )
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)


def quantize_for(model: torch.nn.Module, mode: str) -> None:
    """As TORCHAO_MODES ask for; the others leave the model as it is."""
    if mode in TORCHAO_MODES:
        quantize(model)


def quantize_again(quantized: torch.nn.Module, model: torch.nn.Module) -> None:
    """Have a twin's quantized layers be made of the model's weights as they are now, in place."""
    layers = {
        name: module.weight
        for name, module in quantized.named_modules()
        if hasattr(getattr(module, "weight", None), "qdata")
    }
    fresh = twin(model)
    quantize(fresh, layers)
    for name, old in layers.items():
        new = fresh.get_submodule(name).weight
        old.qdata.copy_(new.qdata)
        old.scale.copy_(new.scale)


def free(device: torch.device) -> None:
    """Return the memory of a model that is no longer there, and of what was compiled of it."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def peak_bytes(function: Callable[[], object], device: torch.device) -> int | None:
    """The most memory of a call, above that in use before it; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    function()
    return torch.cuda.max_memory_allocated(device) - before


def possible_modes(modes: Sequence[str], device: torch.device) -> tuple[list[str], str | None]:
    """Those that there are on the device, and a sentence of those that are left out, if any.

    ValueError, in that sentence, where none is left.
    """
    if device.type == "cuda":
        return list(modes), None
    left_out = [mode for mode in modes if mode in NEED_GPU]
    if not left_out:
        return list(modes), None
    sentence = f"Not measured on a CPU: {', '.join(left_out)}."
    possible = [mode for mode in modes if mode not in left_out]
    if not possible:
        raise ValueError(sentence)
    return possible, sentence
