"""The CPU build is no slower than eager PyTorch: every operation and dtype, 2x256x2048, 2 threads.

Both are timed in turn, many times over, so that whatever else the machine does weighs on both, and
the medians are compared. A slow result is measured again before it counts.
"""

import statistics
import time

import pytest
import torch

import eager
from inputs import OPERATIONS, QK_OPERATIONS, every_dtype, sample

SHAPE = (2, 256, 2048)
THREADS = 2
ROUNDS = 25
ATTEMPTS = 4
# What the medians of two equally fast functions were seen to differ by.
MEASUREMENT_NOISE = 1.05

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
    start = time.perf_counter()
    function(**arguments)
    return time.perf_counter() - start


def ratio_of_medians(function, other, arguments):
    """Time of `function` over the time of `other`."""
    times, other_times = [], []
    for index in range(ROUNDS):
        pair = [(function, times), (other, other_times)]
        for one, results in pair if index % 2 else reversed(pair):
            results.append(seconds(one, arguments))
    return statistics.median(times) / statistics.median(other_times)


@pytest.mark.parametrize("name", OPERATIONS)
@every_dtype
def test_no_slower_than_eager(kernel, device, name, dtype):
    function, arguments = sample(kernel, name, dtype=dtype, device=device, shape=SHAPE, heads=32)
    other = getattr(eager, "qk_norm_rope" if name in QK_OPERATIONS else name)
    ratios = []
    with torch.no_grad():
        for one in (function, other):
            seconds(one, arguments)  # first touch of memory and of code
        for _ in range(ATTEMPTS):
            ratios.append(ratio_of_medians(function, other, arguments))
            if ratios[-1] <= MEASUREMENT_NOISE:
                return
    pytest.fail(f"took {', '.join(f'{ratio:.2f}' for ratio in ratios)} times as long as eager")
