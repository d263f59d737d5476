"""Adapters of peft and quantized layers of torchao, put into models."""

import importlib

import torch
from torch import nn


def add_lora(family, model, name="default", seed=1, rank=2):
    from peft import LoraConfig

    torch.manual_seed(seed)
    how = {"init_lora_weights": False, "target_modules": family.lora_targets}
    model.add_adapter(LoraConfig(r=rank, lora_alpha=2 * rank, **how), adapter_name=name)


def quantize(module):
    """Int8 weights of torchao in all plain linear layers."""
    quantization = importlib.import_module("torchao.quantization")
    quantization.quantize_(
        module,
        quantization.Int8WeightOnlyConfig(),
        filter_fn=lambda m, _: type(m) is nn.Linear and type(m.weight.data) is torch.Tensor,
    )
