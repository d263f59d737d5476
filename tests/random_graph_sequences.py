"""Random sequences of what users do to a model, with CUDA graphs and without, and the first difference.

Every step is done alike to two injected models of the same weights, one of which runs on CUDA graphs; what
the two return must have the same bits. On a CPU the graphs are emulated. Steps, scripts and arguments are
those of ``random_sequences``, and more::

    python tests/random_graph_sequences.py --family ltx --seed 123 --shrink
    python tests/random_graph_sequences.py --family all --device cuda --sequences 5000 --processes 14
"""

import collections
import collections.abc
import contextlib
import copy
import functools
import gc
import inspect
import re
import sys
import threading
import types
import weakref
from typing import NamedTuple

import torch
import torch.nn.functional as F
from diffusers.models import attention_dispatch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

import random_sequences
from checks import compute_as_other_threads
from emulated_graphs import EmulatedGraph
from families import FAMILIES
from graphs import use_emulated_graphs
from random_sequences import KINDS, Boom, Difference, Refused, Step, draw_module, step

# What keeps a model from being captured is to come less often than among kernels alone, and to go sooner. A
# compilation takes seconds.
WEIGHTS = {
    "compile": 0.01,
    "quantize": 0.3,
    "group_offload": 0.4,
    "global_hook": 0.3,
    "replace": 3,
    "hook": 2.5,
    "accelerate_offload": 0.7,
    "wrap_forward": 0.7,
    "library_hook": 1,
    "patch": 1.5,
    "set_processor": 1,
    "layerwise_casting": 0.5,
    "enable_cache": 1,
    "interrupted_forward": 1,
    "unhook": 6,
    "unpatch": 5,
    "disable_cache": 4,
    "remove_library_hooks": 2,
    "accelerate_onload": 5,
    "group_onload": 5,
    "remove_global_hook": 4,
}
GRAPH_KINDS = {
    name: kind._replace(weight=WEIGHTS.get(name, kind.weight)) for name, kind in KINDS.items()
}
graph_step = functools.partial(step, kinds=GRAPH_KINDS)

MOST_KEPT_OUTPUTS = 4
CONTROL_ARGUMENTS = ("controlnet_block_samples", "block_controlnet_hidden_states")


# --------------------------------------------------------------------------------------------------
# Graphs that can be counted, and interrupted


class Interrupt(TorchDispatchMode):
    """Raises an error at one of the operations that are captured."""

    def __init__(self, error, operation):
        super().__init__()
        self._error = error
        self._left = operation

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self._left == 0:
            raise self._error(self._error.__name__)  # a new one: a traceback holds models
        self._left -= 1
        return func(*args, **(kwargs or {}))


class Watch:
    """Of the graphs of a kind."""

    def __init__(self, graphs):
        captured = self.captured = weakref.WeakSet()
        self.interrupt = None
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


# --------------------------------------------------------------------------------------------------
# Arguments: a form makes (args, kwargs) of the keyword arguments


def values_in(arguments):
    """The names of the tensors of floating point that have more than one dimension."""
    return [
        name
        for name, value in arguments.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 1
    ]


def with_tensors(change, arguments):
    return (), {
        name: change(value) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }


def with_first(change, arguments):
    name = values_in(arguments)[0]
    return (), {**arguments, name: change(arguments[name])}


def offset(tensor):
    """The same values, at an address that is aligned to an element alone."""
    memory = tensor.new_empty(tensor.numel() + 1)
    return memory[1:].view(tensor.shape).copy_(tensor)


def strided(tensor):
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


def gapped(tensor):
    return torch.stack((tensor, tensor), -1)[..., 0]


def expanded(tensor):
    return tensor[:1].expand_as(tensor)


def overlapping(tensor):
    memory = torch.cat((tensor.flatten(), tensor.flatten()))
    strides = [max(1, stride // 2) for stride in tensor.stride()]
    return memory.as_strided(tensor.shape, strides)


def requiring_grad(tensor):
    return tensor.clone().requires_grad_() if tensor.is_floating_point() else tensor


def made_in_inference_mode(tensor):
    with torch.inference_mode():
        return tensor.clone()


class Subclass(torch.Tensor):
    pass


def one_tensor_twice(arguments):
    """Of two that are alike."""
    found, result = {}, dict(arguments)
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            result[name] = found.setdefault((value.shape, value.dtype), value)
    return (), result


def one_memory(arguments):
    """All tensors as views of one, at their alignment."""
    tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    sizes = [-(-value.nbytes // 256) * 256 for value in tensors.values()]
    device = next(iter(tensors.values())).device
    parts = torch.empty(sum(sizes), dtype=torch.uint8, device=device).split(sizes)
    views = {
        name: part[: value.nbytes].view(value.dtype).view(value.shape).copy_(value)
        for part, (name, value) in zip(parts, tensors.items(), strict=True)
    }
    return (), {**arguments, **views}


def float_timestep(arguments):
    return (), {**arguments, "timestep": 500.0}


def scalar_timestep(arguments):
    return (), {**arguments, "timestep": arguments["timestep"].flatten()[0]}


def long_timestep(arguments):
    return (), {**arguments, "timestep": (arguments["timestep"] * 1000).long()}


def reversed_keywords(arguments):
    return (), dict(reversed(arguments.items()))


def positional(arguments):
    (_, first), *others = arguments.items()
    return (first,), dict(others)


def without_last_tensor(arguments):
    return (), {
        name: value for name, value in arguments.items() if name != values_in(arguments)[-1]
    }


# Those that a model takes.
GOOD_FORMS = {
    "as they are": lambda arguments: ((), arguments),
    "a model output": lambda arguments: ((), {**arguments, "return_dict": True}),
    "offset": functools.partial(with_tensors, offset),
    "strided": functools.partial(with_tensors, strided),
    "gapped": functools.partial(with_tensors, gapped),
    "first expanded": functools.partial(with_first, expanded),
    "all expanded": functools.partial(with_tensors, expanded),
    "requiring grad": functools.partial(with_tensors, requiring_grad),
    "parameters": functools.partial(
        with_tensors, lambda tensor: nn.Parameter(tensor, requires_grad=False)
    ),
    "of inference mode": functools.partial(with_tensors, made_in_inference_mode),
    "subclass": functools.partial(with_first, lambda tensor: tensor.as_subclass(Subclass)),
    "one tensor twice": one_tensor_twice,
    "one memory": one_memory,
    "positional": positional,
    "long timestep": long_timestep,
    "reversed keywords": reversed_keywords,
}
QUIET_FORMS = [form for form in GOOD_FORMS if form != "subclass"]
# Those that models refuse, or take in part.
ODD_FORMS = {
    "overlapping": functools.partial(with_first, overlapping),
    "another dtype": functools.partial(with_first, torch.Tensor.double),
    "meta": functools.partial(with_first, lambda tensor: tensor.to("meta")),
    "on the host": functools.partial(with_first, lambda tensor: tensor.cpu()),
    "wrong width": functools.partial(with_first, lambda tensor: tensor[..., 1:]),
    "wrong batch": functools.partial(with_first, lambda tensor: tensor[:0]),
    "a list": functools.partial(with_first, lambda tensor: [tensor]),
    "float timestep": float_timestep,
    "scalar timestep": scalar_timestep,
    "one missing": without_last_tensor,
    "one too many": lambda arguments: ((), {**arguments, "unknown": None}),
}
FORMS = {**GOOD_FORMS, **ODD_FORMS}


# --------------------------------------------------------------------------------------------------
# Modes: around a call


class PassingFunctionMode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class ScalingFunctionMode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 1.5 if func is F.scaled_dot_product_attention else result


class PassingDispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class ScalingDispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 1.5 if func is torch.ops.aten.cos.default else result


@contextlib.contextmanager
def setting(read, write, value):
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def deterministic():
    return setting(
        torch.are_deterministic_algorithms_enabled,
        functools.partial(torch.use_deterministic_algorithms, warn_only=True),
        True,
    )


@contextlib.contextmanager
def other_stream():
    if not torch.cuda.is_available():
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


class Call(NamedTuple):
    model: nn.Module
    args: tuple
    kwargs: dict
    cache_context: str | None

    def __call__(self, args=None, kwargs=None):
        context = contextlib.nullcontext()
        if self.cache_context is not None:
            context = self.model.cache_context(self.cache_context)
        with context:
            if args is None:
                return self.model(*self.args, **self.kwargs)
            return self.model(*args, **kwargs)


def in_mode(make, grad_mode=torch.no_grad, run=Call.__call__):
    """``make(twins)`` makes what is around a call."""

    def run_in_mode(twins, call):
        with grad_mode(), make(twins):
            return run(call)

    return run_in_mode


def nothing(twins):
    return contextlib.nullcontext()


def run_in_thread(twins, call):
    """Of another thread, which has modes of its own."""
    results = in_threads([functools.partial(in_mode(nothing), twins, call)])
    return results[0]


def run_in_threads(twins, call):
    """At the same time, where no call changes what another one reads."""
    has_state = (
        *(twins.hooks, twins.global_hooks, twins.adapters, twins.cache_name, twins.keeps_forwards),
        *(twins.offload, twins.layerwise),
    )
    if any(has_state) or any(module.training for module in twins.plain.modules()):
        return run_in_thread(twins, call)
    return in_threads([functools.partial(in_mode(nothing), twins, call)] * 3)


def in_threads(functions):
    results = [None] * len(functions)

    def target(i):
        compute_as_other_threads()
        try:
            results[i] = functions[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=target, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:
        try:
            raise errors[0]
        finally:  # their tracebacks hold models
            errors.clear()
            results.clear()
    return results


def changed_weights(call):
    """A call with other weights for the time of it."""
    weights = {name: weight * 0.9 for name, weight in call.model.named_parameters()}
    return torch.func.functional_call(call.model, weights, call.args, call.kwargs)


def of_tensors(call):
    """(a function of the call's tensors that returns tensors, these tensors)."""
    leaves, spec = _pytree.tree_flatten((call.args, {**call.kwargs, "return_dict": False}))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def function(*tensors):
        full = list(leaves)
        for i, tensor in zip(places, tensors, strict=True):
            full[i] = tensor
        args, kwargs = _pytree.tree_unflatten(full, spec)
        return call(args, kwargs)[0]

    return function, tuple(leaves[i] for i in places)


def halved(tensors):
    return [tensor * 0.5 if tensor.is_floating_point() else tensor for tensor in tensors]


def run_batched(call):
    function, tensors = of_tensors(call)
    return torch.func.vmap(function)(*(tensor.unsqueeze(0) for tensor in tensors))


class Around(nn.Module):
    """A function of tensors that calls a model, whose parameters are this one's."""

    def __init__(self, model, function):
        super().__init__()
        self.model = model
        self._function = function

    def forward(self, *tensors):
        return self._function(*tensors)


def run_traced(call):
    """Traced with some values, run with others."""
    function, tensors = of_tensors(call)
    traced = torch.jit.trace(Around(call.model, function), tensors, check_trace=False)
    return traced(*halved(tensors))


def run_symbolic(call, **options):
    function, tensors = of_tensors(call)
    return make_fx(function, **options)(*tensors)(*halved(tensors))


# Those whose calls are captured, if nothing else is in the way.
QUIET_MODES = {
    "no_grad": in_mode(nothing),
    "inference_mode": in_mode(nothing, torch.inference_mode),
    "both": in_mode(lambda twins: torch.no_grad(), torch.inference_mode),
    "default device": in_mode(lambda twins: torch.device(twins.device)),
    "default dtype": in_mode(
        lambda twins: setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64)
    ),
    "deterministic": in_mode(lambda twins: deterministic()),
    "matmul precision": in_mode(
        lambda twins: setting(
            torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"
        )
    ),
    "math attention": in_mode(lambda twins: sdpa_kernel(SDPBackend.MATH)),
    "attention_backend": in_mode(
        lambda twins: attention_dispatch.attention_backend("_native_math")
    ),
    "other stream": in_mode(lambda twins: other_stream()),
    "thread": run_in_thread,
    "threads": run_in_threads,
}
LOUD_MODES = {
    "grad": in_mode(nothing, torch.enable_grad),
    "autocast": in_mode(lambda twins: torch.autocast(twins.device.type, dtype=torch.bfloat16)),
    "function mode": in_mode(lambda twins: PassingFunctionMode()),
    "scaling function mode": in_mode(lambda twins: ScalingFunctionMode()),
    "dispatch mode": in_mode(lambda twins: PassingDispatchMode()),
    "scaling dispatch mode": in_mode(lambda twins: ScalingDispatchMode()),
    "anomaly": in_mode(lambda twins: torch.autograd.set_detect_anomaly(True)),
    "dual level": in_mode(lambda twins: torch.autograd.forward_ad.dual_level()),
    "other weights": in_mode(nothing, run=changed_weights),
    "vmap": in_mode(nothing, run=run_batched),
    "traced": in_mode(nothing, run=run_traced),
    "make_fx": in_mode(nothing, run=run_symbolic),
    "make_fx before dispatch": in_mode(
        nothing, run=lambda call: run_symbolic(call, pre_dispatch=True)
    ),
}
MODES = {**QUIET_MODES, **LOUD_MODES}
SLOW_MODES = {
    "make_fx": 0.05,
    "make_fx before dispatch": 0.05,
    "traced": 0.3,
}  # and how often they are drawn


# --------------------------------------------------------------------------------------------------
# Comparison

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def have_same_bits(a, b):
    if torch.equal(a, b) and not a.is_floating_point():
        return True
    kind = _INTEGERS.get(a.element_size())
    if kind is None:
        return torch.equal(a, b)
    return torch.equal(a.detach().contiguous().view(kind), b.detach().contiguous().view(kind))


def facts_of(tensor):
    """What a caller can tell of a tensor, besides its values."""
    return {
        "type": type(tensor).__name__,
        "dtype": tensor.dtype,
        "device": tensor.device,
        "shape": tuple(tensor.shape),
        "strides": tensor.stride(),
        "requires_grad": tensor.requires_grad,
        "is_inference": tensor.is_inference(),
    }


def compare(what, mine, plain, slack=0):
    if type(mine) is not type(plain):
        raise Difference(f"{what} is a {type(mine).__name__}, not a {type(plain).__name__}")
    mine_leaves, mine_spec = _pytree.tree_flatten(mine)
    plain_leaves, plain_spec = _pytree.tree_flatten(plain)
    if mine_spec != plain_spec:
        raise Difference(f"{what} is {mine_spec}, not {plain_spec}")
    for a, b in zip(mine_leaves, plain_leaves, strict=True):
        if not isinstance(b, torch.Tensor):
            if type(a) is not type(b) or a != b:
                raise Difference(f"{what} has {a!r}, not {b!r}")
            continue
        a_facts, b_facts = facts_of(a), facts_of(b)
        for name, fact in b_facts.items():
            if a_facts[name] != fact:
                raise Difference(f"{what} has {name} {a_facts[name]}, not {fact}")
        if not b.is_meta and not have_same_bits(a, b):
            error = random_sequences.relative(a.detach().double(), b.detach().double())
            if not error <= slack:
                raise Difference(f"{what} has other bits: {error:.2g} of its norm")


# --------------------------------------------------------------------------------------------------
# Steps


def draw_call(rng, twins):
    """Mostly the sequence's usual one, so that calls come again."""
    usual = twins.usual
    if usual is None:
        usual = {
            "options": rng.choice(list(twins.family.options)),
            "mode": rng.choice(
                list(QUIET_MODES) if rng.random() < 0.4 else ["no_grad", "inference_mode"]
            ),
            "form": rng.choice(list(QUIET_FORMS)) if rng.random() < 0.4 else "as they are",
        }
        usual["seed"] = rng.randrange(1000)
        twins.usual = usual
    call = {**usual, "times": rng.randint(1, 4)}
    has_one_shape = twins.cache_name is not None or twins.compiled
    if not has_one_shape and rng.random() < 0.5:
        name = rng.choice(
            ["options", "options", "mode", "mode", "form", "form", "seed", "scale", "samples"]
        )
        call[name] = {
            "options": lambda: rng.choice(list(twins.family.options)),
            "mode": lambda: rng.choices(list(MODES), [SLOW_MODES.get(mode, 1) for mode in MODES])[
                0
            ],
            "form": lambda: rng.choice(list(FORMS)),
            "seed": lambda: rng.randrange(1000),
            "scale": lambda: rng.choice([0.5, 0.7, 1.0]),
            "samples": lambda: rng.randint(1, 2),
        }[name]()
    if twins.injected is not None and rng.random() < 0.15:
        call["interrupt"] = (rng.choice(sorted(ERRORS)), rng.randrange(60))
    return call


ERRORS = {
    "KeyboardInterrupt": KeyboardInterrupt,
    "Boom": Boom,
    "OutOfMemoryError": torch.OutOfMemoryError,
}


def draw_injection(rng, twins):
    return {
        "attention": rng.random() < 0.8,
        "limit": rng.randint(1, 4),
        "graphs": rng.random() < 0.9,
    }


WEIGHT_CHANGES = (
    *("mul_", "data.mul_", "data =", "data = clone", "new parameter", "transposed data"),
    *(
        "swap data",
        "swap parameters",
        "swap_tensors",
        "set_",
        "nan",
        "offset data",
    ),
)
ATTRIBUTE_CHANGES = {  # and how often they are drawn: nothing is captured after some of them
    **dict.fromkeys(("train", "eval", "dropout", "note", "processor note", "processor value"), 4),
    **dict.fromkeys(("checkpointing", "list", "config"), 4),
    **dict.fromkeys(("class", "call", "function"), 1),
}


def is_fixed(twins):
    return bool(twins.offload or twins.layerwise or twins.quantized or twins.compiled)


class GraphTwins(random_sequences.Twins):
    """Two injected models: one that runs on CUDA graphs (mine), and one that does not (plain).

    Args: as for Twins.

    Raises:
        Difference: by a step, when the two do not do the same.
        Refused: by a step that raised the same on both.
    """

    kinds = GRAPH_KINDS

    def __init__(self, family, **config):
        super().__init__(family, **config)
        self.exact = None
        self.usual = None
        # An emulated graph gives convolutions other memory, and they their sums another order.
        is_exact = family in FAMILIES or self.device.type == "cuda"
        self.slack = 0 if is_exact else 100 * torch.finfo(self.dtype).eps
        self.outputs = []  # (mine, its values, plain), of calls before
        self.runs = collections.Counter()  # calls that reached a forward with graphs, by its tally
        self.tallies = {}
        self.counted = collections.defaultdict(collections.Counter)  # at the last look, by tally

    @staticmethod
    def draw_model(rng, family, device):
        dtype = rng.choices(["float32", "bfloat16", "float16"], [7, 2, 1])[0]
        model = {"family": family, "dtype": dtype, "device": device, "seed": rng.randrange(3)}
        if rng.random() < 0.6:
            model.update(GraphTwins.families[family].one_block)
        return model

    def draw_steps(self, rng):
        yield Step("inject", {**draw_injection(rng, self), "graphs": True})
        yield Step("forward", {**draw_call(rng, self), "times": 3})
        for _ in range(rng.randint(4, 9)):
            yield self.draw_step(rng)
            if rng.random() < 0.7:
                yield Step("forward", draw_call(rng, self))
            if self.compiled:
                break
        yield Step("free" if rng.random() < 0.25 and not self.compiled else "finish", {})

    def __enter__(self):
        self._package = sys.modules[f"{self.kernel.__name__}.injection.cuda_graphs"]
        use_emulated_graphs(self.kernel, Interrupt)
        graphs = self._package.GRAPHS
        self._graphs_before = graphs.get(self.device.type)
        self.watch = Watch(self._graphs_before or EmulatedGraph)
        graphs[self.device.type] = self.watch.graphs
        self._run_before = self._package.GraphedStandIn.call
        self._package.GraphedStandIn.call = self._counted(self._run_before)
        return super().__enter__()

    def __exit__(self, *error):
        self._package.GraphedStandIn.call = self._run_before
        if self._graphs_before is None:
            del self._package.GRAPHS[self.device.type]
        else:
            self._package.GRAPHS[self.device.type] = self._graphs_before
        self.outputs.clear()
        super().__exit__(*error)

    def _counted(self, run):
        twins = weakref.ref(self)

        def counted(graphed, *args, **kwargs):
            is_counted = not (torch.compiler.is_compiling() or graphed.injection.is_over)
            try:
                return run(graphed, *args, **kwargs)
            except KeyboardInterrupt:
                is_counted = False
                raise
            finally:
                if is_counted and twins() is not None:
                    twins()._count_run(graphed.injection.report.graph_calls)

        return counted

    def _count_run(self, tally):
        self.tallies[id(tally)] = tally
        self.runs[id(tally)] += 1

    def alike(self, act):
        """Calls ``act`` with each model; returns what it gives for the plain one, None, and for the other."""
        plain, plain_error = random_sequences.attempt(act, self.plain)
        mine, error = random_sequences.attempt(act, self.mine)
        if describe(error) != describe(plain_error):
            raise Difference(f"{describe(error)}; without graphs: {describe(plain_error)}") from (
                error or plain_error
            )
        if error is not None:
            raise Refused(describe(plain_error)) from plain_error
        return plain, None, mine

    # ----------------------------------------------------------------------------------------------
    # The kernels

    @graph_step(15, draw_injection)  # for a model that was ejected
    def inject(self, *, attention=True, limit=8, graphs=True):
        """Puts them in; once more, with the options of before, if they are."""
        if self.injected is not None:
            attention, limit, graphs = self._options
        for model in (self.plain, self.mine):
            is_mine = model is self.mine
            options = {"cuda_graphs": graphs, "max_cuda_graphs": limit} if is_mine else {}
            report = self.kernel.inject_kernels(model, attention=attention, **options)
            if report.already_injected != (self.injected is not None):
                raise Difference(f"already_injected is {report.already_injected}")
        self.injected = {"attention": attention}
        self._options = attention, limit, graphs

    @graph_step(2, allowed=lambda twins: not twins.compiled)
    def eject(self):
        self._check_counts()
        for model in (self.plain, self.mine):
            self.kernel.eject_kernels(model)
        was_injected, self.injected = self.injected is not None, None
        self._check_all_are_gone(was_injected)

    def _check_counts(self):
        """What the report counts is what was called."""
        for key, tally in self.tallies.items():
            now = collections.Counter(captured=tally.captured, replayed=tally.replayed)
            for reason, count in tally.uncaptured.items():
                now[general(reason)] += count
            counts = now - self.counted[key]
            if sum(counts.values()) != self.runs[key]:
                raise Difference(
                    f"{self.runs[key]} calls, of which {sum(counts.values())} are counted"
                )
            self.counts.update(counts)
            self.counted[key] = now  # copies may go on to call what they were made of
        self.runs.clear()

    def _check_all_are_gone(self, was_injected):
        if self.kept:  # models that were copied
            return
        if self.watch.captured:
            gc.collect()
        if self.watch.captured:
            raise Difference(f"{len(self.watch.captured)} graphs are alive")

    # ----------------------------------------------------------------------------------------------
    # Forwards

    @graph_step(8, draw_call)
    def forward(
        self,
        *,
        options,
        seed,
        mode="no_grad",
        form="as they are",
        times=1,
        scale=None,
        samples=0,
        interrupt=None,
    ):
        """Calls, each with other values in the same tensors.

        Args:
            scale: of adapters, by the argument for the attention.
            samples: how many tensors of a control network are given in a list.
            interrupt: an error's name, and the operation at which a capture is to raise it.
        """
        if mode == "other weights" and self.offload == "disk":
            mode = "no_grad"  # those that wait on a disk have no values to make others of
        calls = {}
        try:
            for model in (self.plain, self.mine):
                calls[id(model)] = self._arguments(options, seed, form, scale, samples)
        except Exception as error:  # that form is none of these arguments'
            self.counts[f"form: {form}: {describe(error)}"] += 1
            return
        for _ in range(times):
            self.timestep = 100 + (self.timestep - 107) % 700
            self._call(calls, mode, interrupt)
            for args, kwargs in calls.values():
                with torch.inference_mode(form == "of inference mode"), torch.no_grad():
                    for tensor in _pytree.tree_leaves((args, kwargs)):
                        may_change = isinstance(tensor, torch.Tensor) and not tensor.is_meta
                        if may_change and tensor.is_floating_point() and form != "overlapping":
                            (tensor[:1] if tensor.dim() else tensor).mul_(0.75)

    def _arguments(self, options, seed, form, scale, samples):
        arguments = self.family.inputs(
            self.device, self.dtype, seed=seed, **self.family.options[options]
        )
        args, kwargs = FORMS[form](arguments)
        kwargs.setdefault("return_dict", False)
        names = inspect.signature(type(self.plain).forward).parameters
        if scale is not None:
            name = next((name for name in names if name.endswith("attention_kwargs")), None)
            if name is not None:
                kwargs[name] = {"scale": scale}
        name = next((name for name in names if name.startswith(CONTROL_ARGUMENTS)), None)
        if samples and name is not None:
            width = self.config["heads"] * self.config["head_dim"]
            kwargs[name] = [
                torch.linspace(-1, 1, width, device=self.device, dtype=self.dtype) * (i + 1)
                for i in range(samples)
            ]
        return args, kwargs

    def _call(self, calls, mode, interrupt):
        seen, states = {}, {}

        def run(model):
            is_mine = model is self.mine
            call = Call(model, *calls[id(model)], "cond" if self.cache_name else None)
            self.seen = collections.Counter() if self.seen is not None else None
            torch.manual_seed(7)
            if is_mine and interrupt is not None:
                name, operation = interrupt
                self.watch.interrupt = ERRORS[name], operation
            try:
                result = MODES[mode](self, call)
            except KeyboardInterrupt:
                self.counts["interrupted captures"] += 1
                self.seen = collections.Counter() if self.seen is not None else None
                torch.manual_seed(7)
                result = MODES[mode](self, call)
            finally:
                self.watch.interrupt = None
                seen[is_mine] = self.seen
                states[is_mine] = torch.get_rng_state()
            return result

        self.forwards += 1
        is_refused = False
        try:
            plain, _, mine = self.alike(run)
        except Refused:
            is_refused = True
            self.counts["calls that raise"] += 1
        if seen[True] != seen[False]:
            raise Difference(f"global hooks see {seen[True]}, not {seen[False]}")
        if not torch.equal(states[True], states[False]):
            raise Difference("other random numbers come next")
        compare("an argument", *(calls[id(model)] for model in (self.mine, self.plain)))
        if not is_refused:
            compare("the output", mine, plain, self.slack)
        self._check_outputs()
        if not is_refused:
            self._keep(mine)

    def _keep(self, mine):
        for leaf in _pytree.tree_leaves(mine):
            is_alone = isinstance(leaf, torch.Tensor) and not (leaf.is_meta or leaf.requires_grad)
            if is_alone:  # what a gradient may be asked for holds parameters
                self.outputs.append((leaf, leaf.detach().clone()))
        del self.outputs[:-MOST_KEPT_OUTPUTS]

    def _check_outputs(self):
        for output, values in self.outputs:
            if not have_same_bits(output, values):
                raise Difference("an output of before has changed")

    @graph_step(1, allowed=lambda twins: twins.outputs)
    def spoil_outputs(self):
        """A caller may do with them what he likes."""
        for output, _ in self.outputs:
            with torch.inference_mode():
                output.fill_(float("nan"))
        self.outputs.clear()

    # ----------------------------------------------------------------------------------------------
    # Weights and attributes

    @graph_step(
        6,
        lambda rng, twins: {
            "module": draw_module(rng, twins),
            "how": rng.choice(WEIGHT_CHANGES),
            "index": rng.randrange(8),
            "is_buffer": rng.random() < 0.15,
        },
        lambda twins: not is_fixed(twins),
    )
    def change_weight(self, *, module, how, index, is_buffer=False):
        self.changes_weights = True

        def change(model):
            found = [
                (part, name)
                for part in (model if is_buffer else model.get_submodule(module)).modules()
                for name, value in (part._buffers if is_buffer else part._parameters).items()
                if value is not None and value.is_floating_point()
            ]
            if found:
                change_weight(*found[index % len(found)], how, found)

        with torch.no_grad():
            self.alike(change)

    @graph_step(
        6,
        lambda rng, twins: {
            "module": rng.choice([draw_module(rng, twins), ""]),
            "how": rng.choices(list(ATTRIBUTE_CHANGES), list(ATTRIBUTE_CHANGES.values()))[0],
            "value": rng.choice([0.0, 0.5, 2.0]),
        },
        lambda twins: not is_fixed(twins),
    )
    def change_attribute(self, *, module, how, value):
        if how == "class":
            self.restructured = True
        if how in ("call", "function"):
            self.keeps_forwards = True

        def change(model):
            change_attribute(self, model.get_submodule(module), how, value)

        self.alike(change)

    @graph_step(
        1.5,
        lambda rng, twins: {
            "action": rng.choice(["fuse_qkv_projections", "unfuse_qkv_projections"]),
        },
        lambda twins: not is_fixed(twins) and not twins.adapters and twins.cache_name is None,
    )
    def change_projections(self, *, action):
        with contextlib.suppress(Refused):
            self.alike(lambda model: getattr(model, action)() and None)
            self.restructured = True

    @graph_step(
        1,
        lambda rng, twins: {"is_in_graph_mode": rng.random() < 0.5},
        lambda twins: not twins.compiled,
    )
    def call_shallow_copies(self, *, is_in_graph_mode):
        """Of the models, which may have attributes of their own."""
        options = next(iter(self.family.options))
        calls = {id(m): self._arguments(options, 1, "as they are", None, 0) for m in self.models}

        def call(model):
            duplicate = copy.copy(model)
            torch.manual_seed(0)  # for dropouts
            args, kwargs = calls[id(model)]
            with torch.no_grad() if is_in_graph_mode else torch.enable_grad():
                return [duplicate(*args, **kwargs)[0].detach() for _ in range(3)]

        if self.cache_name is None:
            with contextlib.suppress(Refused):
                plain, _, mine = self.alike(call)
                compare("a shallow copy's output", mine, plain, self.slack)

    # ----------------------------------------------------------------------------------------------
    # The end

    def finish(self):
        """No graph outlives the kernels, and the models compute the same without them."""
        if not self.shares_forwards:  # of the models copied, by what found their forwards before
            self.kept.clear()
        self.eject()
        if not self.compiled:
            self.forward(options=next(iter(self.family.options)), seed=0)

    def free(self):
        """Graphs go with their model, without the collector, and what they returned stays."""
        self._check_counts()
        self.hooks.clear()
        self.kept.clear()
        gc.collect()  # models that were copied, which errors' frames may hold
        references = [weakref.ref(next(m.parameters())) for m in (self.plain, self.mine)]
        self.plain = self.mine = None
        plain, mine = (reference() is None for reference in references)
        if plain and not mine:
            raise Difference("the model with graphs outlives its last reference")
        # A wrapper around a forward, which a copy of the model has too, keeps them.
        if plain and self.watch.captured and not self.shares_forwards:
            raise Difference("graphs outlive their model")
        self._check_outputs()


def change_weight(part, name, how, found):
    values = part._parameters.get(name, part._buffers.get(name))
    alike = [
        (other, key)
        for other, key in found
        if (other, key) != (part, name)
        and other._parameters.get(key, other._buffers.get(key)).shape == values.shape
        and other._parameters.get(key, other._buffers.get(key)).dtype == values.dtype
    ]
    other, key = alike[0] if alike else (part, name)
    other_values = other._parameters.get(key, other._buffers.get(key))
    if how == "mul_":
        values.mul_(0.9)
    elif how == "data.mul_":
        values.data.mul_(0.9)
    elif how == "data =":
        values.data = values.data * 0.9
    elif how == "data = clone":
        values.data = values.data.clone()
    elif how == "offset data":
        values.data = offset(values.data)
    elif how == "new parameter":
        new = values.detach() * 0.9
        setattr(part, name, nn.Parameter(new) if isinstance(values, nn.Parameter) else new)
    elif how == "transposed data":
        if values.dim() == 2:
            values.data = values.data.t().contiguous().t()
    elif how == "swap data":
        values.data, other_values.data = other_values.data, values.data
    elif how == "swap parameters":
        setattr(part, name, other_values)
        setattr(other, key, values)
    elif how == "swap_tensors":
        if values is not other_values:
            torch.utils.swap_tensors(values, other_values)
    elif how == "set_":
        values.data.set_(values.data * 0.9)
    elif how == "requires_grad":
        values.requires_grad_(not values.requires_grad and isinstance(values, nn.Parameter))
    elif how == "nan":
        values.view(-1)[:1] = float("nan")


def change_attribute(twins, part, how, value):
    processor = getattr(part, "processor", None)
    if how in ("train", "eval"):
        part.train(how == "train")
    elif how == "dropout":
        for module in part.modules():
            if isinstance(module, nn.Dropout):
                module.p = value / 4
    elif how == "note":
        part.note = value
    elif how == "list":
        part.notes = [*getattr(part, "notes", []), value]
        part.notes.append(part.notes)
    elif how == "processor note":
        if processor is not None:
            processor.note = {"value": [value, torch.ones(2, device=twins.device)]}
    elif how == "processor value":
        if processor is not None and hasattr(processor, "note"):
            processor.note["value"].append(value)
    elif how == "function":
        add_function(part, value)
    elif how == "class":
        change_class(part, value)
    elif how == "call":
        change_call(part, value)
    elif how == "checkpointing":
        if hasattr(part, "gradient_checkpointing"):
            part.gradient_checkpointing = not part.gradient_checkpointing
    elif how == "config" and hasattr(part, "register_to_config"):
        part.register_to_config(note=value)


def add_function(part, value):
    """An attribute of a part that is a function, by a name that its class knows."""
    for name in ("act", "activation", "nonlinearity", "gelu"):
        if isinstance(getattr(part, name, None), types.FunctionType):
            setattr(part, name, functools.wraps(F.gelu)(lambda x: x * value))


def change_class(part, value):
    """As FSDP and parametrizations do."""
    cls = type(part)
    # What accelerate leaves behind would go on, in a model that has no forward of the package's in its place.
    if getattr(part.__dict__.get("forward"), "__func__", None) is cls.forward:
        del part.forward

    def forward(self, *args, **kwargs):
        result = super(new, self).forward(*args, **kwargs)
        return random_sequences.changed(result, "replace") if value else result

    new = type(f"Changed{cls.__name__}", (cls,), {"forward": forward})
    part.__class__ = new


def change_call(part, value):
    """What nn.Module calls is found on the instance."""
    call = type(part)._call_impl

    def _call_impl(*args, **kwargs):
        result = call(part, *args, **kwargs)
        return random_sequences.changed(result, "replace") if value else result

    part._call_impl = _call_impl


def general(reason):
    """A reason without the names in it."""
    reason = re.sub(r"\S*_modules\S+|\S+(?= runs code of)", "a part", reason)
    return re.sub(r" of diffusers: .*| by \w+$", " of diffusers", reason)


def describe(error):
    if error is None:
        return "no error"
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def main(argv=None):
    return random_sequences.main(argv, GraphTwins, __doc__)


if __name__ == "__main__":
    import random_graph_sequences  # by the name that scripts and other processes know its classes by

    sys.exit(random_graph_sequences.main())
