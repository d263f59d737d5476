"""What the ranks of tests rely on."""

import pytest
import torch
import torch.distributed as dist

from ranks import in_ranks


@pytest.mark.parametrize("ranks", [1])
@in_ranks
def test_many_gathers_at_a_time(kernel, ranks):
    """With two workers of gloo this ends by a signal."""
    tensors = list(torch.arange(30_000.0)[:, None])
    gathered = [torch.empty(1) for _ in tensors]
    works = [
        dist.group.WORLD.allgather_into_tensor_coalesced([out], [own])
        for own, out in zip(tensors, gathered, strict=True)
    ]
    for work in works:
        work.wait()
    assert torch.equal(torch.stack(gathered), torch.stack(tensors))
