"""Models without a family, in part: each norm, feed-forward activation and attention by itself.

Nothing is known of how such a model puts them together, so none is joined with what comes before or after it:
a module's forward is replaced by one that computes the same from the same arguments.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..arguments import ATTENTION_HEAD_DIMS
from .activations import GELU
from .basic_blocks import BASIC_BLOCK
from .gated_activations import GATED_ACTIVATIONS
from .group_norms import GROUP_NORM
from .injected import Injection
from .norm_modules import ADAPTIVE_NORMS, NORMS
from .original import find_class
from .part import Part
from .plan import NO_MODULE, Plan
from .processors import ProcessedAttention, attention_part, head_dim_of
from .report import IN_PART, NOT_AT_ALL
from .resnets import RESNET_BLOCK
from .spatial_transformers import SPATIAL_TRANSFORMER
from .standard_attention import STANDARD_ATTENTION, StandardAttention

_PARTS: tuple[Part, ...] = (
    *(RESNET_BLOCK, SPATIAL_TRANSFORMER, BASIC_BLOCK, *ADAPTIVE_NORMS, *NORMS, GROUP_NORM, GELU),
    *GATED_ACTIVATIONS,
)
_MODEL = "diffusers.models.modeling_utils:ModelMixin"
# Where diffusers has models that are no denoisers: they run once a picture, not once a step.
_NO_DENOISERS = (
    *("diffusers.models.autoencoders.", "diffusers.models.condition_embedders."),
    "diffusers.pipelines.",
)


def is_model(module: nn.Module) -> bool:
    """Whether it is a model of diffusers, or a user's subclass of one."""
    cls = find_class(_MODEL)
    return cls is not None and isinstance(module, cls)


def is_denoiser(module: nn.Module) -> bool:
    return is_model(module) and not type(module).__module__.startswith(_NO_DENOISERS)


def plan_in_part(model: nn.Module, options: dict[str, Any]) -> Plan:
    """What to replace in a model without a family, what not, and why not."""
    found: list[tuple[str, nn.Module, Part]] = []
    inner: set[int] = set()  # what the forward of the module around it stands in for, too
    for name, module in model.named_modules():
        part = next((part for part in _PARTS if part.is_kind_of(module)), None)
        inner.update(id(getattr(module, child, None)) for child in getattr(part, "norms", ()))
        part = _attention_part(module) if part is None else part
        if part is not None and id(module) not in inner:
            found.append((name, module, part))
    originals = {}
    for part in {part.path: part for _, _, part in found}.values():
        originals.update({part.path: part.own_forward(), **part.originals()})
    plan = Plan(Injection(options["attention"], originals, ()), options)
    if getattr(model, "_parallel_config", None) is not None:
        plan.leave("", model, "parallelism is on: each rank holds a part of the tokens only")
    else:
        for name, module, part in found:
            reason = _why_never(module, part, options)
            if reason is None:
                plan.replace_forward(name, module, part)
            else:
                plan.leave(name, module, reason)
        if not found:
            plan.leave("", model, NO_MODULE)
    plan.report.levels[""] = IN_PART if plan.report.replaced else NOT_AT_ALL
    return plan


def _attention_part(module: nn.Module) -> Part | None:
    part = attention_part(module)
    is_standard = part is not None and part.path == STANDARD_ATTENTION.path
    return STANDARD_ATTENTION if is_standard else part


def _why_never(module: nn.Module, part: Part, options: dict[str, Any]) -> str | None:
    """Why a module is not looked at, whatever it is called with."""
    if not isinstance(part, (ProcessedAttention, StandardAttention)):
        return None
    if not options["attention"]:
        return "attention itself is the model's own: asked for by attention=False"
    head_dim = head_dim_of(module)
    if head_dim is not None and head_dim not in ATTENTION_HEAD_DIMS:
        known = " and ".join(map(str, ATTENTION_HEAD_DIMS))
        return f"its heads have {head_dim} elements, and the kernel's {known}"
    return None
