"""Random sequences of user actions on a model, until the first difference between two models.

Each action is applied to a tested model and to a plain one with the same weights. Their results are compared
after each forward. If the plain model raises, the tested one must raise the same. There are two kinds:

- The tested model is injected at random times, the plain one never. Results differ only by rounding.
- With `--graphs`, both are injected, and the tested one runs on CUDA graphs (emulated on a CPU). Results are
  bitwise equal.

With `--fp8`, models are 16-bit, and actions quantize their linear layers to FP8. With `--lora`, adapters are
there from the beginning, on all linear layers of the blocks, and change between the steps; half of the
sequences compute 16-bit ones by the package's products on a CPU, too. Both kinds have these.

A seed determines a sequence::

    python tests/random_sequences.py --family ltx --first-seed 123 --sequences 1
    python tests/random_sequences.py --family ltx --fp8
    python tests/random_sequences.py --graphs --device cuda --sequences 5000 --processes 14

A failure is printed as code that repeats it. The exit status is then 1.
"""

import collections
import contextlib
import copy
import functools
import gc
import importlib
import inspect
import logging
import multiprocessing
import random
import re
import tempfile
import traceback
import warnings
import weakref
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import accelerate
import click
import torch
import torch.nn.functional as F
from accelerate.hooks import add_hook_to_module, remove_hook_from_module
from diffusers.hooks import HookRegistry, ModelHook, group_offloading
from diffusers.models import attention_dispatch
from diffusers.models.activations import GELU
from diffusers.models.normalization import RMSNorm
from diffusers.models.resnet import ResnetBlock2D
from torch import nn
from torch.nn.modules import module as global_hooks
from torch.utils import _pytree

import adapters
import changes
import conftest
import fp8_models
from changes import WAYS, change_values, changing, is_floating
from checks import have_same_bits, relative_distance
from families import FAMILIES, KERNEL_HEADS, TINY_HEADS
from families_in_part import Families
from family_trained_ltx import TRAINED_LTX
from graphs import EmulatedGraph, module_of, use_emulated_graphs
from random_inputs import FORMS, QUIET_FORMS
from random_modes import GRAPH_MODES, MODES, QUIET_MODES, Call, Interrupt

IN_FULL = {**FAMILIES, TRAINED_LTX.name: TRAINED_LTX}
MODELS = collections.ChainMap(IN_FULL, Families())

# float32: the same arithmetic in another order. The limit is some hundred times the difference that this
# causes, and a hundredth of what one wrong token causes.
#
# 16 bits: the distances of both from a float32 model, to which each action is also applied. Their ratio was
# 0.61 to 1.51 (outputs of 400 correct forwards of FLUX.1) and 0.46 to 1.98 (160 gradients). A quarter of the
# dtype's epsilon covers small errors of the plain model. One wrong block is 10 to 100 times the error.
#
# FP8: as 16 bits; the float32 model quantizes no inputs. The ratio was 0.61 to 1.49 (1900 outputs), 0.64 to
# 1.41 (90 gradients), and 0.42 to 2.65 (outputs of 12 to 68 elements). Another call's rows in one layer are 2
# to 12 times the limit, scales that are 1.5 times too large 1 to 5 times, a left-out adapter 9 to 23 times.
FLOAT32_LIMIT = 1e-4
FLOAT32_GRADIENT_LIMIT = 1e-3
ROUNDED_LIMIT = 1.75
ROUNDED_GRADIENT_LIMIT = 2.5
UNKNOWN_ROUNDING_LIMIT = 4
FEW_ELEMENTS, FP8_LIMIT_OF_FEW = 64, 3.5

MOST_KEPT_OUTPUTS = 4
CONTROL_ARGUMENTS = ("controlnet_block_samples", "block_controlnet_hidden_states")


class Difference(AssertionError):
    """The tested model differs from the plain one."""


class Refused(Exception):
    """The action raised the same on both models."""


class Boom(Exception):
    """Raised by a hook in the middle of a forward."""


ERRORS = {
    "KeyboardInterrupt": KeyboardInterrupt,
    "Boom": Boom,
    "OutOfMemoryError": torch.OutOfMemoryError,
}


def describe(error):
    if error is None:
        return "no error"
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def attempt(act, model):
    """(result, error) of a call with a model.

    This is a separate function, because an error keeps its frames, and these must hold only one model.
    """
    try:
        return act(model), None
    except Exception as error:
        return None, error


# --------------------------------------------------------------------------------------------------
# Comparison


def compare_rounded(what, tested, plain, float32, eps, is_gradient, is_fp8=False):
    """Compare two results that differ by rounding, with the float32 model's if there is one."""
    if tested.dtype != plain.dtype or tested.shape != plain.shape:
        raise Difference(
            f"{what} is {tested.dtype} {tuple(tested.shape)}, the plain model's "
            f"{plain.dtype} {tuple(plain.shape)}"
        )
    if not plain.isfinite().all():
        if float32 is None and not torch.equal(tested.isfinite(), plain.isfinite()):
            raise Difference(f"{what} and the plain model's are finite at different places")
        return
    if not tested.isfinite().all():
        raise Difference(f"{what} is not finite, the plain model's is")
    if float32 is None:
        error = relative_distance(tested, plain)
        # 16 bits without a float32 model, which could not repeat the plain model's action.
        limit = FLOAT32_GRADIENT_LIMIT if is_gradient else FLOAT32_LIMIT
        if error > max(limit, UNKNOWN_ROUNDING_LIMIT * eps):
            raise Difference(f"{what} is {error:.3g} of its norm from the plain model's")
        return
    error, allowed = relative_distance(tested, float32), relative_distance(plain, float32)
    limit = ROUNDED_GRADIENT_LIMIT if is_gradient else ROUNDED_LIMIT
    if is_fp8 and plain.numel() < FEW_ELEMENTS:
        limit = FP8_LIMIT_OF_FEW
    if error > limit * allowed + eps / 4:
        raise Difference(
            f"{what} is {error:.3g} of its norm from the float32 model's, the plain one {allowed:.3g}"
        )


def properties(tensor):
    """A tensor's visible properties except its values."""
    return {
        "type": type(tensor).__name__,
        "dtype": tensor.dtype,
        "device": tensor.device,
        "shape": tuple(tensor.shape),
        "strides": tensor.stride(),
        "requires_grad": tensor.requires_grad,
        "is_inference": tensor.is_inference(),
    }


def compare_bits(what, tested, plain, slack=0):
    """Compare two trees of results that must be equal in everything."""
    tested, tested_spec = _pytree.tree_flatten(tested)
    plain, plain_spec = _pytree.tree_flatten(plain)
    if tested_spec != plain_spec:
        raise Difference(f"{what} is {tested_spec}, not {plain_spec}")
    for a, b in zip(tested, plain, strict=True):
        if not isinstance(b, torch.Tensor):
            if type(a) is not type(b) or a != b:
                raise Difference(f"{what} has {a!r}, not {b!r}")
            continue
        of_a, of_b = properties(a), properties(b)
        for name, value in of_b.items():
            if of_a[name] != value:
                raise Difference(f"{what} has {name} {of_a[name]}, not {value}")
        if not b.is_meta and not have_same_bits(a, b):
            error = relative_distance(a, b)
            if not error <= slack:
                raise Difference(f"{what} has other bits: {error:.2g} of its norm")


# --------------------------------------------------------------------------------------------------
# Actions: methods of Twins, and the steps that call them


class Action(NamedTuple):
    weights: tuple  # weights without and with graphs
    allowed: Any  # twins -> whether the action makes sense now
    arguments: dict  # for each keyword, a list of values or a function of (rng, twins)

    def draw(self, rng, twins):
        return {
            name: rng.choice(values) if isinstance(values, list) else values(rng, twins)
            for name, values in self.arguments.items()
        }


ACTIONS: dict[str, Action] = {}


def is_resident(twins):
    return not twins.offloading


def has_original_weights(twins):
    """Whether weights still have the model's original device and dtype."""
    return is_resident(twins) and not (twins.layerwise or twins.quantized)


def can_differentiate_forwards(twins):
    """Torch crashes on changing weights and on `data` inside function transforms."""
    return twins.dtype == torch.float32 and has_original_weights(twins) and not twins.uses_data


def is_for_adapters(twins):
    return has_original_weights(twins) or (twins.lora and is_resident(twins))


def can_load_weights(twins):
    """torchao's tensors take no values of a state dict."""
    return has_original_weights(twins) and not (twins.adapters or twins.restructured or twins.fp8)


def action(weight, with_graphs, allowed=lambda twins: True, **arguments):
    """Register a method of Twins. A call does nothing if the action is not allowed.

    Actions that prevent captures have lower weights with graphs, and those that end them higher ones. See
    Action for the rest.
    """

    def register(method):
        @functools.wraps(method)
        def guarded(self, **given):
            if allowed(self) and self.has(given.get("module", "")):
                self.steps += 1
                return method(self, **given)

        ACTIONS[method.__name__] = Action((weight, with_graphs), allowed, arguments)
        return guarded

    return register


@dataclass(frozen=True)
class Step:
    """A call of a method of Twins."""

    name: str
    arguments: dict = field(default_factory=dict)

    def apply(self, twins):
        getattr(twins, self.name)(**self.arguments)

    def code(self):
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        return f"twins.{self.name}({arguments})"


# --------------------------------------------------------------------------------------------------
# Arguments of actions


def part(*kinds):
    """Draws the path of one of the family's parts, or "" for the model."""

    def draw(rng, twins):
        parts = twins.family.parts.items()
        paths = [path for kind, path in parts if not kinds or kind.startswith(kinds)]
        return rng.choice([path for path in paths if twins.has(path)] or [""])

    return draw


def number(limit):
    return lambda rng, twins: rng.randrange(limit)


def chance(probability):
    return lambda rng, twins: rng.random() < probability


def draw_forward(rng, twins):
    options = list(twins.family.options)
    has_one_shape = twins.cache_name is not None
    if not twins.graphs:
        modes = ["no_grad"] * 8 + ["inference_mode"] * 3 + ["grad", "score_skip"]
        if twins.cache_name is None:
            modes += ["backward"] * (2 if twins.offloading is None else 0)
            modes += ["autocast", "thread"]
            modes += ["jvp"] if can_differentiate_forwards(twins) else []
        options = options[0] if has_one_shape else rng.choice(options)
        return {"mode": rng.choice(modes), "options": options, "seed": rng.randrange(1000)}
    # With graphs mostly the sequence's usual call, so that calls repeat.
    call = {**draw_usual_call(rng, twins), "times": rng.randint(1, 4)}
    if not has_one_shape and rng.random() < 0.5:
        other = {
            "options": options,
            "mode": rng.choices(list(GRAPH_MODES), list(GRAPH_MODES.values())),
            "form": list(FORMS),
            "seed": range(1000),
            "scale": [0.5, 0.7, 1.0],
            "samples": [1, 2],
        }
        name = rng.choices(list(other), [2, 2, 2, 1, 1, 1])[0]
        call[name] = rng.choice(other[name])
    if twins.injected is not None and rng.random() < 0.15:
        call["interrupt"] = (rng.choice(sorted(ERRORS)), rng.randrange(60))
    return call


def draw_usual_call(rng, twins):
    if twins.usual_call is None:
        twins.usual_call = {
            "options": rng.choice(list(twins.family.options)),
            "mode": rng.choice(QUIET_MODES if rng.random() < 0.4 else QUIET_MODES[:2]),
            "form": rng.choice(QUIET_FORMS) if rng.random() < 0.4 else "as they are",
            "seed": rng.randrange(1000),
        }
    return twins.usual_call


def make_hook(twins, kind, way):
    change = functools.partial(change_values, way=way, keeps_rotations=twins.family.keeps_rotations)

    def change_result(module, args, output):
        return change(output)

    def boom(module, *args):
        raise Boom

    def change_arguments(module, args):
        return change(args) if args and is_floating(args[0]) else None

    def change_keyword(module, args, kwargs):
        names = [name for name, item in kwargs.items() if is_floating(item)]
        if names:
            name = names[0 if kind == "keyword" else -1]
            return args, {**kwargs, name: change(kwargs[name])}

    def change_parameter(module, args):
        name, parameter = next(module.named_parameters(), (None, None))
        if parameter is None:  # a norm without a weight
            return
        owner, _, attribute = name.rpartition(".")
        is_fp8 = hasattr(parameter, "qdata")
        if way == "replace":
            if is_fp8:
                new = fp8_models.changed(parameter, scale=-parameter.scale)
            else:
                new = nn.Parameter(parameter.detach() * -1)
            setattr(module.get_submodule(owner), attribute, new)
        else:
            (parameter.scale if is_fp8 else parameter.data).mul_(-1)

    hooks = {"post": change_result, "pre": change_arguments, "parameter": change_parameter}
    hook = boom if way == "raise" else hooks.get(kind, change_keyword)

    def counted(*args):
        twins.seen["a hook"] += 1
        return hook(*args)

    return counted


LIBRARY_HOOKS = {
    library: type(
        "ChangingHook",
        (cls,),
        {"post_forward": lambda self, module, output: change_values(output)},
    )
    for library, cls in (("accelerate", accelerate.hooks.ModelHook), ("diffusers", ModelHook))
}

MAY_BE_REPLACED = {
    ("block", "next_block", "single_block", "last_block"): ["foreign", "another", "wrap"],
    ("norm", "norm2", "inner_norm", "qk_norm", "added_norm"): [*changes.OTHER_NORMS, "wrap"],
    ("linear", "output", "up"): ["halved", "wrap", "another"],
    ("attention", "cross_attention", "single_attention", "single_norm"): ["another", "wrap"],
    ("feed_forward", "feed_forward_of_text", "activation"): ["another", "wrap"],
    ("gelu", "rope", "modulation"): ["wrap"],
}
REPLACEMENTS = {part: ways for parts, ways in MAY_BE_REPLACED.items() for part in parts}


def is_adaptive_norm(module):
    """A modulated norm, which returns more than a norm."""
    return any(name in type(module).__name__ for name in ("AdaLayerNorm", "NormZero"))


def draw_replacement(rng, twins):
    kinds = [kind for kind in REPLACEMENTS if twins.has(twins.family.parts.get(kind, "?"))]
    path = twins.family.parts[kind := rng.choice(kinds)]
    is_adaptive = is_adaptive_norm(twins.plain.get_submodule(path))
    choices = ["wrap", "another"] if is_adaptive else REPLACEMENTS[kind]
    return {"module": path, "kind": rng.choice(choices)}


def patchable(twins):
    """Functions that a user may patch, by name: (owner, attribute)."""
    module = importlib.import_module(twins.family.module)
    known = (
        *(GELU, RMSNorm, nn.RMSNorm, nn.LayerNorm, nn.GroupNorm, nn.GELU, nn.SiLU, nn.Dropout),
        *(nn.Linear, nn.Conv2d, ResnetBlock2D),
    )
    classes = {
        type(m)
        for m in twins.plain.modules()
        if type(m).__module__ == twins.family.module or type(m) in known or is_adaptive_norm(m)
    }
    processor = changes.processor_class(twins.family)
    functions = (
        *("rms_norm", "layer_norm", "group_norm", "scaled_dot_product_attention"),
        *("gelu", "silu", "linear", "conv2d"),
    )
    methods = ("forward", "gelu", "_prepare_video_coords")
    return {
        **{
            f"{c.__name__}.{name}": (c, name)
            for c in classes
            for name in methods
            if name in vars(c)
        },
        f"{processor.__name__}.__call__": (processor, "__call__"),
        **{name: (module, name) for name in twins.family.functions},
        **{f"F.{name}": (F, name) for name in functions},
    }


# --------------------------------------------------------------------------------------------------
# Graphs that can be counted and interrupted


class Watch:
    """Counts the graphs of a class that are alive, and the calls that reach a forward with graphs."""

    def __init__(self, graphs):
        captured = self.captured = weakref.WeakSet()
        self.interrupt = None
        self.calls = collections.Counter()  # since the last check, by the report's counts
        self.reports = {}
        self.checked = collections.defaultdict(collections.Counter)
        watch = self

        class WatchedGraph(graphs):
            def capture(self, run):
                interrupt, watch.interrupt = watch.interrupt, None
                with contextlib.nullcontext() if interrupt is None else Interrupt(*interrupt):
                    result = super().capture(run)
                captured.add(self)
                return result

            def reset(self):
                super().reset()
                captured.discard(self)

        self.graphs = WatchedGraph

    def counting(self, call):
        """`GraphedStandIn.call`, counted."""

        def counted(graphed, *args, **kwargs):
            is_counted = not (torch.compiler.is_compiling() or graphed.injection.is_over)
            try:
                return call(graphed, *args, **kwargs)
            except KeyboardInterrupt:
                is_counted = False
                raise
            finally:
                if is_counted:
                    report = graphed.injection.report.graph_calls
                    self.reports[id(report)] = report
                    self.calls[id(report)] += 1

        return counted

    def check(self):
        """Compare the report's counts with the calls. Returns the counts since the last check."""
        total = collections.Counter()
        for key, report in self.reports.items():
            now = collections.Counter(captured=report.captured, replayed=report.replayed)
            for reason, count in report.uncaptured.items():
                now[general(reason)] += count
            counts = now - self.checked[key]
            if counts.total() != self.calls[key]:
                raise Difference(f"{self.calls[key]} calls, of which {counts.total()} are counted")
            total.update(counts)
            self.checked[key] = now  # copies may call their originals
        self.calls.clear()
        return total


def general(reason):
    """A reason without names."""
    reason = re.sub(r"^\S+(?= (has hooks|runs code of))", "a part", reason)
    return re.sub(r" of diffusers: .*| by \w+$", " of diffusers", reason)


# --------------------------------------------------------------------------------------------------
# The models


class Twins:
    """A tested model, a plain one and, if they are 16-bit, a float32 one.

    Args:
        family: the family's name.
        graphs: whether CUDA graphs are tested instead of the kernels.
        fp8: whether actions quantize linear layers to FP8. Layers that do not run on the kernels compute as
            torchao does, by PyTorch on any device, and the float32 model has the same weights in float32.
        lora: "default" for sequences of adapters, or "products" if 16-bit ones run on the package's products
            for any number of rows and on any device; "" otherwise.
        dtype: "float32", "bfloat16" or "float16".
        seed: the weights' seed.
        config: the model's configuration.

    Raises:
        Difference: by an action, if the tested model differs from the plain one.
        Refused: by an action that raised the same on both.
    """

    def __init__(
        self,
        family,
        *,
        graphs=False,
        fp8=False,
        lora="",
        dtype="float32",
        device="cpu",
        seed=0,
        **config,
    ):
        self._exit = contextlib.ExitStack()
        if gc.isenabled():
            # No collection moves the sequence's objects, so all are in the youngest generation.
            gc.disable()
            self._exit.callback(gc.enable)
        self.kernel = conftest.load_kernel()
        self.family = MODELS[family]
        self.graphs = graphs
        self.fp8 = fp8
        self.lora = lora
        self.device = torch.device(device)
        self.dtype = getattr(torch, dtype)
        is_rounded = self.dtype != torch.float32
        self.config = {**(KERNEL_HEADS if is_rounded else TINY_HEADS), **config}
        self.seed = seed
        self.models = {"plain": self._model(seed)}
        if is_rounded and not graphs:
            self.models["float32"] = copy.deepcopy(self.plain).float()
        self.models["tested"] = copy.deepcopy(self.plain)
        # With emulated graphs convolutions have other memory, and then sum in another order.
        is_exact = family in IN_FULL or self.device.type == "cuda"
        self.slack = 0 if is_exact else 100 * torch.finfo(self.dtype).eps
        self.injected = None  # the options of the injection
        self.offloading = self.cache_name = self.usual_call = None
        self.seen = collections.Counter()  # the hooks' observations of the current call
        self.layerwise = self.quantized = self.restructured = False
        self.uses_data = self.changes_weights = False
        # A library or a wrapper keeps the forward that it found: in a plain model that is the class's
        # function of that time, which a later patch of the class does not change.
        self.keeps_forwards = False
        self.shares_forwards = False  # a copy runs forwards of the original, kept in closures
        self.adapters, self.hooks, self.global_hooks, self.patches = [], [], [], {}
        self.copied = []  # models that were copied
        self.outputs = []  # of earlier calls with graphs, and their values
        self.timestep = 900
        self.steps = self.forwards = 0
        self.counts = collections.Counter()

    def _model(self, seed):
        return self.family.model(self.device, self.dtype, seed=seed, **self.config)

    def _dtype_of(self, model):
        return torch.float32 if model is self.models.get("float32") else self.dtype

    @property
    def plain(self):
        return self.models["plain"]

    @property
    def tested(self):
        return self.models["tested"]

    @property
    def first_options(self):
        return next(iter(self.family.options))

    @staticmethod
    def draw_model(rng, family, device, graphs, fp8, lora):
        """The arguments of a Twins."""
        dtype = rng.choices(["float32", "bfloat16", "float16"], [0 if fp8 else 6, 3, 1])[0]
        model = {"family": family, "dtype": dtype, "device": device, "seed": rng.randrange(3)}
        if fp8:
            model["fp8"] = True
        if lora:
            model["lora"] = rng.choice(["default", "products"])
        if graphs:
            model.update(graphs=True, **(MODELS[family].one_block if rng.random() < 0.6 else {}))
        elif rng.random() < 0.3:
            model["blocks"] = 3
        if family == "ltx" and rng.random() < 0.25:
            model["norm_elementwise_affine"] = True
        return model

    def draw_steps(self, rng):
        """The steps of a sequence. Each is drawn when the steps before it are done."""
        count = rng.randint(4, 9) if self.graphs else rng.randint(6, 14)
        # Injection comes early, so that most actions run on an injected model.
        first = 0 if self.graphs else rng.randrange(4)
        if self.fp8 and rng.random() < 0.8:
            yield Step("quantize_fp8", {**ACTIONS["quantize_fp8"].draw(rng, self), "module": ""})
        for _ in range(rng.randint(1, 2) if self.lora else 0):
            arguments = {"rank": rng.choice([1, 4, 8, 24]), "everywhere": rng.random() < 0.7}
            yield Step("add_lora", {"seed": rng.randrange(100), **arguments})
        for i in range(count):
            yield self._draw_step(rng, "inject" if i == first else None)
            if self.lora and ACTIONS["change_lora"].allowed(self) and rng.random() < 0.5:
                yield self._draw_step(rng, "change_lora")
            if self.graphs and i == first:  # a graph, which later steps may make stale
                yield Step("forward", {**draw_usual_call(rng, self), "times": 3})
            elif rng.random() < (0.7 if self.graphs else 0.5):
                yield self._draw_step(rng, "forward")
        yield Step("free" if rng.random() < 0.25 else "finish")

    def _draw_step(self, rng, name=None):
        if name is None:
            actions = {name: one for name, one in ACTIONS.items() if one.allowed(self)}
            weights = {name: one.weights[self.graphs] for name, one in actions.items()}
            if self.injected is not None:
                weights["inject"] = 0.5
            name = rng.choices(list(weights), list(weights.values()))[0]
        draw = {"forward": draw_forward, "replace": draw_replacement}.get(name, ACTIONS[name].draw)
        return Step(name, draw(rng, self))

    # Global state is restored in any case

    def __enter__(self):
        restore = self._exit.callback
        registry = attention_dispatch._AttentionBackendRegistry
        restore(setattr, registry, "_active_backend", registry._active_backend)
        if self.fp8:
            self._exit.enter_context(fp8_models.eager_products())
        if self.lora == "products":
            rows = module_of(self.kernel, "parts.lora").MIN_ROWS
            restore(rows.update, dict(rows))
            rows.update(cpu=1, cuda=1)
        if self.graphs:
            package = module_of(self.kernel, "graphs.cuda_graphs")
            use_emulated_graphs(self.kernel, Interrupt)
            restore(setattr, package, "GRAPHS", package.GRAPHS)
            restore(setattr, package.GraphedStandIn, "call", package.GraphedStandIn.call)
            self.watch = Watch(package.GRAPHS.get(self.device.type, EmulatedGraph))
            package.GRAPHS = {**package.GRAPHS, self.device.type: self.watch.graphs}
            package.GraphedStandIn.call = self.watch.counting(package.GraphedStandIn.call)
        return self

    def __exit__(self, *_):
        for name in list(self.patches):
            self._unpatch(name)
        for handle in self.global_hooks:
            handle.remove()
        for kept in (self.models, self.copied, self.outputs):
            kept.clear()
        gc.collect(0)
        self._exit.close()

    def has(self, path):
        """Whether there is a module at a path. An earlier action may have moved it."""
        try:
            self.plain.get_submodule(path)
        except AttributeError:
            return False
        return True

    def apply(self, act):
        """Call `act` with each model and return the results by the models' names."""
        outcomes = {name: attempt(act, model) for name, model in self.models.items()}
        errors = {name: error for name, (_, error) in outcomes.items()}
        tested, plain = errors["tested"], errors["plain"]
        of = describe if self.graphs else type
        if of(tested) != of(plain):
            message = f"{describe(tested)}; the plain model: {describe(plain)}"
            raise Difference(message) from tested or plain
        if plain is not None:
            raise Refused(describe(plain)) from plain
        if errors.get("float32") is not None:
            if self.fp8:  # only that model tells how far quantization moves a result
                raise Refused(describe(errors["float32"])) from errors["float32"]
            del self.models["float32"], outcomes["float32"]
        return {name: result for name, (result, _) in outcomes.items()}

    def apply_to_part(self, module, act):
        return self.apply(lambda model: act(model.get_submodule(module)))

    @property
    def _injectable(self):
        return [self.plain, self.tested] if self.graphs else [self.tested]

    @action(
        *(8, 15),
        attention=chance(0.85),
        limit=[1, 2, 3, 4],
        graphs=lambda rng, twins: twins.graphs and rng.random() < 0.95,
    )
    def inject(self, *, attention=True, limit=8, graphs=False):
        """Inject. A second injection with the same options changes nothing."""
        attention, limit, graphs = self.injected or (attention, limit, graphs)
        for model in self._injectable:
            options = {"cuda_graphs": True, "max_cuda_graphs": limit}
            options = options if graphs and model is self.tested else {}
            report = self.kernel.inject_kernels(model, attention=attention, **options)
            if report.already_injected != (self.injected is not None):
                raise Difference(f"already_injected is {report.already_injected}")
        self.injected = attention, limit, graphs

    @action(3, 2)
    def eject(self):
        for model in self._injectable:
            self.kernel.eject_kernels(model)
        self.injected = None
        if self.graphs:
            self.counts.update(self.watch.check())
            if not self.copied:
                if self.watch.captured:
                    gc.collect(0)
                if self.watch.captured:
                    raise Difference(f"{len(self.watch.captured)} graphs are alive")

    # ----------------------------------------------------------------------------------------------
    # Forwards

    @action(14, 8)
    def forward(
        self,
        *,
        options=None,
        seed=0,
        mode="no_grad",
        form="as they are",
        times=1,
        scale=None,
        samples=0,
        interrupt=None,
    ):
        """Calls with new values in the same tensors.

        Args:
            options: the name of the inputs' options, by default the family's first.
            form: the form of the arguments.
            scale: the adapters' scale, as an argument of the call.
            samples: the number of a control network's tensors.
            interrupt: an error, and the operation of a capture that raises it.
        """
        if mode == "jvp" and not can_differentiate_forwards(self):
            return
        if mode == "other weights" and self.offloading == "disk":
            mode = "no_grad"  # weights on a disk have no values
        calls = {}
        try:
            for name, model in self.models.items():
                args, kwargs = self._arguments(options, seed, form, scale, samples)
                if name == "float32":
                    kwargs = self.family.cast(kwargs, torch.float32)
                calls[id(model)] = Call(model, args, kwargs, "cond" if self.cache_name else None)
        except Exception as error:  # the form does not apply to these arguments
            self.counts[f"form: {form}: {describe(error)}"] += 1
            return
        for _ in range(times):
            self.timestep = 100 + (self.timestep - 107) % 700
            self._call(calls, mode, interrupt)
            for call in calls.values() if times > 1 else ():
                change_inputs(call, form)

    def _arguments(self, options=None, seed=0, form="as they are", scale=None, samples=0):
        options = self.family.options[options or self.first_options]
        arguments = self.family.inputs(self.device, self.dtype, seed=seed, **options)
        args, kwargs = FORMS[form](arguments)
        kwargs.setdefault("return_dict", False)

        def find(is_wanted):
            names = inspect.signature(type(self.plain).forward).parameters
            return next(filter(is_wanted, names), None)

        if scale is not None and (name := find(lambda n: n.endswith("attention_kwargs"))):
            kwargs[name] = {"scale": scale}
        if samples and (name := find(lambda n: n.startswith(CONTROL_ARGUMENTS))):
            width = self.config["heads"] * self.config["head_dim"]
            one = torch.linspace(-1, 1, width, device=self.device, dtype=self.dtype)
            kwargs[name] = [one * (i + 1) for i in range(samples)]
        return args, kwargs

    def _call(self, calls, mode, interrupt):
        seen, random_states = {}, {}

        def run_once(model):
            torch.manual_seed(7)
            self.seen = collections.Counter()
            return MODES[mode](self, calls[id(model)])

        def run(model):
            is_tested = model is self.tested
            if is_tested and interrupt is not None:
                self.watch.interrupt = ERRORS[interrupt[0]], interrupt[1]
            try:
                return run_once(model)
            except KeyboardInterrupt:
                self.counts["interrupted captures"] += 1
                return run_once(model)
            finally:
                if self.graphs:
                    self.watch.interrupt = None
                if is_tested or model is self.plain:  # the float32 model may raise alone
                    seen[is_tested], random_states[is_tested] = self.seen, torch.get_rng_state()

        self.forwards += 1
        is_gradient = mode in ("backward", "jvp")
        results = None
        try:
            results = self.apply(run)
        except Refused:
            self.counts["calls that raise"] += 1
            if not self.graphs:
                return
        except Difference as difference:
            # In-place changes and inference tensors may break one of two equivalent autograd graphs. Then
            # hooks and caches have observed different parts of the two, and the sequence ends.
            is_broken = (is_gradient or mode == "grad") and "no error" in str(difference)
            if is_broken and not self.graphs:
                raise Refused(str(difference)) from None
            raise
        if seen[False] != seen[True]:
            missing, more = seen[False] - seen[True], seen[True] - seen[False]
            raise Difference(f"hooks miss {dict(missing)}, and additionally see {dict(more)}")
        if not torch.equal(random_states[False], random_states[True]):
            raise Difference("the next random numbers differ")
        if self.graphs:
            tested, plain = calls[id(self.tested)], calls[id(self.plain)]
            compare_bits("an argument", tested[1:3], plain[1:3])
        if results is not None:
            self._compare(results, is_gradient)
        self._check_outputs()
        if self.graphs and results is not None:
            for leaf in _pytree.tree_leaves(results["tested"]):
                # A tensor with a gradient would keep parameters alive.
                if isinstance(leaf, torch.Tensor) and not (leaf.is_meta or leaf.requires_grad):
                    self.outputs.append((leaf, leaf.detach().clone()))
            del self.outputs[:-MOST_KEPT_OUTPUTS]

    def _compare(self, results, is_gradient):
        if self.graphs:
            compare_bits("the output", results["tested"], results["plain"], self.slack)
            return
        leaves = {
            name: [leaf for leaf in _pytree.tree_leaves(result) if leaf is not None]
            for name, result in results.items()
        }
        float32 = leaves.get("float32", [None] * len(leaves["plain"]))
        for i, tensors in enumerate(zip(leaves["tested"], leaves["plain"], float32, strict=True)):
            what = "the output" if i == 0 else "the derivative"
            if self.has_equal_bits:
                tested, plain = (tensor.nan_to_num() for tensor in tensors[:2])
                if not torch.equal(tested, plain):
                    error = relative_distance(tested, plain)
                    raise Difference(f"{what} has other bits, without kernels ({error:.2g})")
                continue
            eps = torch.finfo(self.dtype).eps
            compare_rounded(what, *tensors, eps, is_gradient, self.fp8)

    @property
    def has_equal_bits(self):
        """Whether the models run the same code on the same values. Caches keep results of kernels."""
        is_another = self.cache_name or self.shares_forwards
        return not (self.injected or is_another or self.device.type != "cpu")

    def _check_outputs(self):
        for output, values in self.outputs:
            if not have_same_bits(output, values):
                raise Difference("an output of an earlier call has changed")

    # ----------------------------------------------------------------------------------------------
    # Hooks

    @action(
        *(6, 2.5, lambda twins: len(twins.hooks) < 4),
        module=part(),
        kind=["post", "post", "post", "pre", "keyword", "last keyword", "parameter"],
        way=list(WAYS),
    )
    def hook(self, *, module, kind, way):
        if kind == "parameter":
            if self.offloading == "disk":
                return  # memory without values
            self.changes_weights = True
        self.uses_data |= kind == "parameter" or way in ("data", "detached")
        hook = make_hook(self, kind, way)

        def add(part):
            if kind == "post":
                return part.register_forward_hook(hook)
            return part.register_forward_pre_hook(hook, with_kwargs=kind.endswith("keyword"))

        self.hooks.append(self.apply_to_part(module, add))

    @action(
        *(2, 1, lambda t: not t.cache_name and len(t.hooks) < 4),
        module=part(),
        kind=["pre", "post"],
    )
    def interrupted_forward(self, *, module, kind):
        """A hook raises in the middle of a forward."""
        self.hook(module=module, kind=kind, way="raise")
        self.forward()
        self.unhook(index=-1)

    @action(2, 6, lambda twins: twins.hooks, index=number(4))
    def unhook(self, *, index=0):
        for handle in self.hooks.pop(index % len(self.hooks)).values():
            handle.remove()

    @action(
        *(1, 0.3, lambda twins: not twins.global_hooks),
        cls=[None] * 5 + ["RMSNorm", "GELU", "LayerNorm", "Linear", "Dropout"],
    )
    def global_hook(self, *, cls):
        """Changes the results of a class's modules, or counts the calls of modules by class."""

        def count(module, args, output):
            self.seen[type(module).__name__] += 1

        def change(module, args, output):
            if type(module).__name__ == cls:
                return change_values(output)

        hook = count if cls is None else change
        self.global_hooks.append(global_hooks.register_module_forward_hook(hook))

    @action(0.7, 4, lambda twins: twins.global_hooks)
    def remove_global_hook(self):
        self.global_hooks.pop().remove()

    @action(2, 1, is_resident, module=part(), library=list(LIBRARY_HOOKS))
    def library_hook(self, *, module, library):
        def add(part):
            hook = LIBRARY_HOOKS[library]()
            if library == "accelerate":
                add_hook_to_module(part, hook)
            else:
                registry = HookRegistry.check_if_exists_or_initialize(part)
                registry.register_hook(hook, "random")

        self.apply_to_part(module, add)
        self.keeps_forwards = True

    @action(1, 2, is_resident)
    def remove_library_hooks(self):
        def remove(model):
            for part in model.modules():
                if "random" in getattr(getattr(part, "_diffusers_hook", None), "hooks", ()):
                    part._diffusers_hook.remove_hook("random", recurse=False)
            remove_hook_from_module(model, recurse=True)

        self.apply(remove)

    # ----------------------------------------------------------------------------------------------
    # Weights

    @action(
        *(4, 1, has_original_weights),
        kind=["sequential", "model", "leaf_level", "block_level"] * 2
        + ["leaf_level disk", "block_level disk", "leaf_level stream", "block_level stream"],
    )
    def offload(self, *, kind):
        target = kind.partition(" ")[2]
        # diffusers writes none of torchao's tensors to a disk. It prefetches their layers in the order of the
        # first forward, which some later actions change.
        if target == "disk" and (self.changes_weights or self.fp8):
            return
        if kind == "leaf_level stream" and self.fp8:
            return
        if target == "stream" and self.device.type == "cpu":
            return
        folder = (
            self._exit.enter_context(tempfile.TemporaryDirectory()) if target == "disk" else None
        )
        self.apply(
            lambda model: changes.offload(
                model, kind, self.device, folder and tempfile.mkdtemp(dir=folder)
            )
        )
        self.offloading = "disk" if folder else "group" if "level" in kind else "accelerate"
        self.keeps_forwards = True

    @action(1, 5, lambda twins: twins.offloading in ("accelerate", "group"))
    def onload(self):
        def onload(model):
            if self.offloading == "accelerate":
                remove_hook_from_module(model, recurse=True)
            else:
                registry = HookRegistry.check_if_exists_or_initialize(model)
                for name in (
                    group_offloading._GROUP_OFFLOADING,
                    group_offloading._LAYER_EXECUTION_TRACKER,
                    group_offloading._LAZY_PREFETCH_GROUP_OFFLOADING,
                ):
                    registry.remove_hook(name, recurse=True)
            model.to(self.device)

        self.apply(onload)
        self.offloading = None

    @action(1, 0.5, lambda twins: has_original_weights(twins) and not twins.adapters)
    def layerwise_casting(self):
        storage = torch.bfloat16 if self.dtype == torch.float32 else torch.float8_e4m3fn
        self.apply(
            lambda model: model.enable_layerwise_casting(
                storage_dtype=storage, compute_dtype=self._dtype_of(model)
            )
        )
        self.layerwise = self.keeps_forwards = True

    @action(
        *(1, 0.3, lambda twins: is_resident(twins) and not twins.layerwise),
        module=part("linear", "output", "up"),
    )
    def quantize(self, *, module):
        self.apply_to_part(module, adapters.quantize)
        self.quantized = True

    @action(
        *(2, 2, lambda t: t.fp8 and has_original_weights(t)),
        module=lambda rng, twins: rng.choice(["", part()(rng, twins)]),
        granularity=[fp8_models.PER_ROW, fp8_models.PER_TENSOR],
        is_dynamic=chance(0.9),
        share=[1.0, 1.0, 0.6],
        seed=number(100),
    )
    def quantize_fp8(self, *, module="", granularity="PerRow", is_dynamic=True, share=1.0, seed=0):
        """Quantizes a share of a part's linear layers, by default of all blocks."""
        chosen = random.Random(seed)
        paths = [module] if module else self.family.block_lists
        names = [
            name
            for path in filter(self.has, paths)
            for name, layer in self.plain.get_submodule(path).named_modules(prefix=path)
            if fp8_models.is_quantizable(layer) and type(layer.weight.data) is torch.Tensor
            if chosen.random() < share
        ]

        def quantize(model):
            for name in names:
                layer = model.get_submodule(name)
                if model is self.models.get("float32"):
                    layer.weight = fp8_models.widened(self.plain.get_submodule(name).weight)
                else:
                    how = {"is_dynamic": is_dynamic}
                    layer.weight = fp8_models.quantized(layer.weight.data, granularity, **how)

        self.apply(quantize)

    @action(
        *(2, 6, lambda t: t.fp8 and has_original_weights(t)),
        how=list(changes.FP8_CHANGES),
        index=number(50),
    )
    def change_fp8(self, *, how, index=0):
        self.changes_weights = True
        with torch.no_grad():
            self.apply(lambda model: changes.change_fp8(model, how, index))

    @action(1, 1, has_original_weights, dtype=["float32", "bfloat16", "float16"])
    def to_and_back(self, *, dtype):
        """Converts all weights to another dtype and back, which rounds them."""
        self.apply(lambda model: model.to(getattr(torch, dtype)).to(self._dtype_of(model)) and None)

    @action(
        *(1, 1, can_load_weights),
        seed=number(3),
        assign=[False, True],
    )
    def load_weights(self, *, seed, assign=False):
        def load(model):
            state = self._model(seed).to(self._dtype_of(model)).state_dict()
            model.load_state_dict(state, assign=assign)

        self.apply(load)

    @action(
        *(0, 6, has_original_weights),
        module=part(),
        how=list(changes.WEIGHT_CHANGES),
        index=number(8),
        is_buffer=chance(0.15),
    )
    def change_weight(self, *, module, how, index=0, is_buffer=False):
        self.changes_weights = True

        def change(model):
            part = model if is_buffer else model.get_submodule(module)
            changes.change_weight(part, how, index, is_buffer)

        with torch.no_grad():
            self.apply(change)

    @action(
        *(0, 6, has_original_weights),
        module=lambda rng, twins: rng.choice([part()(rng, twins), ""]),
        # Nothing is captured after some of them, which are drawn less often.
        how=[*changes.ATTRIBUTE_CHANGES] + [*changes.CAPTURED_ATTRIBUTE_CHANGES] * 3,
        value=[0.0, 0.5, 2.0],
    )
    def change_attribute(self, *, module, how, value=2.0):
        self.restructured |= how == "class"
        self.keeps_forwards |= how == "function"
        change = changes.ATTRIBUTE_CHANGES[how]
        self.apply_to_part(module, lambda part: change(part, value) and None)

    @action(1, 1, is_resident, keep=chance(0.8))
    def deepcopy(self, *, keep=True):
        """Continue with copies. The originals may be deleted."""
        before = list(self.models.values())
        self.shares_forwards |= self.keeps_forwards
        self.models = self.apply(copy.deepcopy)
        for handles in self.hooks:
            for name, handle in handles.items():
                if name in self.models:
                    handle.hooks_dict_ref = find_hooks(self.models[name], handle)
        # Code that found a forward and was copied with it runs the original's: a bound method holds its
        # module, the function that stands in for one does not.
        if keep or self.shares_forwards:
            self.copied.append(before)

    # ----------------------------------------------------------------------------------------------
    # Adapters, caches

    @action(
        *(2, 2, lambda t: is_for_adapters(t) and len(t.adapters) < 2),
        seed=number(100),
    )
    def add_lora(self, *, seed=1, rank=2, everywhere=False):
        name = f"adapter{seed}"
        if name not in self.adapters:

            def add(model):
                layers = adapters.linear_layers(self.family, model) if everywhere else None
                # FP8 inputs of an adapter's first product are as exact as those of the layers.
                alpha = rank / 4 if self.fp8 else None
                adapters.add_lora(self.family, model, name, seed, rank, layers, alpha)

            self.apply(add)
            self.adapters.append(name)

    @action(
        *(2, 2, lambda twins: twins.adapters and is_resident(twins)),
        action=["scale", "zero", "all", "write", "disable", "enable", "delete", "fuse", "unfuse"],
    )
    def change_lora(self, *, action):
        self.apply(lambda model: changes.change_lora(model, action, self.adapters[-1]))
        if action == "delete":
            self.adapters.pop()

    @action(
        *(1.5, 1, lambda t: not t.cache_name and bool(t.family.caches)),
        name=lambda rng, twins: rng.choice(twins.family.caches),
    )
    def enable_cache(self, *, name):
        twins = weakref.ref(self)
        self.apply(
            lambda model: model.enable_cache(changes.cache_config(name, lambda: twins().timestep))
        )
        self.cache_name = name
        self.keeps_forwards = True

    @action(1, 4, lambda twins: twins.cache_name)
    def disable_cache(self):
        self.apply(lambda model: model.disable_cache())
        self.cache_name = None

    # ----------------------------------------------------------------------------------------------
    # Users' modules and code

    @action(6, 3, is_resident)
    def replace(self, *, module, kind):
        if kind == "halved" and self.fp8 and self.keeps_forwards:
            return  # it changes the class; only stand-ins, which FP8 layers have, follow
        self.restructured = True

        def replace(model):
            dtype = self._dtype_of(model)
            another = self._model(self.seed + 7).to(dtype) if kind == "another" else None
            changes.replace_part(model, module, kind, another)
            if kind not in ("wrap", "foreign"):
                model.get_submodule(module).to(self.device, dtype)

        self.apply(replace)

    @action(
        *(2, 1),
        module=part("attention", "cross_attention", "single_attention"),
        kind=["subclass", "other", "module", "fresh"],
    )
    def set_processor(self, *, module, kind):
        make = changes.processors(self.family)[kind]

        def set_processor(attention):
            if hasattr(attention, "set_processor"):
                attention.set_processor(make())

        self.apply_to_part(module, set_processor)

    @action(2, 0.7, is_resident, module=part())
    def wrap_forward(self, *, module):
        self.apply_to_part(module, changes.wrap_forward)
        self.keeps_forwards = True

    @action(3, 1.5, name=lambda rng, twins: rng.choice(sorted(patchable(twins))))
    def patch(self, *, name):
        """Changes the result of a function or method."""
        known = patchable(self)
        is_kept = self.keeps_forwards and name.endswith(".forward")
        if name in known and name not in self.patches and not is_kept:
            owner, attribute = known[name]
            original = vars(owner)[attribute]
            self.patches[name] = (owner, attribute, original)
            setattr(owner, attribute, changing(original))

    @action(2, 5, lambda twins: twins.patches)
    def unpatch(self):
        name = next(iter(self.patches))
        if not (self.keeps_forwards and name.endswith(".forward")):
            self._unpatch(name)

    def _unpatch(self, name):
        setattr(*self.patches.pop(name))

    @action(2, 2, name=[None, None, "native", "_native_math"])
    def set_attention_backend(self, *, name):
        if name is None:
            self.apply(lambda model: model.reset_attention_backend())
        else:
            self.apply(lambda model: model.set_attention_backend(name))

    # ----------------------------------------------------------------------------------------------
    # The end

    def finish(self):
        """After ejection the tested model has the plain one's attributes, and no graph is left."""
        if not self.shares_forwards:  # otherwise copies run forwards of the originals
            self.copied.clear()
        self.eject()
        self.forward()
        modules = dict(self.tested.named_modules())
        for name, module in self.plain.named_modules():
            tested, plain = attributes(modules[name]), attributes(module)
            if tested != plain:
                raise Difference(f"{name or 'the model'} is left with {sorted(tested ^ plain)}")
        if not self.quantized and self.offloading is None:
            state = self.tested.state_dict()
            for name, tensor in self.plain.state_dict().items():
                if not torch.equal(values_of(state[name]), values_of(tensor)):
                    raise Difference(f"{name} has other values")

    def free(self):
        """The tested model's memory is freed with the last reference, without garbage collection."""
        if self.graphs:
            self.counts.update(self.watch.check())
        self.copied.clear()
        self.hooks.clear()
        gc.collect(0)  # models that were copied, which frames of errors may hold
        weights = {name: weakref.ref(next(m.parameters())) for name, m in self.models.items()}
        self.models.clear()
        # A backward that raises leaves nodes in PyTorch's queue, with their parameters, until the next one.
        torch.zeros((), requires_grad=True).backward()
        tested, plain = weights["tested"]() is not None, weights["plain"]() is not None
        if tested and not plain:
            raise Difference("the tested model outlives its last reference, the plain one does not")
        # A wrapper around a forward, shared with a copy of the model, keeps graphs alive.
        if self.graphs and not plain and self.watch.captured and not self.shares_forwards:
            raise Difference("graphs outlive their model")
        self._check_outputs()


def change_inputs(call, form):
    with torch.inference_mode(form == "of inference mode"), torch.no_grad():
        for tensor in _pytree.tree_leaves((call.args, call.kwargs)):
            if is_floating(tensor) and not tensor.is_meta and form != "overlapping":
                (tensor[:1] if tensor.dim() else tensor).mul_(0.75)


def values_of(weight):
    weight = fp8_models.dequantized(weight) if hasattr(weight, "qdata") else weight.float()
    return weight.nan_to_num()


def attributes(module):
    """An instance's attributes, without the class's own forward, which libraries leave there."""
    names = set(vars(module))
    if getattr(vars(module).get("forward"), "__func__", None) is type(module).forward:
        names.remove("forward")
    return names


def find_hooks(model, handle):
    """A reference to the dictionary of a copied module that holds the hook of a handle."""
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            if handle.id in hooks:
                return weakref.ref(hooks)
    return lambda: None


# --------------------------------------------------------------------------------------------------
# Sequences


@dataclass
class Sequence:
    """The arguments of a Twins, and the steps applied to it."""

    model: dict
    steps: list

    def code(self):
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.model.items())
        steps = "".join(f"    {step.code()}\n" for step in self.steps)
        return f"with Twins({arguments}) as twins:\n{steps}"


@dataclass
class Result:
    seed: Any
    sequence: Sequence
    steps: int = 0
    forwards: int = 0
    failure: str | None = None
    traceback: str | None = None
    refused: str | None = None
    counts: collections.Counter = field(default_factory=collections.Counter)

    @property
    def message(self):
        return f"seed {self.seed}: {self.failure}\n\n{self.sequence.code()}"


def random_sequence(family, seed, device="cpu", graphs=False, fp8=False, lora=False):
    """Draw and apply a sequence. Returns a Result."""
    rng = random.Random(f"{family}-{seed}")
    sequence = Sequence(Twins.draw_model(rng, family, device, graphs, fp8, lora), [])
    return execute(seed, sequence, lambda twins: twins.draw_steps(rng))


def execute(seed, sequence, steps):
    result = Result(seed, sequence)
    with Twins(**sequence.model) as twins:
        try:
            for step in steps(twins):
                sequence.steps.append(step)
                step.apply(twins)
        except Refused as refused:
            result.refused = f"{step.name}: {refused}"
        except Exception as error:
            # Actions raise in `apply`. Other errors are faults of the package or of this program.
            result.failure = f"{step.name}: {describe(error)}"
            result.traceback = traceback.format_exc()
        result.steps, result.forwards, result.counts = twins.steps, twins.forwards, twins.counts
    return result


# --------------------------------------------------------------------------------------------------
# The program


def prepare_process():
    """Silence warnings, use one thread and no TF32, and reduce garbage collection."""
    logging.getLogger().setLevel(logging.ERROR)
    for name in ("diffusers", "accelerate", "peft", "torchao", "h100_diffusers_kernels"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False
    conftest.load_kernel()
    gc.collect()
    gc.freeze()


def run_task(arguments):
    return arguments[0], random_sequence(*arguments)


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--family", default="all", type=click.Choice(["all", *MODELS]))
@click.option("--graphs", is_flag=True, help="Compare models with CUDA graphs and without.")
@click.option("--fp8", is_flag=True, help="Quantize linear layers to FP8.")
@click.option("--lora", is_flag=True, help="Adapters from the beginning.")
@click.option("--device", default="cpu")
@click.option("--first-seed", default=0)
@click.option("--sequences", default=100, help="Number of sequences per family.")
@click.option("--processes", default=1)
def main(family, graphs, fp8, lora, device, first_seed, sequences, processes):
    families = list(MODELS) if family == "all" else [family]
    seeds = range(first_seed, first_seed + sequences)
    tasks = [(name, seed, device, graphs, fp8, lora) for seed in seeds for name in families]
    totals = collections.Counter(failures=0)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, prepare_process) as pool:
        for name, result in pool.map(run_task, tasks):
            totals.update(result.counts)
            totals.update(sequences=1, steps=result.steps, forwards=result.forwards)
            totals["ended by the plain model's own error"] += result.refused is not None
            if result.failure:
                totals["failures"] += 1
                click.echo(f"--- {name} {result.message}\n{result.traceback}")
    for what, count in totals.most_common():
        click.echo(f"{count:7} {what}")
    raise SystemExit(totals["failures"] > 0)


if __name__ == "__main__":
    import random_sequences  # other processes know the classes by this name

    random_sequences.main()
