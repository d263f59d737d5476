"""Results of benchmarks in a test's folder, and the tables made from them."""

import math

from benchmarks.harness import comparison, history
from benchmarks.operations import (
    bench_activation,
    bench_gated_residual,
    bench_group_norm,
    bench_norm,
    bench_rope,
    bench_softmax,
)

import render_docs

FAMILIES = {
    "norm": bench_norm,
    "gated_residual": bench_gated_residual,
    "rope": bench_rope,
    "activation": bench_activation,
    "softmax": bench_softmax,
    "group_norm": bench_group_norm,
}
ENVIRONMENT = dict.fromkeys(("device", "torch", "diffusers", "kernels", "date", "command"), "x")


def store(results, name, result):
    """Writes the only result of a benchmark."""
    history.store(name, result, results)


def load(results, name):
    """Reads the only result of a benchmark."""
    (result,) = history.kept(name, results)
    return result


def rendered(results, name):
    return render_docs.render(f"# T\n\n<!-- table: {name} -->\n<!-- end table -->\n", results)


def rows_of(results, name):
    """The cells of a table's rows, without its header."""
    lines = [line for line in rendered(results, name).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]


def store_operations(folder):
    """Results at the real sizes: this package copies at 3 TB/s, eager takes thrice as long."""
    for name, module in FAMILIES.items():
        entries = []
        for workload in module.FAMILY.workloads:
            moved = 4 * math.prod(workload.shape)
            ours = moved / 3e6
            samples = {
                "ours": [ours],
                "eager": [3 * ours],
                "compiled default": [2.5 * ours],
                "compiled max-autotune-no-cudagraphs": [2.4 * ours],
                "liger": [2 * ours],
                "quack": [1.25 * ours],
                "copy": [ours],
                "large_copy": [(1 << 30) / 3e6],
            }
            rates = comparison.rates(samples, moved, 1 << 30)
            entry = {"operation": workload.operation, "variant": workload.variant}
            entry |= {"shape": list(workload.shape), "bytes": moved, "failed": {}}
            entries.append({**entry, "cold": rates, "warm": rates})
        peers = {"liger": "0.8.5"}
        result = {"environment": ENVIRONMENT, "peers": peers, "workloads": entries}
        store(folder, f"operations/{name}", result)
