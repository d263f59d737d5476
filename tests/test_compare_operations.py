"""benchmarks/compare_operations.py, on tensors of a few kilobytes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CHECKOUT = Path(__file__).resolve().parents[1]
BENCHMARKS = CHECKOUT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import compare_operations  # noqa: E402

SIZE = 4096
WORKLOADS = [
    workload
    for dtype in compare_operations.DTYPES
    for table in (compare_operations.row_workloads, compare_operations.rope_workloads)
    for workload in table(dtype, SIZE)
]


def compare(*options):
    """In a process of its own, as the tool is used: a build that is loaded stays."""
    command = [sys.executable, BENCHMARKS / "compare_operations.py", CHECKOUT, *options]
    return subprocess.run(command, capture_output=True, text=True)


def test_each_workload_is_there_once():
    names = [str(workload) for workload in WORKLOADS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("workload", WORKLOADS[:: len(WORKLOADS) // 60], ids=str)
def test_operations_take_the_arguments_of_a_workload(kernel, device, workload):
    kernels = dict.fromkeys(("before", "after"), kernel)
    before, after = compare_operations.calls(workload, kernels, device).values()
    tensors = [t for t in (*before.args, *before.keywords.values()) if isinstance(t, torch.Tensor)]
    is_misaligned = [t.data_ptr() % 16 != 0 for t in tensors if t.dtype != torch.float32]
    assert all(is_misaligned) if workload.is_misaligned else not any(is_misaligned)
    for one, other in zip(*(compare_operations.outputs(f()) for f in (before, after)), strict=True):
        assert torch.equal(one, other)
        assert one.shape[-1] == workload.shape[-1]


def test_a_build_is_compared_with_itself(device, tmp_path):
    output = tmp_path / "out.json"
    only = "^(layer_norm|rope) .*float16 "
    options = ("--bytes", str(SIZE), "--rounds", "1", "--output", output, "--device", str(device))
    run = compare("--only", only, *options)
    assert run.returncode == 0, run.stderr
    entries = json.loads(output.read_text())["workloads"]
    assert {entry["operation"] for entry in entries} == {"layer_norm", "rope"}
    for entry in entries:
        assert entry["dtype"].endswith("float16")
        assert entry["distance"] == 0
        assert list(entry["microseconds"]) == ["before", "before, again", "after"]
        assert entry["ratio"] > 0


@pytest.mark.parametrize(
    ("only", "message"), [("nothing", "names no workload"), ("(", "is no regular expression")]
)
def test_an_expression_that_names_nothing_is_refused(only, message):
    run = compare("--only", only)
    assert run.returncode == 2
    assert message in run.stderr
