"""Adapters of peft and quantized layers of torchao, put into models."""

import importlib

import torch
from torch import nn


def linear_layers(family, model):
    """The names of all linear layers of the blocks, below adapters or not."""
    return [
        f"{path}.{name}"
        for path in family.block_lists
        for name, module in model.get_submodule(path).named_modules()
        if (type(module) is nn.Linear and "base_layer" not in name and "lora_" not in name)
        or hasattr(module, "base_layer")
    ]


def add_lora(family, model, name="default", seed=1, rank=2, targets=None, alpha=None):
    from peft import LoraConfig

    torch.manual_seed(seed)
    how = {"init_lora_weights": False, "target_modules": targets or family.lora_targets}
    alpha = 2 * rank if alpha is None else alpha
    model.add_adapter(LoraConfig(r=rank, lora_alpha=alpha, **how), adapter_name=name)


def quantize(module):
    """Int8 weights of torchao in all plain linear layers."""
    quantization = importlib.import_module("torchao.quantization")
    quantization.quantize_(
        module,
        quantization.Int8WeightOnlyConfig(),
        filter_fn=lambda m, _: type(m) is nn.Linear and type(m.weight.data) is torch.Tensor,
    )
