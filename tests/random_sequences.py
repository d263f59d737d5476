"""Random sequences of what users do to a model, with kernels and without, and the first difference.

Every step is done alike to a model that the kernels are put into and taken out of, and to a plain model of
the same weights; what the two compute is compared after each forward. What raises on the plain model must
raise the same on the other. A sequence is drawn from a seed, so that it can be repeated::

    python tests/random_sequences.py --family ltx --seed 123 --shrink
    python tests/random_sequences.py --family all --device cuda --sequences 5000 --processes 14

A failure is printed as a script of its own. The exit status is 1 if there was any. With
RANDOM_SEQUENCES_WITHOUT_KERNELS=1 in the environment both models are plain: then there must be none.
"""

import argparse
import collections
import contextlib
import copy
import functools
import gc
import importlib
import itertools
import logging
import multiprocessing
import multiprocessing.connection
import os
import random
import re
import statistics
import sys
import tempfile
import threading
import time
import traceback
import warnings
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import accelerate
import torch
import torch.nn.functional as F
from accelerate.hooks import add_hook_to_module, remove_hook_from_module
from diffusers import (
    FirstBlockCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
)
from diffusers.hooks import HookRegistry, ModelHook, apply_group_offloading
from diffusers.hooks import group_offloading as group_offloading_hooks
from diffusers.hooks.layer_skip import AttentionScoreSkipFunctionMode
from diffusers.models import attention_dispatch
from diffusers.models.activations import GELU
from diffusers.models.normalization import RMSNorm
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules import module as global_hooks

from families import KERNEL_HEADS, TINY_HEADS
from families_in_part import Families
from foreign_modules import ForeignBlock, HalvedLinear, Wrap

REPO_ID = "org/h100-diffusers-kernels"
CHECKOUT = Path(__file__).resolve().parents[1]


class NoKernels:
    """In place of the package: every difference that is found then is the harness's own."""

    def inject_kernels(self, model, *, attention=True):
        already_injected = "_attention" in vars(model)
        if vars(model).setdefault("_attention", attention) != attention:
            raise ValueError
        return argparse.Namespace(already_injected=already_injected)

    def eject_kernels(self, model):
        vars(model).pop("_attention", None)


@functools.cache
def load_kernel():
    if os.environ.get("RANDOM_SEQUENCES_WITHOUT_KERNELS"):
        return NoKernels()
    os.environ.setdefault("LOCAL_KERNELS", f"{REPO_ID}={CHECKOUT}")
    from kernels import get_kernel

    return get_kernel(REPO_ID, version=1, trust_remote_code=True)


# --------------------------------------------------------------------------------------------------
# What is compared, and how far apart two results may be
#
# float32: the two models do the same arithmetic in another order; 1e-4 of the output's norm is some hundred
# times what that leaves, and a hundredth of what one wrong token does.
#
# 16 bits: rounding errors of the two are independent, so that only their sizes can be compared: the
# injected model's distance from a float32 model (to which everything is done as well) with the plain one's.
# The accuracy contract's 1.05 holds for the geometric mean of the two's ratio over all forwards. In one
# forward, of a few hundred elements, the ratio of two independent errors varies: where both were right it was
# between 0.61 and 1.51 for the output in 400 forwards of FLUX.1 with adapters and, fewer elements making up
# most of it, between 0.46 and 1.98 for the gradient in 160. A quarter of the dtype's epsilon is for where the
# plain model's error is small by chance. One wrong block is 10 to 100 times the plain model's error.

FLOAT32_LIMIT = 1e-4
FLOAT32_GRADIENT_LIMIT = 1e-3
ROUNDED_LIMIT = 1.75
ROUNDED_GRADIENT_LIMIT = 2.5
MEAN_ROUNDED_LIMIT = 1.05
UNKNOWN_ROUNDING_LIMIT = 4
FORWARDS_OF_MEAN = 300  # the mean of fewer varies by more than a hundredth

OUTPUT = "the output"


class Difference(AssertionError):
    """The injected model does something else than the plain one."""


class Refused(Exception):
    """The step raised on the plain model, and the same on the injected one."""


def relative(a, b):
    norm = b.norm().item()
    return (a - b).norm().item() / norm if norm else a.norm().item()


def compare(mine, plain, exact, what, eps, is_differentiated):
    """The ratio of the two's distances from the float32 model's, where there is one and both differ."""
    if mine.dtype != plain.dtype or mine.shape != plain.shape:
        raise Difference(
            f"{what} is {mine.dtype} {tuple(mine.shape)}, the plain model's "
            f"{plain.dtype} {tuple(plain.shape)}"
        )
    is_rounded = exact is not None
    mine, plain = mine.detach().double().cpu(), plain.detach().double().cpu()
    if not torch.isfinite(plain).all():
        if not is_rounded and not torch.equal(torch.isfinite(mine), torch.isfinite(plain)):
            raise Difference(f"{what} is finite at other places than the plain model's")
        return None
    if not torch.isfinite(mine).all():
        raise Difference(f"{what} is not finite, the plain model's is")
    if not is_rounded:
        error = relative(mine, plain)
        # Of 16 bits only where the float32 model could not compute what the plain one did.
        limit = FLOAT32_GRADIENT_LIMIT if is_differentiated else FLOAT32_LIMIT
        if error > max(limit, UNKNOWN_ROUNDING_LIMIT * eps):
            raise Difference(f"{what} is {error:.3g} of its norm from the plain model's")
        return None
    exact = exact.detach().double().cpu()
    error, allowed = relative(mine, exact), relative(plain, exact)
    limit = ROUNDED_LIMIT if what == OUTPUT else ROUNDED_GRADIENT_LIMIT
    if error > limit * allowed + eps / 4:
        raise Difference(
            f"{what} is {error:.3g} of its norm from the float32 model's, the plain one {allowed:.3g}"
        )
    return error / allowed if min(error, allowed) > eps / 4 else None


# --------------------------------------------------------------------------------------------------
# What is put into models


class AccelerateHook(accelerate.hooks.ModelHook):
    def post_forward(self, module, output):
        return changed(output, "replace")


class DiffusersHook(ModelHook):
    def post_forward(self, module, output):
        return changed(output, "replace")


class Boom(Exception):
    """What a hook raises in the middle of a forward."""


def changed(value, how):
    """A module's result, or its arguments, with the first tensor in it changed."""
    if isinstance(value, dict):
        key = next(key for key, item in value.items() if _is_values(item))
        return {**value, key: changed(value[key], how)}
    if not isinstance(value, torch.Tensor):
        first, *rest = value
        return (changed(first, how), *rest)
    if how == "replace":
        return value * 1.5
    if how == "in place":
        return value.mul_(1.5)
    if how == "view":
        value[..., 1:].add_(0.5)
    elif how == "data":
        value.data[..., ::2] += 0.5
    elif how == "detached":
        value.detach()[..., ::2].mul_(-1)
    return value


def _is_values(item):
    return isinstance(item, torch.Tensor) and item.is_floating_point()


HOWS = ("replace", "in place", "view", "data", "detached")


def make_hook(kind, how):
    if kind == "post":
        return lambda module, args, output: changed(output, how)
    if kind == "pre":
        return lambda module, args: changed(args, how) if args and _is_values(args[0]) else None

    def change_keyword(module, args, kwargs):
        if any(map(_is_values, kwargs.values())):
            return args, changed(kwargs, how)

    def change_last_keyword(module, args, kwargs):
        names = [name for name, item in kwargs.items() if _is_values(item)]
        if names:
            return args, {**kwargs, names[-1]: changed(kwargs[names[-1]], how)}

    def change_parameter(module, args):
        name, parameter = next(module.named_parameters(), (None, None))
        if parameter is None:  # a norm without a weight
            return
        owner, _, attribute = name.rpartition(".")
        if how == "replace":
            owner = module.get_submodule(owner)
            setattr(owner, attribute, nn.Parameter(parameter.detach() * -1))
        else:
            parameter.data.mul_(-1)

    return {
        "keyword": change_keyword,
        "last keyword": change_last_keyword,
        "parameter": change_parameter,
    }[kind]


# --------------------------------------------------------------------------------------------------
# Steps


class Kind(NamedTuple):
    weight: float
    draw: Any  # (rng, twins) -> keyword arguments
    allowed: Any  # twins -> whether the step makes sense now


KINDS: dict[str, Kind] = {}


def step(weight, draw=lambda rng, twins: {}, allowed=lambda twins: True, kinds=KINDS):
    """A method of Twins that is drawn with a weight. Where it is not allowed, it does nothing."""

    def register(method):
        @functools.wraps(method)
        def guarded(self, **arguments):
            if allowed(self) and self.has(arguments.get("module", "")):
                self.steps += 1
                return method(self, **arguments)

        kinds[method.__name__] = Kind(weight, draw, allowed)
        return guarded

    return register


@dataclass(frozen=True)
class Step:
    """A call of a method of Twins."""

    name: str
    arguments: dict

    def apply(self, twins):
        getattr(twins, self.name)(**self.arguments)

    def code(self):
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        return f"twins.{self.name}({arguments})"


def draw_module(rng, twins, *kinds):
    """The path of one of the family's parts, or of a random module of the blocks."""
    parts = twins.family.parts
    paths = [path for kind, path in parts.items() if not kinds or kind.startswith(kinds)]
    return rng.choice([path for path in paths if twins.has(path)] or [""])


def draw_forward(rng, twins):
    modes = ["no_grad"]
    if not twins.compiled:  # what has to be compiled anew takes seconds
        modes += ["no_grad"] * 7 + ["inference_mode"] * 3 + ["grad_enabled", "score_skip"]
        if twins.cache_name is None:
            modes += ["backward"] * (2 if twins.offload is None else 0)
            modes += ["autocast", "thread"]
            if can_differentiate_forwards(twins):
                modes.append("jvp")
    has_one_shape = twins.cache_name is not None or twins.compiled
    options = None if has_one_shape else rng.choice(list(twins.family.options))
    return {
        "mode": rng.choice(modes),
        "options": options or next(iter(twins.family.options)),
        "seed": rng.randrange(1000),
    }


def is_loose(twins):
    """Whether weights are where they were made and as they were made."""
    return not (twins.offload or twins.layerwise or twins.quantized or twins.compiled)


def can_differentiate_forwards(twins):
    """Torch dies of weights that change, and of ``data``, inside of a function transform."""
    return twins.dtype == torch.float32 and is_loose(twins) and not twins.uses_data


def draw_hook(rng, twins):
    kind = rng.choice(["post", "post", "post", "pre", "keyword", "last keyword", "parameter"])
    kinds = ("block", "next_block", "single_block", "norm") if kind == "parameter" else ()
    return {
        "module": draw_module(rng, twins, *kinds),
        "kind": kind,
        "how": rng.choice(HOWS),
    }


REPLACEMENTS = {
    "block": ["foreign", "another", "wrap"],
    "next_block": ["foreign", "another", "wrap"],
    "single_block": ["foreign", "another", "wrap"],
    "last_block": ["foreign", "another"],
    "attention": ["another", "wrap"],
    "cross_attention": ["another", "wrap"],
    "single_attention": ["another", "wrap"],
    "norm": ["layer_norm", "identity", "eps", "bias", "wrap", "another"],
    "norm2": ["layer_norm", "identity", "eps", "bias", "wrap"],
    "inner_norm": ["layer_norm", "identity", "eps", "wrap"],
    "single_norm": ["wrap", "another"],
    "qk_norm": ["layer_norm", "identity", "eps", "wrap", "another"],
    "added_norm": ["layer_norm", "identity", "eps", "wrap"],
    "linear": ["halved", "wrap", "another"],
    "output": ["halved", "wrap"],
    "feed_forward": ["wrap", "another"],
    "feed_forward_of_text": ["wrap", "another"],
    "activation": ["wrap", "another"],
    "up": ["halved", "wrap"],
    "gelu": ["wrap", "identity"],
    "rope": ["wrap"],
    "modulation": ["wrap"],
}
# AdaLayerNorms return more than their input's norm.
ADAPTIVE = ("AdaLayerNormZero", "AdaLayerNormZeroSingle")


def draw_replacement(rng, twins):
    parts = [part for part in REPLACEMENTS if twins.has(twins.family.parts.get(part, "?"))]
    part = rng.choice(parts)
    path = twins.family.parts[part]
    choices = REPLACEMENTS[part]
    if type(twins.plain.get_submodule(path)).__name__ in ADAPTIVE:
        choices = ["wrap", "another"]
    return {"module": path, "by": rng.choice(choices)}


# What a user may patch, by name: (where it stands, attribute).
def patchable(twins):
    module = importlib.import_module(twins.family.module)
    blocks = {type(b) for b in twins.family.blocks(twins.plain)}
    classes = {cls for cls in blocks if cls.__module__ == twins.family.module}
    classes |= {
        type(m)
        for m in twins.plain.modules()
        if type(m).__module__ == twins.family.module
        or type(m) in (GELU, RMSNorm, nn.RMSNorm, nn.LayerNorm, nn.GELU)
        or type(m).__name__ in ADAPTIVE
    }
    result = {f"{cls.__name__}.forward": (cls, "forward") for cls in classes}
    result[f"{twins.family.processor}.__call__"] = (
        getattr(module, twins.family.processor),
        "__call__",
    )
    for name in twins.family.functions:
        result[name] = (module, name)
    for name in ("rms_norm", "layer_norm", "scaled_dot_product_attention", "gelu"):
        result[f"F.{name}"] = (F, name)
    return result


class Twins:
    """An injected model and a plain one, and a float32 one beside those of 16 bits.

    Args:
        family: its name.
        dtype: "float32", "bfloat16" or "float16".
        seed: of the weights.
        config: of the model.

    Raises:
        Difference: by a step, when the injected model does not do what the plain one does.
        Refused: by a step that raised the same on both.

    Attributes:
        families: the models that there are, by name.
        kinds: the steps that are drawn, by name.
        counts: what is to be known of all sequences together.
    """

    families = Families()
    kinds = KINDS

    def __init__(self, family, *, dtype="float32", device="cpu", seed=0, **config):
        self.kernel = load_kernel()
        self.family = self.families[family]
        self.device = torch.device(device)
        self.dtype = getattr(torch, dtype)
        is_rounded = self.dtype != torch.float32
        self.config = {**(KERNEL_HEADS if is_rounded else TINY_HEADS), **config}
        self.plain, self.mine = (
            self.family.model(self.device, self.dtype, seed=seed, **self.config) for _ in range(2)
        )
        self.exact = copy.deepcopy(self.plain).float() if is_rounded else None
        self.injected = None  # the options of the injection
        self.offload = None
        self.layerwise = self.quantized = self.compiled = self.restructured = False
        self.adapters = []
        self.cache_name = None
        self.timestep = 900
        self.hooks = []  # (module, dictionary of hooks, id)
        self.global_hooks = []
        self.patches = {}
        self.kept = []
        self.seen = None
        self.steps = self.forwards = 0
        self.ratios = []  # of two errors, with what they are of
        self.uses_data = self.changes_weights = False
        # Whether a library or a wrapper keeps the forward that it found: for a plain model that is the
        # function that its class had then, which another, patched in later, does not change.
        self.keeps_forwards = False
        self.shares_forwards = (
            False  # a copy runs forwards of the original, as they are kept in closures
        )
        self.seed = seed
        self.counts = collections.Counter()

    @staticmethod
    def draw_model(rng, family, device):
        """The arguments of a Twins."""
        dtype = rng.choices(["float32", "bfloat16", "float16"], [6, 3, 1])[0]
        model = {"family": family, "dtype": dtype, "device": device, "seed": rng.randrange(3)}
        if rng.random() < 0.3:
            model["blocks"] = 3
        if family == "ltx" and rng.random() < 0.25:
            model["norm_elementwise_affine"] = True
        return model

    def draw_steps(self, rng):
        """The steps of a sequence, each drawn when those before are done."""
        # The kernels come in early in most sequences: much is to happen around them.
        first = rng.randrange(4)
        for i in range(rng.randint(6, 14)):
            yield (
                Step("inject", KINDS["inject"].draw(rng, self))
                if i == first
                else self.draw_step(rng)
            )
            if rng.random() < 0.5:
                yield Step("forward", draw_forward(rng, self))
            if self.compiled and i > first:
                break
        yield Step("free" if rng.random() < 0.25 and not self.compiled else "finish", {})

    def draw_step(self, rng):
        kinds = {name: kind for name, kind in self.kinds.items() if kind.allowed(self)}
        weights = [kind.weight for kind in kinds.values()]
        if self.injected is not None:
            weights[list(kinds).index("inject")] = 0.5
        name = rng.choices(list(kinds), weights)[0]
        return Step(name, kinds[name].draw(rng, self))

    # Global state is given back, whatever happens

    def __enter__(self):
        registry = attention_dispatch._AttentionBackendRegistry
        self._backend = registry._active_backend
        self._folder = None
        self._had_gc = gc.isenabled()
        gc.disable()
        return self

    def __exit__(self, *_):
        attention_dispatch._AttentionBackendRegistry._active_backend = self._backend
        for name in list(self.patches):
            self._unpatch(name)
        for handle in self.global_hooks:
            handle.remove()
        if self._folder is not None:
            self._folder.cleanup()
        if self.compiled:
            torch._dynamo.reset()
        self.plain = self.mine = self.exact = None
        self.kept.clear()
        if self._had_gc:
            gc.enable()
        gc.collect()

    def has(self, path):
        """Whether a path leads to a module. (Steps before may have put it elsewhere.)"""
        try:
            self.plain.get_submodule(path)
        except AttributeError:
            return False
        return True

    @property
    def models(self):
        return [m for m in (self.plain, self.exact, self.mine) if m is not None]

    def alike(self, act):
        """Calls ``act`` with each model; returns what it gives for the plain, the float32, the injected."""
        outcomes, errors = {}, {}
        for name in ("plain", "exact", "mine"):
            outcomes[name], errors[name] = attempt(act, getattr(self, name))
        plain, mine = errors["plain"], errors["mine"]
        if type(plain) is not type(mine):
            if mine is not None:
                raise Difference(f"{describe(mine)}; the plain model: {describe(plain)}") from mine
            raise Difference(f"no error; the plain model: {describe(plain)}") from plain
        if plain is not None:
            raise Refused(describe(plain)) from plain
        if errors["exact"] is not None:
            self.exact = None
        return outcomes["plain"], outcomes["exact"], outcomes["mine"]

    # ----------------------------------------------------------------------------------------------
    # The kernels

    @step(8, lambda rng, twins: {"attention": rng.random() < 0.85})
    def inject(self, *, attention=True):
        """Puts them in; once more, with the options of before, if they are."""
        if self.injected is not None:
            attention = self.injected["attention"]
        report = self.kernel.inject_kernels(self.mine, attention=attention)
        if report.already_injected != (self.injected is not None):
            raise Difference(f"already_injected is {report.already_injected}")
        self.injected = {"attention": attention}

    @step(0.5, allowed=lambda twins: twins.injected is not None)
    def inject_otherwise(self):
        """Other options than those in place are an error, and change nothing."""
        try:
            self.kernel.inject_kernels(self.mine, attention=not self.injected["attention"])
        except ValueError:
            return
        raise Difference("a second injection with other options raised no ValueError")

    @step(3, allowed=lambda twins: not twins.compiled)
    def eject(self):
        self.kernel.eject_kernels(self.mine)
        self.injected = None

    # ----------------------------------------------------------------------------------------------
    # Forwards

    @step(14, draw_forward)
    def forward(self, *, mode="no_grad", options, seed):
        if mode == "jvp" and not can_differentiate_forwards(self):
            return
        options = self.family.options[options]
        arguments = self.family.inputs(self.device, self.dtype, seed=seed, **options)
        inputs = {
            "plain": arguments,
            "mine": copy.deepcopy(arguments),
            "exact": self.family.cast(arguments, torch.float32),
        }
        self.timestep = 100 + (self.timestep - 107) % 700
        names = {id(getattr(self, name)): name for name in inputs}
        counts = {}

        def run(model):
            self.seen = collections.Counter() if self.seen is not None else None
            arguments = inputs[names[id(model)]]
            if self.cache_name is None:
                result = MODES[mode](self, model, arguments)
            else:
                with model.cache_context("cond"):
                    result = MODES[mode](self, model, arguments)
            counts[names[id(model)]] = self.seen
            return result

        self.forwards += 1
        is_differentiated = mode in ("backward", "jvp")
        try:
            plain, exact, mine = self.alike(run)
        except Refused:
            return
        except Difference as difference:
            # In-place changes and tensors of inference mode may break one of two equivalent graphs.
            # But hooks and caches have seen more of one than of the other: that is the end.
            if mode in ("backward", "jvp", "grad_enabled") and "no error; " in str(difference):
                raise Refused(str(difference)) from None
            raise
        if counts["plain"] != counts["mine"]:
            missing = counts["plain"] - counts["mine"]
            more = counts["mine"] - counts["plain"]
            raise Difference(f"a global hook misses {dict(missing)}, and sees besides {dict(more)}")
        exact = [None] * len(plain) if exact is None else exact
        for what, a, b, c in zip(mine, mine.values(), plain.values(), exact_of(exact), strict=True):
            if self.has_equal_bits:
                if not torch.equal(a.nan_to_num(), b.nan_to_num()):
                    error = relative(a.double(), b.double())
                    raise Difference(f"{what} has other bits, without kernels ({error:.2g})")
            else:
                eps = torch.finfo(self.dtype).eps
                ratio = compare(a, b, c, what, eps, is_differentiated)
                if ratio is not None and self.injected is not None:
                    self.ratios.append((what, ratio))

    @property
    def has_equal_bits(self):
        """Whether the models run the same code on the same values. (Caches keep what kernels made.)"""
        return not (
            self.injected
            or self.cache_name
            or self.compiled
            or self.shares_forwards
            or self.device.type != "cpu"
        )

    @step(
        2,
        lambda rng, twins: {
            "module": draw_module(rng, twins),
            "kind": rng.choice(["pre", "post"]),
            "seed": rng.randrange(1000),
        },
        lambda twins: not twins.compiled and twins.cache_name is None,
    )
    def interrupted_forward(self, *, module, kind, seed):
        """An exception in the middle of a forward."""

        def boom(module, *args):
            raise Boom

        handles = []
        for model in self.models:
            part = model.get_submodule(module)
            add = part.register_forward_hook if kind == "post" else part.register_forward_pre_hook
            handles.append(add(boom))
        arguments = self.family.inputs(self.device, self.dtype, seed=seed)
        float32 = self.family.cast(arguments, torch.float32)
        with contextlib.suppress(Refused), torch.no_grad():
            self.alike(
                lambda model: model(**(float32 if model is self.exact else arguments)) and None
            )
        for handle in handles:
            handle.remove()

    # ----------------------------------------------------------------------------------------------
    # Hooks

    @step(6, draw_hook, lambda twins: not twins.compiled and len(twins.hooks) < 4)
    def hook(self, *, module, kind, how):
        hook = make_hook(kind, how)
        if kind == "parameter":
            if self.offload == "disk":
                return  # memory without values
            self.changes_weights = True
        self.uses_data |= kind == "parameter" or how in ("data", "detached")

        def add(model):
            part = model.get_submodule(module)
            if kind == "post":
                handle = part.register_forward_hook(hook)
            else:
                has_kwargs = kind.endswith("keyword")
                handle = part.register_forward_pre_hook(hook, with_kwargs=has_kwargs)
            return handle

        plain, exact, mine = self.alike(add)
        self.hooks.append([handle for handle in (plain, exact, mine) if handle is not None])

    @step(2, lambda rng, twins: {"index": rng.randrange(4)}, lambda twins: twins.hooks)
    def unhook(self, *, index):
        for handle in self.hooks.pop(index % len(self.hooks)):
            handle.remove()

    @step(
        1,
        lambda rng, twins: {
            "kind": rng.choice(["count", "change"]),
            "cls": rng.choice(["RMSNorm", "GELU", "LayerNorm", "Linear", "Dropout"]),
        },
        lambda twins: not twins.compiled and not twins.global_hooks,
    )
    def global_hook(self, *, kind, cls):
        """One that counts the modules called by class, or changes what those of a class return."""

        def count(module, args, output):
            if self.seen is not None:
                self.seen[type(module).__name__] += 1

        def change(module, args, output):
            if type(module).__name__ == cls:
                return changed(output, "replace")

        if kind == "count":
            self.seen = collections.Counter()
        self.global_hooks.append(
            global_hooks.register_module_forward_hook(count if kind == "count" else change)
        )

    @step(0.7, allowed=lambda twins: twins.global_hooks)
    def remove_global_hook(self):
        self.global_hooks.pop().remove()
        self.seen = None

    @step(
        2,
        lambda rng, twins: {
            "module": draw_module(rng, twins),
            "library": rng.choice(["accelerate", "diffusers"]),
        },
        lambda twins: not twins.compiled and twins.offload is None,
    )
    def library_hook(self, *, module, library):
        def add(model):
            part = model.get_submodule(module)
            if library == "accelerate":
                add_hook_to_module(part, AccelerateHook())
            else:
                registry = HookRegistry.check_if_exists_or_initialize(part)
                registry.register_hook(DiffusersHook(), "random")

        self.alike(add)
        self.keeps_forwards = True

    @step(1, allowed=lambda twins: not twins.compiled and twins.offload is None)
    def remove_library_hooks(self):
        def remove(model):
            for part in model.modules():
                if "random" in getattr(getattr(part, "_diffusers_hook", None), "hooks", ()):
                    part._diffusers_hook.remove_hook("random", recurse=False)
            remove_hook_from_module(model, recurse=True)

        self.alike(remove)

    # ----------------------------------------------------------------------------------------------
    # Where weights are, and what they are

    @step(
        2,
        lambda rng, twins: {"kind": rng.choice(["sequential", "model"])},
        lambda twins: is_loose(twins),
    )
    def accelerate_offload(self, *, kind):
        def offload(model):
            if kind == "sequential":
                accelerate.cpu_offload(model, execution_device=self.device)
            else:
                accelerate.cpu_offload_with_hook(model, execution_device=self.device)

        self.alike(offload)
        self.offload = "accelerate"
        self.keeps_forwards = True

    @step(1, allowed=lambda twins: twins.offload == "accelerate")
    def accelerate_onload(self):
        def onload(model):
            remove_hook_from_module(model, recurse=True)
            model.to(self.device)

        self.alike(onload)
        self.offload = None

    @step(
        2,
        lambda rng, twins: {
            "offload_type": rng.choice(["leaf_level", "block_level"]),
            "to_disk": rng.random() < 0.25,
            "use_stream": twins.device.type == "cuda" and rng.random() < 0.6,
        },
        lambda twins: is_loose(twins),
    )
    def group_offload(self, *, offload_type, to_disk=False, use_stream=False):
        to_disk = to_disk and not self.changes_weights
        if to_disk and self._folder is None:
            self._folder = tempfile.TemporaryDirectory()

        def offload(model):
            folder = tempfile.mkdtemp(dir=self._folder.name) if to_disk else None
            apply_group_offloading(
                model,
                onload_device=self.device,
                offload_device=torch.device("cpu"),
                offload_type=offload_type,
                num_blocks_per_group=1 if offload_type == "block_level" else None,
                use_stream=use_stream,
                offload_to_disk_path=folder,
            )

        self.alike(offload)
        self.offload = "disk" if to_disk else "group"
        self.keeps_forwards = True

    @step(1, allowed=lambda twins: twins.offload == "group")
    def group_onload(self):
        def onload(model):
            registry = HookRegistry.check_if_exists_or_initialize(model)
            for name in (
                group_offloading_hooks._GROUP_OFFLOADING,
                group_offloading_hooks._LAYER_EXECUTION_TRACKER,
                group_offloading_hooks._LAZY_PREFETCH_GROUP_OFFLOADING,
            ):
                registry.remove_hook(name, recurse=True)
            model.to(self.device)

        self.alike(onload)
        self.offload = None

    @step(1, allowed=lambda twins: is_loose(twins) and not twins.adapters)
    def layerwise_casting(self):
        storage = torch.bfloat16 if self.dtype == torch.float32 else torch.float8_e4m3fn

        def cast(model):
            dtype = torch.float32 if model is self.exact else self.dtype
            model.enable_layerwise_casting(storage_dtype=storage, compute_dtype=dtype)

        self.alike(cast)
        self.layerwise = True
        self.keeps_forwards = True

    @step(
        1,
        lambda rng, twins: {"module": draw_module(rng, twins, "linear", "output", "up")},
        lambda twins: is_loose(twins),
    )
    def quantize(self, *, module):
        """The weight becomes a tensor of torchao's."""
        quantization = importlib.import_module("torchao.quantization")

        def quantize(model):
            linear = model.get_submodule(module)
            linears = [m for m in linear.modules() if type(m) is nn.Linear]
            quantization.quantize_(
                linear,
                quantization.Int8WeightOnlyConfig(),
                filter_fn=lambda m, _: any(m is linear for linear in linears),
            )

        self.alike(quantize)
        self.quantized = True

    @step(
        1,
        lambda rng, twins: {"dtype": rng.choice(["float32", "bfloat16", "float16"])},
        lambda twins: is_loose(twins),
    )
    def to_and_back(self, *, dtype):
        """Of all weights, which are rounded on the way."""

        def cast(model):
            own = torch.float32 if model is self.exact else self.dtype
            model.to(getattr(torch, dtype)).to(own)

        self.alike(cast)

    @step(
        1,
        lambda rng, twins: {"seed": rng.randrange(3)},
        lambda twins: is_loose(twins) and not twins.adapters and not twins.restructured,
    )
    def load_weights(self, *, seed):
        other = self.family.model(self.device, self.dtype, seed=seed, **self.config)
        self.alike(lambda model: model.load_state_dict(other.state_dict()) and None)

    @step(
        1,
        lambda rng, twins: {"keep": rng.random() < 0.8},
        lambda twins: not twins.compiled and twins.offload is None,
    )
    def deepcopy(self, *, keep=True):
        """Goes on with copies. The models copied may be gone then."""
        before = self.models
        self.shares_forwards |= self.keeps_forwards
        self.plain, self.exact, self.mine = self.alike(copy.deepcopy)
        for handles in self.hooks:
            for handle, model in zip(handles, self.models, strict=False):
                handle.hooks_dict_ref = find_hooks(model, handle)
        # What found a forward before, and was copied with it, runs the original's: a bound method holds
        # its module, what stands in for one does not.
        if keep or self.shares_forwards:
            self.kept.append(before)

    # ----------------------------------------------------------------------------------------------
    # Adapters

    @step(
        2,
        lambda rng, twins: {"seed": rng.randrange(100)},
        lambda twins: (
            not twins.compiled
            and not twins.layerwise
            and twins.offload is None
            and not twins.quantized
            and len(twins.adapters) < 2
        ),
    )
    def add_lora(self, *, seed):
        from peft import LoraConfig

        name = f"adapter{seed}"
        if name in self.adapters:
            return

        def add(model):
            torch.manual_seed(seed)
            config = LoraConfig(
                r=2,
                lora_alpha=4,
                init_lora_weights=False,
                target_modules=self.family.lora_targets,
            )
            model.add_adapter(config, adapter_name=name)

        self.alike(add)
        self.adapters.append(name)

    @step(
        2,
        lambda rng, twins: {
            "action": rng.choice(["scale", "disable", "enable", "delete", "fuse", "unfuse"])
        },
        lambda twins: twins.adapters and twins.offload is None and not twins.compiled,
    )
    def change_lora(self, *, action):
        name = self.adapters[-1]
        actions = {
            "scale": lambda model: model.set_adapters(name, weights=0.5),
            "disable": lambda model: model.disable_adapters(),
            "enable": lambda model: model.enable_adapters(),
            "delete": lambda model: model.delete_adapters(name),
            "fuse": lambda model: model.fuse_lora(),
            "unfuse": lambda model: model.unfuse_lora(),
        }
        self.alike(lambda model: actions[action](model) and None)
        if action == "delete":
            self.adapters.pop()

    # ----------------------------------------------------------------------------------------------
    # Caches

    @step(
        1.5,
        lambda rng, twins: {"name": rng.choice(twins.family.caches)},
        lambda twins: not twins.compiled and twins.cache_name is None and bool(twins.family.caches),
    )
    def enable_cache(self, *, name):
        twins = weakref.ref(self)
        config = {
            # One that skips whatever the values are: rounding must not decide.
            "first_block": lambda: FirstBlockCacheConfig(threshold=1e9),
            "pyramid": lambda: PyramidAttentionBroadcastConfig(
                spatial_attention_block_skip_range=2,
                current_timestep_callback=lambda: twins().timestep,
            ),
            "taylorseer": lambda: TaylorSeerCacheConfig(
                cache_interval=2,
                disable_cache_before_step=1,
                taylor_factors_dtype=torch.float32,
                cache_identifiers=[r"transformer_blocks\.\d+\.(attn1?|ff)$"],
            ),
            "mag": lambda: MagCacheConfig(
                threshold=10.0, num_inference_steps=8, mag_ratios=torch.ones(8)
            ),
        }[name]
        self.alike(lambda model: model.enable_cache(config()))
        self.cache_name = name
        self.keeps_forwards = True

    @step(1, allowed=lambda twins: twins.cache_name is not None and not twins.compiled)
    def disable_cache(self):
        self.alike(lambda model: model.disable_cache())
        self.cache_name = None

    # ----------------------------------------------------------------------------------------------
    # torch.compile

    @step(
        0.05,
        lambda rng, twins: {"regional": rng.random() < 0.5},
        lambda twins: (
            is_loose(twins)
            and not (twins.hooks or twins.global_hooks or twins.patches or twins.restructured)
            and twins.cache_name is None
        ),
    )
    def compile(self, *, regional):
        def compile(model):
            if regional:
                model.compile_repeated_blocks(backend="eager")
            else:
                model.compile(backend="eager")

        self.alike(compile)
        self.compiled = True

    # ----------------------------------------------------------------------------------------------
    # Other parts

    @step(6, draw_replacement, lambda twins: not twins.compiled and twins.offload is None)
    def replace(self, *, module, by):
        self.restructured = True
        parent_path, _, name = module.rpartition(".")

        def replace(model):
            old = model.get_submodule(module)
            dtype = torch.float32 if model is self.exact else self.dtype
            new = replacement(old, by, lambda: self._another(module, dtype))
            if new is not old:
                new = new.to(self.device, dtype) if by != "wrap" and by != "foreign" else new
                setattr(model.get_submodule(parent_path), name, new.eval())

        self.alike(replace)

    def _another(self, module, dtype):
        """The same part of a model with other weights."""
        other = self.family.model(self.device, self.dtype, seed=self.seed + 7, **self.config)
        return other.to(dtype).get_submodule(module)

    @step(
        2,
        lambda rng, twins: {
            "module": draw_module(rng, twins, "attention", "cross_attention", "single_attention"),
            "kind": rng.choice(["subclass", "fresh", "function"]),
        },
        lambda twins: not twins.compiled,
    )
    def set_processor(self, *, module, kind):
        base = getattr(importlib.import_module(self.family.module), self.family.processor)

        class Processor(base):
            def __call__(self, *args, **kwargs):
                return changed(super().__call__(*args, **kwargs), "replace")

        class Other:
            """Not one of diffusers'."""

            def __call__(
                self,
                attn,
                hidden_states,
                encoder_hidden_states=None,
                attention_mask=None,
                image_rotary_emb=None,
            ):
                return base()(
                    attn,
                    hidden_states,
                    encoder_hidden_states,
                    attention_mask,
                    image_rotary_emb,
                )

        make = {"subclass": Processor, "fresh": base, "function": Other}[kind]

        def set_processor(model):
            attention = model.get_submodule(module)
            if hasattr(attention, "set_processor"):
                attention.set_processor(make())

        self.alike(set_processor)

    @step(
        2,
        lambda rng, twins: {"module": draw_module(rng, twins)},
        lambda twins: not twins.compiled and twins.offload is None,
    )
    def wrap_forward(self, *, module):
        def wrap(model):
            part = model.get_submodule(module)
            forward = part.forward
            part.forward = lambda *args, **kwargs: changed(forward(*args, **kwargs), "replace")

        self.alike(wrap)
        self.keeps_forwards = True

    @step(
        3,
        lambda rng, twins: {"name": rng.choice(sorted(patchable(twins)))},
        lambda twins: not twins.compiled,
    )
    def patch(self, *, name):
        """What it returns is changed."""
        if name in self.patches or name not in patchable(self):
            return
        if self.keeps_forwards and name.endswith(".forward"):
            return
        owner, attribute = patchable(self)[name]
        original = vars(owner)[attribute]
        self.patches[name] = (owner, attribute, original)

        def patched(*args, **kwargs):
            return changed(original(*args, **kwargs), "replace")

        if name.endswith((".forward", ".__call__")):
            functools.update_wrapper(patched, original)
        setattr(owner, attribute, patched)

    @step(2, allowed=lambda twins: twins.patches)
    def unpatch(self):
        name = next(iter(self.patches))
        if not (self.keeps_forwards and name.endswith(".forward")):
            self._unpatch(name)

    def _unpatch(self, name):
        setattr(*self.patches.pop(name))

    # ----------------------------------------------------------------------------------------------
    # Attention backends

    @step(
        1,
        lambda rng, twins: {"name": rng.choice(["native", "_native_math"])},
        lambda twins: not twins.compiled,
    )
    def set_attention_backend(self, *, name):
        self.alike(lambda model: model.set_attention_backend(name))

    @step(1, allowed=lambda twins: not twins.compiled)
    def reset_attention_backend(self):
        self.alike(lambda model: model.reset_attention_backend())

    @step(1)
    def collect(self):
        gc.collect()

    # ----------------------------------------------------------------------------------------------
    # The end

    def finish(self):
        """Without kernels the injected model is the plain one, to the last attribute."""
        self.eject()
        if self.compiled:
            return
        self.forward(options=next(iter(self.family.options)), seed=0)
        modules = dict(self.mine.named_modules())
        for name, module in self.plain.named_modules():
            mine, plain = attributes(modules[name]), attributes(module)
            if mine != plain:
                raise Difference(f"{name or 'the model'} is left with {sorted(mine ^ plain)}")
        if not self.quantized and self.offload is None:
            state = self.mine.state_dict()
            for name, tensor in self.plain.state_dict().items():
                if not torch.equal(state[name].float().nan_to_num(), tensor.float().nan_to_num()):
                    raise Difference(f"{name} has other values")

    def free(self):
        """The injected model's memory is given back when the plain one's is: without the collector."""
        self.kept.clear()
        self.hooks.clear()
        references = [weakref.ref(next(m.parameters())) for m in (self.plain, self.mine)]
        self.plain = self.mine = None
        plain, mine = (reference() is None for reference in references)
        if plain and not mine:
            raise Difference(
                "the injected model outlives its last reference, the plain one does not"
            )


def attempt(act, model):
    """(what it gives, what it raises) for a model, if there is one.

    An error keeps the frames that it came through: that of this call holds the one model alone.
    """
    try:
        return None if model is None else act(model), None
    except Exception as error:
        return None, error


def attributes(module):
    """Of an instance; a forward that is the class's own counts as none, libraries leave it there."""
    names = set(vars(module))
    if getattr(vars(module).get("forward"), "__func__", None) is type(module).forward:
        names.remove("forward")
    return names


def exact_of(exact):
    return exact.values() if isinstance(exact, dict) else exact


def describe(error):
    if error is None:
        return "no error"
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def find_hooks(model, handle):
    """A reference to the dictionary of a copy in which a hook stands that was added to the original."""
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            if handle.id in hooks:
                return weakref.ref(hooks)
    return lambda: None


def replacement(old, by, another):
    if by == "wrap":
        return Wrap(old)
    if by == "foreign":
        return ForeignBlock(old)
    if by == "another":
        return another()
    if by == "identity":
        return nn.Identity()
    if by == "halved":
        if type(old) is nn.Linear:
            old.__class__ = HalvedLinear
        return old
    if by == "eps":
        if hasattr(old, "eps"):
            old.eps = 0.3
        return old
    width = normalized_width(old)
    if width is None:
        return old
    torch.manual_seed(5)
    if by == "bias":
        new = RMSNorm(width, eps=1e-6, bias=True)
        nn.init.normal_(new.bias)
    else:
        new = nn.LayerNorm(width)
    nn.init.uniform_(new.weight, 0.5, 1.5)
    return new


def normalized_width(norm):
    shape = getattr(norm, "normalized_shape", None) or getattr(norm, "dim", None)
    return tuple(shape)[-1] if shape is not None else None


def outputs(out):
    return {OUTPUT: out}


def run_no_grad(twins, model, arguments):
    with torch.no_grad():
        return outputs(model(**arguments, return_dict=False)[0])


def run_inference_mode(twins, model, arguments):
    with torch.inference_mode():
        return outputs(model(**arguments, return_dict=False)[0])


def run_grad_enabled(twins, model, arguments):
    return outputs(model(**arguments, return_dict=False)[0].detach())


def run_autocast(twins, model, arguments):
    if model is twins.exact:
        return run_no_grad(twins, model, arguments)
    with torch.autocast(twins.device.type, dtype=torch.bfloat16):
        return run_no_grad(twins, model, arguments)


def run_score_skip(twins, model, arguments):
    with AttentionScoreSkipFunctionMode():
        return run_no_grad(twins, model, arguments)


def run_thread(twins, model, arguments):
    result = []

    def target():
        try:
            result.append(run_no_grad(twins, model, arguments))
        except Exception as error:
            result.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    if isinstance(result[0], Exception):
        raise result[0]
    return result[0]


def run_backward(twins, model, arguments):
    # On CUDA the gradients of PyTorch's fused attentions were not finite, or out of bounds, for some
    # lengths, without kernels too.
    with sdpa_kernel(SDPBackend.MATH):
        return gradient_of(twins, model, arguments)


def gradient_of(twins, model, arguments):
    out = model(**arguments, return_dict=False)[0]
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    weights = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=out.dtype)
    loss = (out.flatten() * weights).sum()
    if not loss.requires_grad:
        return outputs(out)
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    # In one, as some may be nothing but rounding errors of large terms that cancel.
    flat = [g.detach().flatten().float() for g in gradients if g is not None]
    return {**outputs(out.detach()), "the gradient": torch.cat(flat)}


def run_jvp(twins, model, arguments):
    names = twins.family.inexact

    def function(*tensors):
        return model(**{**arguments, **dict(zip(names, tensors, strict=True))}, return_dict=False)[
            0
        ]

    primals = tuple(arguments[name] for name in names)
    with sdpa_kernel(SDPBackend.MATH):
        out, tangent = torch.func.jvp(function, primals, tuple(p.flip(0) for p in primals))
    return {**outputs(out.detach()), "the tangent": tangent.detach()}


MODES = {
    "no_grad": run_no_grad,
    "inference_mode": run_inference_mode,
    "grad_enabled": run_grad_enabled,
    "autocast": run_autocast,
    "score_skip": run_score_skip,
    "thread": run_thread,
    "backward": run_backward,
    "jvp": run_jvp,
}


# --------------------------------------------------------------------------------------------------
# Sequences


@dataclass
class Sequence:
    """A model and what is done to it."""

    model: dict
    steps: list
    twins: type = Twins

    def script(self):
        arguments = dict(self.model)
        family = arguments.pop("family")
        keywords = "".join(f", {name}={value!r}" for name, value in arguments.items())
        lines = [
            "import sys",
            'sys.path.insert(0, "tests")',
            "from random_sequences import quiet",
            f"from {self.twins.__module__} import {self.twins.__name__}",
            "",
            "quiet()",
            f"with {self.twins.__name__}({family!r}{keywords}) as twins:",
            *(f"    {step.code()}" for step in self.steps),
        ]
        return "\n".join(lines)


@dataclass
class Result:
    seed: Any
    sequence: Sequence
    steps: int
    forwards: int
    failure: str | None = None
    traceback: str | None = None
    refused: str | None = None
    ratios: list = field(default_factory=list)
    counts: collections.Counter = field(default_factory=collections.Counter)

    @property
    def message(self):
        return f"seed {self.seed}: {self.failure}\n\n{self.sequence.script()}\n"


def random_sequence(family, seed, device="cpu", twins=Twins):
    """Draws a sequence, does it, and returns a Result."""
    rng = random.Random(f"{family}-{seed}")
    sequence = Sequence(twins.draw_model(rng, family, device), [], twins)
    return execute(seed, sequence, lambda twins: twins.draw_steps(rng))


def execute(seed, sequence, steps):
    result = Result(seed, sequence, 0, 0)
    with sequence.twins(**sequence.model) as twins:
        try:
            for one in steps(twins):
                if not sequence.steps or sequence.steps[-1] is not one:
                    sequence.steps.append(one)
                one.apply(twins)
        except Refused as refused:
            result.refused = f"{one.name}: {refused}"
        except Exception as error:
            # Steps raise on both models through `alike`: what comes here is an injection's, or a bug here.
            result.failure = f"{one.name}: {describe(error)}"
            result.traceback = traceback.format_exc()
        result.steps, result.forwards, result.ratios = twins.steps, twins.forwards, twins.ratios
        result.counts = twins.counts
    return result


def repeat(sequence, steps):
    """The result of a sequence's model with the given steps."""
    shorter = Sequence(sequence.model, [], sequence.twins)
    return execute(None, shorter, lambda twins: iter(steps))


def shrink(result):
    """The result of the shortest sequence found that fails alike: steps are left out while it does."""
    kind = result.failure.partition(":")[2].split()[:2]
    best = result
    changed_something = True
    while changed_something:
        changed_something = False
        for i in reversed(range(len(best.sequence.steps))):
            steps = best.sequence.steps[:i] + best.sequence.steps[i + 1 :]
            shorter = repeat(best.sequence, steps)
            if shorter.failure and shorter.failure.partition(":")[2].split()[:2] == kind:
                shorter.seed = result.seed
                best, changed_something = shorter, True
                break
    return best


def kind_of(result):
    """Failures alike: what differs, without numbers, and the steps that matter once others are left out."""
    text = re.sub(r"[0-9][0-9.e+-]*", "#", result.failure)[:70]
    plain = ("inject", "forward", "finish")
    steps = [
        " ".join([step.name, *(v for v in step.arguments.values() if isinstance(v, str))])
        for step in result.sequence.steps
        if step.name not in plain
    ]
    modes = {step.arguments["mode"] for step in result.sequence.steps if "mode" in step.arguments}
    if len(steps) <= 3:
        text += " | " + ", ".join([*steps, *sorted(modes - {"no_grad"})])
    return text


def quiet():
    """No warnings of deprecated or experimental features, one thread, no TF32, nothing old to collect."""
    logging.getLogger().setLevel(logging.ERROR)
    for name in ("diffusers", "accelerate", "peft", "torchao", "h100_diffusers_kernels"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # Of convolutions in TensorFloat-32 two that differ by a bit are as far apart as 16 bits are.
    torch.backends.cudnn.allow_tf32 = False
    load_kernel()
    gc.collect()
    gc.freeze()


def work(family, seed, device, shrinks, twins):
    result = random_sequence(family, seed, device, twins)
    if result.failure and shrinks:
        result = shrink(result)
    if not result.failure:
        result.sequence = None
    return result


def serve(connection):
    """A process that does what it is asked to over a connection."""
    quiet()
    for task in iter(connection.recv, None):
        connection.send(work(*task))


class Worker:
    """A process with one task at a time, which may die of it."""

    def __init__(self, context):
        self.connection, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other,), daemon=True)
        self.process.start()
        other.close()
        self.task = None

    def give(self, task):
        self.task = task
        self.connection.send(task)

    def result(self):
        try:
            return self.connection.recv()
        except EOFError:
            self.process.join()
            family, seed, *_ = self.task
            failure = f"the process died, exit status {self.process.exitcode}"
            return Result(seed, Sequence({"family": family}, []), 0, 0, failure)

    def end(self):
        with contextlib.suppress(BrokenPipeError):
            self.connection.send(None)


def results_of(tasks, processes):
    """(task, result), as they come."""
    if processes == 1:
        quiet()
        yield from ((task, work(*task)) for task in tasks)
        return
    context = multiprocessing.get_context("spawn")
    tasks, workers = iter(tasks), {}

    def start(worker=None):
        task = next(tasks, None)
        if task is None:
            if worker is not None:
                worker.end()
            return
        if worker is None or not worker.process.is_alive():
            worker = Worker(context)
        worker.give(task)
        workers[worker.connection] = worker

    for _ in range(processes):
        start()
    while workers:
        for connection in multiprocessing.connection.wait(list(workers)):
            worker = workers.pop(connection)
            yield worker.task, worker.result()
            start(worker)


def main(argv=None, twins=Twins, description=__doc__):
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--family", default="all", choices=["all", *twins.families])
    parser.add_argument("--seed", type=int, help="one sequence, with its script")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sequences", type=int, default=100)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--shrink", action="store_true", help="leave out steps that do not matter")
    parser.add_argument("--seconds", type=float, help="begin no sequence after that time")
    parser.add_argument("--verbose", action="store_true", help="also what the plain model refused")
    options = parser.parse_args(argv)

    families = list(twins.families) if options.family == "all" else [options.family]
    seeds = range(options.first_seed, options.first_seed + options.sequences)
    if options.seed is not None:
        seeds = [options.seed]
    tasks = (
        (family, s, options.device, options.shrink, twins) for s in seeds for family in families
    )
    began = time.monotonic()
    if options.seconds is not None:
        tasks = itertools.takewhile(lambda _: time.monotonic() - began <= options.seconds, tasks)
    totals, counts, kinds = (
        collections.Counter(),
        collections.Counter(),
        collections.defaultdict(list),
    )
    ratios = collections.defaultdict(list)
    for (family, *_), result in results_of(tasks, options.processes):
        totals.update(sequences=1, steps=result.steps, forwards=result.forwards)
        totals["refused"] += result.refused is not None
        counts.update(result.counts)
        for what, ratio in result.ratios:
            ratios[family, what].append(ratio)
        if result.failure:
            totals["failures"] += 1
            print(f"--- {family} {result.message}", flush=True)
            if options.seed is not None:
                print(result.traceback)
            kinds[family, kind_of(result)].append(result.seed)
        if result.refused and options.verbose:
            print(f"{family} {result.seed} refused: {result.refused}")
    for (family, failure), failed in sorted(kinds.items(), key=lambda item: -len(item[1])):
        print(f"{len(failed):5} {family}: {failure} (seeds {failed[:6]})")
    for (family, what), values in ratios.items():
        mean = statistics.geometric_mean(values)
        print(
            f"{family}: in 16 bits {what}'s error is {mean:.3f} of the plain model's ({len(values)})"
        )
        totals["failures"] += len(values) >= FORWARDS_OF_MEAN and mean > MEAN_ROUNDED_LIMIT
    for what, count in counts.most_common():
        print(f"{count:7} {what}")
    seconds = time.monotonic() - began
    print(
        f"{totals['sequences']} sequences, {totals['steps']} steps, {totals['forwards']} forwards, "
        f"{totals['refused']} ended by the plain model's own error, {totals['failures']} failures "
        f"in {seconds:.0f} s"
    )
    return 1 if totals["failures"] else 0


if __name__ == "__main__":
    import random_sequences  # by the name that scripts and other processes know its classes by

    sys.exit(random_sequences.main())
