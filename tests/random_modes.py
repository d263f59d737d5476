"""Modes of calls in the random sequences: contexts around a call, and transforms of it.

A mode is a function of the sequence's Twins and a Call that returns the call's result.
"""

import contextlib
import functools
import threading
from typing import NamedTuple

import torch
import torch.nn.functional as F
from diffusers.hooks.layer_skip import AttentionScoreSkipFunctionMode
from diffusers.models import attention_dispatch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from changes import weighted_sum
from checks import compute_as_other_threads
from family import joined


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


class Interrupt(TorchDispatchMode):
    """Raises an error at one operation."""

    def __init__(self, error, operation):
        super().__init__()
        self._error = error
        self._left = operation

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self._left == 0:
            raise self._error(self._error.__name__)  # a new one: a traceback keeps models alive
        self._left -= 1
        return func(*args, **(kwargs or {}))


class Scaling:
    """Changes the results of a function or an operator, if one is given."""

    def __init__(self, changed=None):
        super().__init__()
        self._changed = changed

    def _scale(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 1.5 if func is self._changed else result


class ScalingFunctionMode(Scaling, TorchFunctionMode):
    __torch_function__ = Scaling._scale


class ScalingDispatchMode(Scaling, TorchDispatchMode):
    __torch_dispatch__ = Scaling._scale


@contextlib.contextmanager
def setting(write, value, before, **options):
    """Set a value temporarily."""
    write(value, **options)
    try:
        yield
    finally:
        write(before)


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


def in_context(*contexts, run=Call.__call__):
    """Run a call within contexts, made by functions of the call. The first sets the gradient mode."""

    def mode(twins, call):
        with contextlib.ExitStack() as stack:
            for make in contexts:
                stack.enter_context(make())
            return run(call)

    return mode


def without_grad(*contexts, **options):
    return in_context(torch.no_grad, *contexts, **options)


def autocast(twins, call):
    if call.model is twins.models.get("float32"):
        return without_grad()(twins, call)
    with torch.autocast(twins.device.type, dtype=torch.bfloat16):
        return without_grad()(twins, call)


def run_threads(target, count):
    """Call ``target(i)`` in one thread for each i below a count."""
    threads = [threading.Thread(target=target, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def in_threads(functions):
    results = [None] * len(functions)

    def target(i):
        compute_as_other_threads()
        try:
            results[i] = functions[i]()
        except BaseException as error:
            results[i] = error

    run_threads(target, len(functions))
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:
        try:
            raise errors[0]
        finally:  # their tracebacks keep models alive
            errors.clear()
            results.clear()
    return results


def in_thread(twins, call):
    """Calls in another thread, which has its own modes."""
    return in_threads([functools.partial(without_grad(), twins, call)])[0]


def in_three_threads(twins, call):
    """Concurrent calls, if no call changes another's inputs."""
    state = (
        *(twins.hooks, twins.global_hooks, twins.adapters, twins.cache_name, twins.keeps_forwards),
        *(twins.offloading, twins.layerwise),
    )
    if any(state) or any(module.training for module in twins.plain.modules()):
        return in_thread(twins, call)
    return in_threads([functools.partial(without_grad(), twins, call)] * 3)


def with_other_weights(call):
    weights = {name: weight * 0.9 for name, weight in call.model.named_parameters()}
    return torch.func.functional_call(call.model, weights, call.args, call.kwargs)


def of_tensors(call):
    """(a function of the call's tensors that returns the first result, these tensors)."""
    leaves, spec = _pytree.tree_flatten((call.args, {**call.kwargs, "return_dict": False}))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def function(*tensors):
        full = list(leaves)
        for i, tensor in zip(places, tensors, strict=True):
            full[i] = tensor
        args, kwargs = _pytree.tree_unflatten(full, spec)
        return joined(call(args, kwargs)[0])

    return function, tuple(leaves[i] for i in places)


def halved(tensors):
    return [tensor * 0.5 if tensor.is_floating_point() else tensor for tensor in tensors]


def batched(call):
    function, tensors = of_tensors(call)
    return torch.func.vmap(function)(*(tensor.unsqueeze(0) for tensor in tensors))


def symbolically_traced(call, **options):
    function, tensors = of_tensors(call)
    return make_fx(function, **options)(*tensors)(*halved(tensors))


def differentiated(twins, call):
    # On CUDA some gradients of PyTorch's fused attentions are not finite, even without the kernels.
    with sdpa_kernel(SDPBackend.MATH):
        out = joined(call()[0])
        loss = weighted_sum(out)
        if not loss.requires_grad:
            return out
        parameters = [p for p in call.model.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    # Compared as one tensor: some may be only rounding errors of large terms that cancel.
    flat = [g.detach().flatten().float() for g in gradients if g is not None]
    return out.detach(), torch.cat(flat)


def forward_differentiated(twins, call):
    def function(inputs):
        return joined(call((), {**call.kwargs, **inputs})[0])

    primals = ({name: call.kwargs[name] for name in twins.family.inexact},)
    tangents = _pytree.tree_map(lambda tensor: tensor.flip(0), primals)
    with sdpa_kernel(SDPBackend.MATH):
        out, tangent = torch.func.jvp(function, primals, tangents)
    return out.detach(), tangent.detach()


def default_device(twins, call):
    with torch.device(twins.device):
        return without_grad()(twins, call)


def set_to(write, read, value, **options):
    """Call with a setting of PyTorch."""
    return without_grad(lambda: setting(write, value, read(), **options))


# Modes whose calls are captured into CUDA graphs.
_QUIET = {
    "no_grad": without_grad(),
    "inference_mode": in_context(torch.inference_mode),
    "both": in_context(torch.inference_mode, torch.no_grad),
    "default device": default_device,
    "default dtype": set_to(torch.set_default_dtype, torch.get_default_dtype, torch.float64),
    "deterministic": set_to(
        torch.use_deterministic_algorithms,
        torch.are_deterministic_algorithms_enabled,
        True,
        warn_only=True,
    ),
    "matmul precision": set_to(
        torch.set_float32_matmul_precision, torch.get_float32_matmul_precision, "high"
    ),
    "cudnn": without_grad(lambda: torch.backends.cudnn.flags(enabled=False)),
    "math attention": without_grad(lambda: sdpa_kernel(SDPBackend.MATH)),
    "attention_backend": without_grad(lambda: attention_dispatch.attention_backend("_native_math")),
    "other stream": without_grad(other_stream),
    "thread": in_thread,
    "threads": in_three_threads,
}
_LOUD = {
    "grad": in_context(torch.enable_grad),
    "autocast": autocast,
    "function mode": without_grad(ScalingFunctionMode),
    "scaling function mode": without_grad(
        lambda: ScalingFunctionMode(F.scaled_dot_product_attention)
    ),
    "dispatch mode": without_grad(ScalingDispatchMode),
    "scaling dispatch mode": without_grad(lambda: ScalingDispatchMode(torch.ops.aten.cos.default)),
    "anomaly": without_grad(lambda: torch.autograd.set_detect_anomaly(True)),
    "dual level": without_grad(torch.autograd.forward_ad.dual_level),
    "other weights": without_grad(run=with_other_weights),
    "vmap": without_grad(run=batched),
    "make_fx": without_grad(run=symbolically_traced),
    "make_fx before dispatch": without_grad(
        run=functools.partial(symbolically_traced, pre_dispatch=True)
    ),
}
_KERNELS = {
    "score_skip": without_grad(AttentionScoreSkipFunctionMode),
    "backward": differentiated,
    "jvp": forward_differentiated,
}
QUIET_MODES = list(_QUIET)
MODES = {**_QUIET, **_LOUD, **_KERNELS}
# Weights of the modes with graphs. Some are slow.
GRAPH_MODES = {
    **dict.fromkeys((*_QUIET, *_LOUD), 1),
    "make_fx": 0.05,
    "make_fx before dispatch": 0.05,
}
