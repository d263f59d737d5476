"""The CPU build is no slower than eager PyTorch: every operation and dtype, 2x256x2048, 2 threads.

Both are timed in turn, many times over, and the medians are compared. Each time is the shortest of
a few calls, as a thread that another process keeps from running would weigh more than the operation
does. A slow result is measured again before it counts.
"""

import statistics
import time

import pytest
import torch

import eager
from inputs import (
    DTYPES,
    OPERATIONS,
    QK_OPERATIONS,
    for_operations,
    sample,
    without_optional,
)

SHAPE = (2, 256, 2048)
THREADS = 2
ROUNDS = 15
CALLS = 5
ATTEMPTS = 6
# Times eager's that an operation may take, by its options and dtype; 1 where nothing is said.
LIMITS = {
    # Eager, too, reads and writes everything just once: equal speed is all there is, and the medians
    # of equally fast functions differ by this, in some processes for as long as they live.
    **{("gated_residual", "plain", dtype): 1.25 for dtype in DTYPES},
    ("layer_norm", "full", torch.float32): 1.25,
    # Exact GELU is one pass in eager, too, and bound by arithmetic: eager's is 1.0 to 1.3 times as
    # fast, by the processor (1.1 to 1.3 on a Cascade Lake with AVX-512).
    **{("gelu", "plain", dtype): 1.4 for dtype in DTYPES},
    # Products of float32 matrices, and eager's may be of 16 bits where the processor has such.
    **{("attention", options, dtype): 3.0 for options in ("full", "plain") for dtype in DTYPES},
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CUDA build has no CPU operations"),
]


@pytest.fixture(autouse=True)
def two_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(threads)


def seconds(function, arguments):
    """Of the fastest call."""
    times = []
    for _ in range(CALLS):
        start = time.perf_counter()
        function(**arguments)
        times.append(time.perf_counter() - start)
    return min(times)


def ratio_of_medians(function, other, arguments):
    """Time of `function` over the time of `other`."""
    times, other_times = [], []
    for index in range(ROUNDS):
        pair = [(function, times), (other, other_times)]
        for one, results in pair if index % 2 else reversed(pair):
            results.append(seconds(one, arguments))
    return statistics.median(times) / statistics.median(other_times)


@for_operations(OPERATIONS, DTYPES)
@pytest.mark.parametrize("options", ["full", "plain"])
def test_no_slower_than_eager(kernel, device, name, options, dtype):
    """`full`: with weights, gate and tanh; `plain`: without."""
    function, arguments = sample(kernel, name, dtype=dtype, device=device, shape=SHAPE, heads=32)
    if options == "plain":
        arguments = without_optional(name, arguments)
    other = getattr(eager, "qk_norm_rope" if name in QK_OPERATIONS else name)
    limit = LIMITS.get((name, options, dtype), 1.0)
    ratios = []
    with torch.no_grad():
        for one in (function, other):
            seconds(one, arguments)  # first touch of memory and of code
        for _ in range(ATTEMPTS):
            ratios.append(ratio_of_medians(function, other, arguments))
            if ratios[-1] <= limit:
                return
    pytest.fail(f"took {', '.join(f'{ratio:.2f}' for ratio in ratios)} times as long as eager")
