"""diffusers' group offloading. It remembers parameters. With a stream it prefetches each layer while the one
before it in the first forward runs."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

_GROUP_OFFLOADING = "diffusers.hooks.group_offloading"


def is_offloaded_to_disk(model: nn.Module) -> bool:
    """Whether the model's weights, or some of them, are in files."""
    hooks = map(_hook_of, model.modules())
    return any(hook and hook.config.offload_to_disk_path is not None for hook in hooks)


def is_prefetched(model: nn.Module) -> bool:
    """Whether it prefetches the model's layers."""
    hook = _hook_of(model)
    return hook is not None and hook.config.stream is not None


def renew_group_offloading(model: nn.Module) -> None:
    """Lets it look up the model's parameters, and the order of the layers, again."""
    renew: Any = getattr(
        sys.modules.get(_GROUP_OFFLOADING), "_maybe_remove_and_reapply_group_offloading", None
    )
    if renew is not None:
        renew(model)


def _hook_of(module: nn.Module) -> Any:
    registry: Any = vars(module).get("_diffusers_hook")
    return None if registry is None else registry.get_hook("group_offloading")
