"""Puts the operations into models that exist already: in place, on the instance, reversibly."""

from .inject import eject_kernels, inject_kernels
from .report import InjectionReport

__all__ = ["InjectionReport", "eject_kernels", "inject_kernels"]
