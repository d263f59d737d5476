"""Replaces modules of existing models by the operations: in place, per instance, reversibly."""

from .attention.backend import register_attention_backend
from .context_parallel import context_parallel_plan
from .core.report import InjectionReport
from .inject import eject_kernels, inject_kernels

__all__ = [
    "InjectionReport",
    "context_parallel_plan",
    "eject_kernels",
    "inject_kernels",
    "register_attention_backend",
]
