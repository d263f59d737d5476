"""Models with linear layers quantized to FP8 by torchao, and the same models without torchao and kernels.

torchao quantizes models only on a GPU, so the weights are made one by one, as it makes them. Its own product
does not run on a CPU either.
"""

import collections
import contextlib
import copy
import importlib

import torch
from torch import nn

from checks import operator_calls
from small_models import run

FP8 = torch.float8_e4m3fn
PER_ROW, PER_TENSOR = "PerRow", "PerTensor"
TENSORS = "torchao.quantization.quantize_.workflows.float8.float8_tensor"


def is_quantizable(module):
    return type(module) is nn.Linear and module.in_features % 16 == 0


def quantize(module, granularity=PER_ROW, *, is_dynamic=True):
    """Replaces the weights of all plain linear layers in a module. Returns their number."""
    layers = [layer for layer in module.modules() if is_quantizable(layer)]
    for layer in layers:
        layer.weight = quantized(layer.weight.data, granularity, is_dynamic=is_dynamic)
    return len(layers)


def loaded_in_fp8(family, model, folder):
    """The model with its blocks' linear layers in FP8, as diffusers loads it from a checkpoint in FP8."""
    from diffusers import BFLQuantizationConfig
    from diffusers.quantizers.bfl.utils import quantize_fp8r
    from safetensors.torch import save_file

    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    of_blocks = {module for block in family.blocks(model) for module in block.modules()}
    for name, module in model.named_modules():
        if module in of_blocks and is_quantizable(module):
            values, scale = quantize_fp8r(module.weight)
            tensors.update({f"{name}.weight": values, f"{name}.weight_scale": scale})
    save_file(tensors, folder / "model.safetensors")
    model.save_config(folder)
    config, dtype = BFLQuantizationConfig(compute_dtype=model.dtype), model.dtype
    how = {"config": str(folder), "quantization_config": config, "torch_dtype": dtype}
    path = str(folder / "model.safetensors")
    return type(model).from_single_file(path, **how).to(model.device)


def in_torchaos_format(model):
    """A copy of such a model with the same values and scales in torchao's layers."""
    model = copy.deepcopy(model)
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if type(child).__name__ != "BFLFP8RLinear":
                continue
            layer = nn.Linear(child.in_features, child.out_features, child.bias is not None)
            weight = quantized(torch.zeros_like(child.weight, dtype=child.compute_dtype))
            scale = child.weight_scale[:, None].clone()
            layer.weight = changed(weight, qdata=child.weight.data.clone(), scale=scale)
            layer.bias = child.bias
            parent._modules[name] = layer
    return model


def quantized(
    weight, granularity=PER_ROW, *, granularity_of_input=None, is_dynamic=True, **options
):
    quantization = importlib.import_module("torchao.quantization")
    tensors = importlib.import_module(TENSORS)
    of_products = importlib.import_module("torchao.float8.inference").Float8MMConfig
    if isinstance(granularity, str):
        granularity = getattr(quantization, granularity)()
    of_input = granularity_of_input or granularity
    how = tensors.QuantizeTensorToFloat8Kwargs(granularity=of_input, **options)
    tensor = quantization.Float8Tensor.from_hp(
        weight,
        granularity=granularity,
        act_quant_kwargs=how if is_dynamic else None,
        mm_config=of_products(use_fast_accum=True),
    )
    return nn.Parameter(tensor, requires_grad=False)


def is_quantized(module):
    return isinstance(module, nn.Linear) and hasattr(module.weight, "qdata")


class EagerLinear(nn.Module):
    """A quantized layer by PyTorch: x is quantized by row, the product is in float32 and rounded once."""

    def __init__(self, layer):
        super().__init__()
        self.wide_weight = dequantized(layer.weight)
        # Models read its dtype.
        weight = self.wide_weight.to(layer.weight.dtype)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = layer.bias

    def forward(self, x):
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(quantized_by_row(x), self.wide_weight, bias).to(x.dtype)


def quantized_by_row(x):
    """The values of x, quantized by row, in float32."""
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True)
    # By a tensor: PyTorch multiplies by the inverse of a number on a GPU.
    scale = scale / torch.full_like(scale, torch.finfo(FP8).max)
    return torch.where(scale > 0, (wide / scale).to(FP8).float() * scale, 0)


def eager_product(x, weight, bias=None):
    """``EagerLinear`` in place of torchao's product of x and a transposed weight. x is not quantized if only
    the weight is. The derivative does not see the quantization."""
    with torch.autocast(x.device.type, enabled=False):
        if weight.act_quant_kwargs is None:
            wide = x.float()
        elif x.requires_grad:
            wide = x + (quantized_by_row(x) - x).detach()
        else:
            wide = quantized_by_row(x)
        out = wide @ dequantized(weight)
        return (out if bias is None else out + bias.float()).to(x.dtype)


@contextlib.contextmanager
def eager_products():
    """All layers run ``eager_product`` that do not run on the kernels."""
    tensors = importlib.import_module(TENSORS)
    own = tensors._float8_addmm_impl
    tensors._float8_addmm_impl = eager_product
    try:
        yield
    finally:
        tensors._float8_addmm_impl = own


def dequantized(weight):
    return weight.qdata.float() * weight.scale


def changed(weight, **attributes):
    """A layer's weight with other attributes."""
    cls = type(weight)
    names = (*cls.tensor_data_names, *cls.optional_tensor_attribute_names)
    given = {**{name: getattr(weight, name) for name in names}, **attributes}
    return nn.Parameter(cls(**given), requires_grad=False)


def widened(weight):
    """A copy in float32 of a layer's weight, without quantization of the layer's input."""
    return changed(
        weight,
        qdata=weight.qdata.clone(),
        scale=weight.scale.clone(),
        act_quant_kwargs=None,
        dtype=torch.float32,
    )


def eager(model):
    """A copy of a quantized model whose quantized layers are PyTorch's."""
    model = copy.deepcopy(model)
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if is_quantized(child):
                parent._modules[name] = EagerLinear(child)
    return model


def exact(model):
    """A copy in float32 with the dequantized weights."""
    model = copy.deepcopy(model)
    for layer in model.modules():
        if is_quantized(layer):
            layer.weight = nn.Parameter(dequantized(layer.weight), requires_grad=False)
    return model.float()


def of_fp8(model, arguments):
    """The number of calls by operator that compute FP8 layers: the package's, and torchao's. "products": the
    number of layers that the package's compute."""
    return run_and_count(model, arguments)[1]


def run_and_count(model, arguments):
    """(the result, the same numbers) of one forward."""
    counts, results = collections.Counter(), []
    for name, args in operator_calls(lambda: results.append(run(model, arguments))):
        if "fp8" in name or "scaled_mm" in name:
            counts[name] += 1
            counts["products"] += products(name, args)
    return results[0], +counts


def products(name, args):
    if name == "linears_fp8":  # x, its scale, and five tensors of each layer
        return sum(weight is not None for weight in args[2:17:5])
    return name.startswith("linear_")
