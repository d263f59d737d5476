"""Programs that the tests start, and how many threads a test computes with."""

import contextlib
import subprocess
import sys

import torch


def run(*command, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, **options
    )


def run_python(code: str) -> str:
    process = run(sys.executable, "-c", code)
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


@contextlib.contextmanager
def one_thread():
    """For small tensors: waking threads costs more than it gives, on a busy machine much more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def compute_as_other_threads():
    """To be called first in a thread.

    PyTorch sets a thread's number of OpenMP threads when the thread first asks for it. A matrix product does
    not ask: it would be split across all cores, and its bits would differ from those of a later one.
    """
    torch.get_num_threads()
