"""Tensor parallelism: each of two processes has half of the heads and of the feed-forwards' features."""

import copy
import sys

import pytest
import torch
from diffusers.hooks import tensor_parallel
from diffusers.models._modeling_parallel import TensorParallelConfig

from changes import weighted_sum
from checks import relative_distance
from families import FAMILIES, run
from ltx_models import KernelCalls, kernel_calls
from ranks import in_ranks

RANKS = 2
HEADS = {"heads": 4, "head_dim": 64}
# Operations that need whole weights: one buffer for the products of two layers.
WITH_WHOLE_WEIGHTS = {"qwenimage21": ("swiglu",)}
SEEDS = 3


def has_plan(family):
    classes = vars(sys.modules[family.module]).values()
    return any(getattr(cls, "_tp_plan", None) for cls in classes)


PARALLEL = [name for name, family in FAMILIES.items() if has_plan(family)]


def allow_cpus():
    """For this process: diffusers refuses meshes of CPUs, and divides by the number of accelerators."""
    if "cpu" not in tensor_parallel._SUPPORTED_TP_DEVICES:
        tensor_parallel._SUPPORTED_TP_DEVICES += ("cpu",)
    torch.accelerator.device_count = lambda: 1


def shard(model):
    model.enable_parallelism(config=TensorParallelConfig(tp_degree=RANKS))
    return model


def sharded(kernel, plain, *, is_injected_first=True):
    """A sharded and injected copy."""
    model = copy.deepcopy(plain)
    if is_injected_first:
        kernel.inject_kernels(model)
    shard(model)
    kernel.inject_kernels(model)
    return model


@pytest.mark.parametrize("name", PARALLEL)
@in_ranks
def test_values(kernel, name):
    allow_cpus()
    family = FAMILIES[name]
    plain = family.model("cpu", heads=4)
    whole = copy.deepcopy(plain)
    kernel.inject_kernels(whole)
    known = []
    for options in family.options.values():
        arguments = family.inputs("cpu", seed=3, **options)
        known.append((arguments, run(plain, arguments), operations(name, whole, arguments)))
    for is_injected_first in (True, False):
        model = sharded(kernel, plain, is_injected_first=is_injected_first)
        for arguments, expected, operations_of_a_rank in known if is_injected_first else known[:1]:
            with KernelCalls() as calls:
                out = run(model, arguments)
            assert relative_distance(out, expected) < 1e-5
            assert calls.counts == operations_of_a_rank
        kernel.eject_kernels(model)
        with KernelCalls() as calls:
            out = run(model, arguments)
        assert relative_distance(out, expected) < 1e-5
        assert not calls.counts


def operations(name, whole, arguments):
    """Those of a rank, from those of one process with whole weights."""
    calls = kernel_calls(run, whole, arguments)
    return {key: n for key, n in calls.items() if key not in WITH_WHOLE_WEIGHTS.get(name, ())}


@pytest.mark.slow
@pytest.mark.parametrize("name", PARALLEL)
@in_ranks
def test_accuracy_and_gradients(kernel, name):
    allow_cpus()
    check_accuracy(kernel, name)
    check_gradients(kernel, name)


def check_accuracy(kernel, name):
    """Each rank's result is as close to the float32 model as eager code's, sharded or in one process."""
    family = FAMILIES[name]
    plain = family.model("cpu", torch.bfloat16, **HEADS)
    model, own = sharded(kernel, plain), shard(copy.deepcopy(plain))
    whole = copy.deepcopy(plain)
    kernel.inject_kernels(whole)
    exact = copy.deepcopy(plain).float()
    squares = torch.zeros(3, dtype=torch.float64)
    for seed in range(SEEDS):
        arguments = family.inputs("cpu", torch.bfloat16, seed=seed, batch=8)
        expected = run(exact, family.cast(arguments, torch.float32)).double()
        for i, candidate in enumerate((model, own, plain)):
            squares[i] += (run(candidate, arguments) - expected).square().sum()
    assert kernel_calls(run, model, arguments) == operations(name, whole, arguments)
    error, sharded_error, eager_error = squares.sqrt().tolist()
    assert error <= 1.05 * min(eager_error, sharded_error)


def check_gradients(kernel, name):
    family = FAMILIES[name]
    plain = family.model("cpu", heads=4)
    arguments = family.inputs("cpu", seed=3)
    gradients = []
    for model in (sharded(kernel, plain), shard(plain)):
        weighted_sum(model(**arguments, return_dict=False)[0]).backward()
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        gradients.append({name: getattr(g, "_local_tensor", g) for name, g in found.items()})
    mine, expected = gradients
    assert mine.keys() == expected.keys() and len(expected) > 20
    # Some, such as those of key biases, are zero except for rounding errors.
    rounding = 0.01 * torch.stack([g.norm() for g in expected.values()]).norm()
    for key, gradient in expected.items():
        assert (mine[key] - gradient).norm() <= 1e-4 * (gradient.norm() + rounding), key


@in_ranks
def test_loaded(kernel, rank, tmp_path):
    """Each rank reads its part of the weights."""
    allow_cpus()
    family = FAMILIES["flux"]
    plain = family.model("cpu", heads=4)
    arguments = family.inputs("cpu", seed=3)
    folder = tmp_path / f"model{rank}"
    plain.save_pretrained(folder)
    config = TensorParallelConfig(tp_degree=RANKS)
    model = type(plain).from_pretrained(folder, parallel_config=config)
    kernel.inject_kernels(model)
    assert relative_distance(run(model, arguments), run(plain, arguments)) < 1e-5
    kernel.inject_kernels(plain)
    assert kernel_calls(run, model, arguments) == kernel_calls(run, plain, arguments)


@in_ranks
def test_precision(kernel):
    """FP8 weights and tensor parallelism exclude each other, in both orders with an error."""
    pytest.importorskip("torchao")
    allow_cpus()
    for is_sharded_first in (True, False):
        model = FAMILIES["flux"].model("cpu", torch.bfloat16, heads=8, head_dim=64)
        if is_sharded_first:
            shard(model)
            with pytest.raises(ValueError, match=r"DTensor"):
                kernel.inject_kernels(model, precision="fp8")
        else:
            assert kernel.inject_kernels(model, precision="fp8").quantized
            with pytest.raises(NotImplementedError, match=r"Float8Tensor"):
                shard(model)
