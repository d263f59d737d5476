"""Replaces modules of existing models by the operations: in place, per instance, reversibly."""

from .inject import eject_kernels, inject_kernels
from .report import InjectionReport

__all__ = ["InjectionReport", "eject_kernels", "inject_kernels"]
