"""Partially injected models, described as families for the random sequences."""

import collections.abc
import functools

import torch
from torch import nn

from families import FAMILIES, Family
from small_models import BY_NAME

LORA = ("to_q", "to_k", "to_out.0", "conv1", "conv2", "time_emb_proj", "conv_shortcut")
IN_PART = ("minimax_music3", "unet", "auraflow", "stable_audio")


class Families(collections.abc.Mapping):
    """All models by name. Partially injected ones are made on demand."""

    def __getitem__(self, name):
        return FAMILIES[name] if name in FAMILIES else family_of(name)

    def __iter__(self):
        return iter((*FAMILIES, *IN_PART))

    def __len__(self):
        return len(FAMILIES) + len(IN_PART)


def is_inexact(name, value):
    return isinstance(value, torch.Tensor) and value.is_floating_point() and name != "timestep"


@functools.cache
def family_of(name):
    """A model described as a family. Its configuration is not drawn."""
    small = BY_NAME[name]

    def model(device, dtype=torch.float32, *, seed=0, **_):
        return small.model(device, dtype, seed)

    def inputs(device, dtype=torch.float32, *, seed=0):
        return small.arguments(device, dtype, seed)

    with torch.random.fork_rng(devices=[]):
        example = model("cpu")
    lists = [path for path, part in example.named_modules() if isinstance(part, nn.ModuleList)]
    blocks = [path for path in lists if "." not in path]
    parts = {}
    for path, part in example.get_submodule(blocks[-1]).named_modules(prefix=blocks[-1]):
        kinds = {
            "block": "TransformerBlock" in type(part).__name__,
            "next_block": path.endswith("transformer_blocks.1"),
            "resnet": type(part).__name__ == "ResnetBlock2D",
            "resnet_norm": path.endswith("resnets.0.norm2"),
            "nonlinearity": path.endswith("resnets.0.nonlinearity"),
            "convolution": path.endswith("resnets.0.conv1"),
            "shortcut": path.endswith("resnets.0.conv_shortcut"),
            "time": path.endswith("resnets.0.time_emb_proj"),
            "attention": hasattr(part, "processor"),
            "norm": "Norm" in type(part).__name__,
            "inner_norm": path.endswith("norm1.norm"),
            "qk_norm": path.endswith("norm_q"),
            "linear": type(part) is nn.Linear,
            "activation": path.endswith(("ff.net.0", "ff_context.net.0", "nonlinearity")),
        }
        for kind, is_one in kinds.items():
            if is_one:
                parts.setdefault(kind, path)
    parts.setdefault("block", f"{blocks[-1]}.0")
    processor = type(example.get_submodule(parts["attention"]).processor)
    return Family(
        name=small.name,
        model=model,
        inputs=inputs,
        inexact=tuple(name for name, value in inputs("cpu").items() if is_inexact(name, value)),
        options={"two samples": {}},
        parts=parts,
        lora_targets=[*LORA],
        module=processor.__module__,
        processor=processor.__name__,
        block_lists=tuple(blocks),
        functions=(),
        one_block={},
    )
