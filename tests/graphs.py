"""Shared by the tests of CUDA graphs: graphs on a CPU, and pairs of models with and without graphs."""

import contextlib
import copy
import functools
import sys

import pytest
import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor, wait_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from family import joined


def module_of(kernel, name):
    """One of the modules of the package's injection."""
    return sys.modules[f"{kernel.__name__}.injection.{name}"]


@pytest.fixture
def graphs(kernel, monkeypatch):
    """The package with emulated graphs on a CPU."""
    use_emulated_graphs(kernel)
    monkeypatch.setitem(module_of(kernel, "graphs.cuda_graphs").GRAPHS, "cpu", EmulatedGraph)
    return kernel


def use_emulated_graphs(kernel, *modes):
    """The emulated capture is a dispatch mode, in which the kernels must still run."""
    module_of(kernel, "core.checks").TRANSPARENT_MODES.update((Record, *modes))


class Pair:
    """A model with graphs, and the same model injected without graphs. ``change`` is applied to both."""

    def __init__(self, kernel, family, device, dtype=torch.float32, config=None, **options):
        self.family, self.device, self.dtype = family, device, dtype
        self.model = family.model(device, dtype, **(config or {})).eval()
        self.plain = copy.deepcopy(self.model)
        kernel.inject_kernels(self.plain)
        self.report = kernel.inject_kernels(self.model, cuda_graphs=True, **options)
        self.seed = 0

    @property
    def calls(self):
        (calls,) = self.report.cuda_graphs
        return calls

    def both(self, change):
        change(self.plain)
        change(self.model)

    def inputs(self, **options):
        self.seed += 1
        return self.family.inputs(self.device, self.dtype, seed=self.seed, **options)

    @torch.inference_mode()
    def call(self, arguments=None, **options):
        """The output with graphs, after a bitwise comparison with the one without."""
        arguments = self.inputs(**options) if arguments is None else arguments
        out = joined(self.model(**arguments, return_dict=False)[0])
        expected = joined(self.plain(**arguments, return_dict=False)[0])
        torch.testing.assert_close(
            out, expected, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{text}\n{self.calls}"
        )
        return out

    def captured(self, **options):
        """Calls until the first replay; returns the number of calls."""
        replayed = self.calls.replayed
        for calls in range(1, 9):
            self.call(**options)
            if self.calls.replayed > replayed:
                return calls
        raise AssertionError(f"no replay in 8 calls: {self.calls}")


# ------------------------------------------------------------------------------------------------
# CUDA graphs, emulated on a CPU: records a call's operations and repeats them.
#
# Like a graph, it records addresses, not objects. A replayed operation reads and writes the memory of the
# capture, even if the tensors have changed since. Intermediate results have memory of the graph. A replay
# runs no Python code of the model, and a capture computes nothing.


_OF_UNKNOWN_SHAPE = (torch.ops.aten.nonzero.default, torch.ops.aten.masked_select.default)
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")


class EmulatedGraph:
    """Stands in for the package's ``CudaGraph``."""

    alive = 0  # graphs that were captured and not reset

    def __init__(self, device, pool):
        self._operations = []
        self._results = []
        self._is_inference = torch.is_inference_mode_enabled()

    @staticmethod
    def is_capturing():
        return False

    def capture(self, run):
        record = Record(self._operations)
        # Within a dispatch mode, operations are made of others as in no_grad only outside of inference mode.
        with torch.inference_mode(False), torch.no_grad(), record:
            result = run()
        self._results = [
            (tensor, record.at_address(tensor))
            for tensor in tree_leaves(result)
            if isinstance(tensor, Tensor)
        ]
        EmulatedGraph.alive += 1
        return result

    def replay(self, before, after):
        before()
        with contextlib.nullcontext() if self._is_inference else torch.no_grad():
            for func, args, kwargs, out in self._operations:
                read = {_memory(tensor) for tensor in _tensors_of((args, kwargs))}
                for old, new in zip(
                    _tensors_of(out), _tensors_of(func(*args, **kwargs)), strict=True
                ):
                    if _memory(old) not in read:
                        old.copy_(new)
            for tensor, mine in self._results:
                if _memory(tensor) != _memory(mine):
                    tensor.copy_(mine)
        return after()

    def reset(self):
        if self._operations:
            EmulatedGraph.alive -= 1
        self._operations.clear()
        self._results.clear()


class Record(TorchDispatchMode):
    def __init__(self, operations):
        super().__init__()
        self._operations = operations
        self._made = {}  # the graph's memory for tensors made in the call

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # each collective is waited for where it is called
        args = tree_map_only(AsyncCollectiveTensor, lambda tensor: tensor.elem, args)
        if func.namespace == "_c10d_functional":
            # A capture of a collective waits for no rank.
            shape = func(*tree_map_only(Tensor, lambda tensor: tensor.to("meta"), args)).shape
            operands = tree_map_only(Tensor, self.at_address, (args, kwargs))
            result = args[0].new_empty(shape)
            return self._recorded(functools.partial(_complete, func), *operands, result, read=())
        if func is torch.ops.aten.lift_fresh.default:  # a constant, written in the call
            self._made[_storage(args[0])] = args[0].untyped_storage().clone()
            return func(*args)
        if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
            with self:  # its decomposition depends on more than its operands
                return func.decompose(*args, **kwargs)
        _refuse(func, args, kwargs)
        operands = tree_map_only(Tensor, self.at_address, (args, kwargs))
        read = {_storage(tensor) for tensor in _tensors_of((args, kwargs))}
        written = [(tensor, tensor.clone()) for tensor in _written(func, args, kwargs)]
        result = func(*args, **kwargs)
        for tensor, before in written:
            tensor.copy_(before)
        return self._recorded(func, *operands, result, read)

    def _recorded(self, func, args, kwargs, result, read):
        for tensor in _tensors_of(result):
            if _storage(tensor) not in read:
                size = tensor.untyped_storage().nbytes()
                self._made[_storage(tensor)] = torch.UntypedStorage(size)
                if tensor.is_floating_point():
                    tensor.zero_()
        out = tree_map_only(Tensor, self.at_address, result)
        self._operations.append((func, args, kwargs, out))
        return result

    def at_address(self, tensor):
        """Another tensor with the same memory, unaffected by assignments to ``data``."""
        if hasattr(tensor, "__tensor_flatten__"):
            return tensor
        storage = self._made.get(_storage(tensor), tensor.untyped_storage())
        other = torch.empty(0, dtype=tensor.dtype)
        other.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        # Whether a product is one of matrices or of batches depends on it, without gradients too.
        return other.requires_grad_(tensor.requires_grad)


def _complete(collective, *args, **kwargs):
    return wait_tensor(collective(*args, **kwargs))


def _refuse(func, args, kwargs):
    """Refuses the same as a capture by CUDA: waits of the host, and PyTorch's random numbers."""
    is_mask = any(tensor.dtype in (torch.bool, torch.uint8) for tensor in _indices(func, args))
    if func._schema.name.endswith("index_put_") and args[2].numel() == 1:
        is_mask = False  # a fill writes one value to any number of elements
    if is_mask or torch.Tag.data_dependent_output in func.tags or func in _OF_UNKNOWN_SHAPE:
        raise RuntimeError("operation not permitted when stream is capturing")
    if torch.Tag.nondeterministic_seeded in func.tags:
        names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if "dropout_p" not in names or given.get("dropout_p", 0.0) != 0.0:
            raise RuntimeError("the generator is not captured: it draws random numbers")


def _indices(func, args):
    """The tensors by which an operation indexes. Only the device knows the number of a mask's elements."""
    if func.overloadpacket.__name__ in _INDEXING:
        yield from _tensors_of(args[1])


def _written(func, args, kwargs):
    """The operands that an operation writes to."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors_of(args[i] if i < len(args) else kwargs.get(argument.name))


def _storage(tensor):
    return tensor.untyped_storage()._cdata


def _memory(tensor):
    return tensor.untyped_storage().data_ptr()


def _tensors_of(value):
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_of(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_of(item)
