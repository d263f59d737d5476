"""Replaces modules of existing models by the operations: in place, per instance, reversibly."""

from .attention_backend import register_attention_backend
from .context_parallel_plans import context_parallel_plan
from .inject import eject_kernels, inject_kernels
from .report import InjectionReport

__all__ = [
    "InjectionReport",
    "context_parallel_plan",
    "eject_kernels",
    "inject_kernels",
    "register_attention_backend",
]
