"""Replaces modules of existing models by the operations: in place, per instance, reversibly."""

from .attention.backend import register_attention_backend
from .context_parallel import context_parallel_plan
from .core.report import InjectionReport
from .guidance_parallel import enable_guidance_parallelism
from .inject import eject_kernels, inject_kernels
from .tile_parallel import enable_tile_parallelism

__all__ = [
    "InjectionReport",
    "context_parallel_plan",
    "eject_kernels",
    "enable_guidance_parallelism",
    "enable_tile_parallelism",
    "inject_kernels",
    "register_attention_backend",
]
