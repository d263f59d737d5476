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
from ranks import run_ranks

RANKS = 2
HEADS = {"heads": 4, "head_dim": 64}
# Operations that need whole weights: one buffer for the products of two layers.
WITH_WHOLE_WEIGHTS = {"qwenimage21": ("swiglu",)}
SEEDS = 4


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


def sharded_pair(kernel, plain, *, is_injected_first=True):
    """(sharded and injected copy, sharded copy)"""
    model, own = copy.deepcopy(plain), copy.deepcopy(plain)
    if is_injected_first:
        kernel.inject_kernels(model)
    shard(model)
    kernel.inject_kernels(model)
    shard(own)
    return model, own


def check_values(kernel, name):
    family = FAMILIES[name]
    plain = family.model("cpu", heads=4)
    whole = copy.deepcopy(plain)
    kernel.inject_kernels(whole)
    for is_injected_first in (True, False):
        model, _ = sharded_pair(kernel, plain, is_injected_first=is_injected_first)
        for options in family.options.values():
            arguments = family.inputs("cpu", seed=3, **options)
            expected = run(plain, arguments)
            with KernelCalls() as calls:
                out = run(model, arguments)
            assert relative_distance(out, expected) < 1e-5, name
            assert calls.counts == operations(name, whole, arguments), name
        kernel.eject_kernels(model)
        with KernelCalls() as calls:
            out = run(model, arguments)
        assert relative_distance(out, expected) < 1e-5, name
        assert not calls.counts, name


def operations(name, whole, arguments):
    """Those of a rank, from those of one process with whole weights."""
    calls = kernel_calls(run, whole, arguments)
    return {key: n for key, n in calls.items() if key not in WITH_WHOLE_WEIGHTS.get(name, ())}


def check_accuracy(kernel, name):
    """Each rank's result is as close to the float32 model as eager code's, sharded or in one process."""
    family = FAMILIES[name]
    plain = family.model("cpu", torch.bfloat16, **HEADS)
    model, own = sharded_pair(kernel, plain)
    whole = copy.deepcopy(plain)
    kernel.inject_kernels(whole)
    exact = copy.deepcopy(plain).float()
    squares = torch.zeros(3, dtype=torch.float64)
    for seed in range(SEEDS):
        arguments = family.inputs("cpu", torch.bfloat16, seed=seed)
        expected = run(exact, family.cast(arguments, torch.float32)).double()
        for i, candidate in enumerate((model, own, plain)):
            squares[i] += (run(candidate, arguments) - expected).square().sum()
    assert kernel_calls(run, model, arguments) == operations(name, whole, arguments)
    error, sharded_error, eager_error = squares.sqrt().tolist()
    assert error <= 1.05 * min(eager_error, sharded_error)


def check_gradients(kernel, name):
    family = FAMILIES[name]
    pair = sharded_pair(kernel, family.model("cpu", heads=4))
    arguments = family.inputs("cpu", seed=3)
    gradients = []
    for model in pair:
        weighted_sum(model(**arguments, return_dict=False)[0]).backward()
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        gradients.append({name: getattr(g, "_local_tensor", g) for name, g in found.items()})
    mine, expected = gradients
    assert mine.keys() == expected.keys() and len(expected) > 20
    # Some, such as those of key biases, are zero except for rounding errors.
    rounding = 0.01 * torch.stack([g.norm() for g in expected.values()]).norm()
    for key, gradient in expected.items():
        assert (mine[key] - gradient).norm() <= 1e-4 * (gradient.norm() + rounding), key


def check_all_values(kernel, rank):
    allow_cpus()
    for name in PARALLEL:
        check_values(kernel, name)


def check_family(kernel, rank, name):
    allow_cpus()
    check_accuracy(kernel, name)
    check_gradients(kernel, name)


def check_loaded(kernel, rank, folder):
    """Each rank reads its part of the weights."""
    allow_cpus()
    family = FAMILIES["flux"]
    plain = family.model("cpu", heads=4)
    arguments = family.inputs("cpu", seed=3)
    config = TensorParallelConfig(tp_degree=RANKS)
    model = type(plain).from_pretrained(folder, parallel_config=config)
    kernel.inject_kernels(model)
    assert relative_distance(run(model, arguments), run(plain, arguments)) < 1e-5
    kernel.inject_kernels(plain)
    assert kernel_calls(run, model, arguments) == kernel_calls(run, plain, arguments)


def check_precision(kernel, rank):
    """FP8 weights and tensor parallelism exclude each other, in both orders with an error."""
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


@pytest.fixture
def _on_cpus(device):
    if device != "cpu":
        pytest.skip("the ranks would need a GPU each")


pytestmark = pytest.mark.usefixtures("_on_cpus")


def test_values(tmp_path):
    assert {"flux", "flux2", "qwenimage"} <= set(PARALLEL)
    run_ranks(check_all_values, RANKS, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", PARALLEL)
def test_accuracy_and_gradients(tmp_path, name):
    run_ranks(check_family, RANKS, tmp_path, name)


@pytest.mark.slow
def test_loaded(tmp_path):
    FAMILIES["flux"].model("cpu", heads=4).save_pretrained(tmp_path / "model")
    run_ranks(check_loaded, RANKS, tmp_path, tmp_path / "model")


@pytest.mark.slow
def test_precision(tmp_path):
    pytest.importorskip("torchao")
    run_ranks(check_precision, RANKS, tmp_path)
