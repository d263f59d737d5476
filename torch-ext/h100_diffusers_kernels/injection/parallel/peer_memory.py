"""All-to-alls of GPUs of one host: each copies into the memory of the others (PyTorch's symmetric memory).

NCCL's all-to-all computes on multiprocessors and reaches a third of NVLink's rate for the activations of a
picture. These copies run on copy engines, on a stream of their own, beside the computation.

A rank may write to a buffer of another one again after a barrier at which the other arrives after it has read
the buffer. Between two exchanges of heads there is one: that of the results. Gathers alternate between two
buffers, so that there is that of the other buffer. The gather of a model's output is one, too.
"""

from __future__ import annotations

import logging
import socket
import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .groups import host_group

logger = logging.getLogger("h100_diffusers_kernels")

_allocations = 0
_NAME = "_h100_diffusers_kernels_peers"  # the attribute of a configuration


class PeerMemory:
    """Buffers of the ranks of a group, one for each name."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group, self._device = group, device
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._buffers: dict[str, list[Tensor]] = {}  # of all ranks, in bytes
        self._places: dict[Any, Any] = {}
        self._sent: list[Tensor] = []
        self._turn = 0
        self._set_up()

    def send(self, name: str, parts: Tensor) -> Tensor:
        """Sends ``parts[r]`` to rank r; each is contiguous. The ranks' parts for this one will be in the
        result, of the same shape, after ``wait``. Until then the caller does not write to ``parts``."""
        key = name, parts.shape, parts.dtype
        places = self._places.get(key) or self._find_places(key, parts)
        buffer, own, others = places
        self._sent.append(parts)  # its memory is not used again until then
        with self._on_stream():
            for peer, place in others:
                place.copy_(parts[peer])
        own.copy_(parts[self._rank])
        return buffer

    def gather(self, name: str, x: Tensor) -> Tensor:
        """Sends x to all ranks. Their x will be in the result, one after the other, after ``wait``."""
        return self.send(f"{name} {self._turn}", x.contiguous().expand(self._size, *x.shape))

    def wait(self) -> None:
        """Has the current stream wait for all parts that were sent to this rank."""
        self._barrier()
        self._sent.clear()
        self._turn = 1 - self._turn

    def _find_places(self, key: Any, parts: Tensor) -> Any:
        """This rank's buffer, its own part there, and its part in each other rank's."""
        name, shape, dtype = key
        size = parts.numel() * parts.element_size()
        if name not in self._buffers or self._buffers[name][0].numel() < size:
            self._buffers[name] = self._allocate(size)
            self._places = {each: self._places[each] for each in self._places if each[0] != name}
        with torch.inference_mode(False):  # they outlive the call
            buffers = [each[:size].view(dtype).view(shape) for each in self._buffers[name]]
            parts_here = [buffer[self._rank] for buffer in buffers]
        others = [(self._rank + i) % self._size for i in range(1, self._size)]
        found = self._places[key] = (
            buffers[self._rank],
            parts_here[self._rank],
            [(peer, parts_here[peer]) for peer in others],
        )
        return found

    # CUDA

    def _set_up(self) -> None:
        self._stream = torch.cuda.Stream(self._device)
        self._callers_stream = torch.cuda.current_stream(self._device)
        self._limit_ms = int(host_group(self._group).time_limit.total_seconds() * 1e3)
        self._handle: Any = None
        self._allocate(16)

    def _allocate(self, size: int) -> list[Tensor]:
        from torch.distributed import _symmetric_memory as memory

        global _allocations
        counts = host_group(self._group).gather(_allocations)
        if any(count != counts[0] for count in counts):
            # PyTorch numbers them in each process. It would wait for ranks with other numbers.
            raise RuntimeError("context parallelism: a GPU has shared memory with others before")
        _allocations += 1
        torch.cuda.synchronize(self._device)  # a smaller buffer may be freed next
        own = memory.empty(size, dtype=torch.uint8, device=self._device)
        handle: Any = memory.rendezvous(own, self._group.group_name)
        self._handle = self._handle or handle
        sizes = [handle.get_buffer(rank, (size,), torch.uint8) for rank in range(self._size)]
        return [own if rank == self._rank else each for rank, each in enumerate(sizes)]

    def _on_stream(self) -> Any:
        stream = torch.cuda.current_stream(self._device)
        if stream != self._callers_stream:
            if not torch.cuda.is_current_stream_capturing():  # which waits for all streams
                self._stream.wait_stream(self._callers_stream)  # it may still read the buffers
            self._callers_stream = stream
        self._stream.wait_stream(stream)
        return torch.cuda.stream(self._stream)

    def _barrier(self) -> None:
        with torch.cuda.stream(self._stream):
            self._handle.barrier(channel=0, timeout_ms=self._limit_ms)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


# The class by device type.
PEERS: dict[str, Any] = {"cuda": PeerMemory}


def peer_memory(config: Any, device: torch.device) -> PeerMemory | None:
    """That of the ranks of Ulysses; None if they cannot have one."""
    if device.type not in PEERS:
        return None
    state = vars(config)
    if _NAME not in state:
        state[_NAME] = _connect(config._ulysses_mesh.get_group(), device)
    peers: PeerMemory | None = state[_NAME]
    return peers


def _connect(group: Any, device: torch.device) -> PeerMemory | None:
    """Memory that all ranks can write to, or None on all ranks."""
    ranks, here = host_group(group), zlib.crc32(socket.gethostname().encode())
    others = {*range(torch.cuda.device_count())} - {device.index}
    peers, reason = None, None
    if any(host != here for (host,) in ranks.gather(here)):
        reason = "the GPUs are on several hosts"
    elif not all(torch.cuda.can_device_access_peer(device, other) for other in others):
        reason = "a GPU cannot write to the memory of another one"
    if all(is_able for (is_able,) in ranks.gather(reason is None)):
        try:
            peers = PEERS[device.type](group, device)
        except (ImportError, AttributeError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
        if all(is_able for (is_able,) in ranks.gather(peers is not None)):
            return peers
    reason = reason or "another GPU needs it"
    logger.warning("context parallelism: NCCL exchanges heads: %s", reason)
    return None
