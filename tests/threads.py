"""How many threads a test computes with."""

import contextlib

import torch


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
