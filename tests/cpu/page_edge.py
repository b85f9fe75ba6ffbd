"""Tensors that end where an inaccessible page begins: a kernel that reads one byte more crashes."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

_pages: list[mmap.mmap] = []  # stay mapped as long as the process


def against_the_edge(tensor: Tensor) -> Tensor:
    """A copy whose last byte is the last of a page, and the next page cannot be read."""
    size = tensor.numel() * tensor.element_size()
    room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, room + mmap.PAGESIZE)
    _pages.append(memory)
    raw = torch.frombuffer(memory, dtype=torch.uint8)
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(raw.data_ptr() + room), mmap.PAGESIZE, 0) == 0
    return raw[room - size : room].view(tensor.dtype).view(tensor.shape).copy_(tensor)
