"""An op on the path in C whose launches a stand-in for CUDA's driver receives, which reads arguments as the real one does."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from onepass.core import native, recording
from onepass.core import op as registration
from onepass.core.contract import Arg, Contract, Option, Out
from onepass.core.recording import Step
from onepass.formats import FLOATS

CONTRACT = Contract(
    "scaled_sum",
    args={
        "x": Arg("M N", "rows", FLOATS),
        "y": Arg("M N", "rows", "(x.dtype,)", optional=True),
        "places": Arg("M", "indices", (torch.int64,), optional=True, sample="index"),
        "others": Arg("M N", "more rows", FLOATS, many=True),
    },
    options={
        "factor": Option("float", 1.0, "factor"),
        "count": Option("int", 0, "count"),
        "name": Option("str", "", "name"),
        "kind": Option("ScalarType", None, "kind", optional=True),
    },
    outs={
        "total": Out("M N", "x.dtype", "factor * (x + y)", "out"),
        "sums": Out("M 1", "torch.float32", "sums", "sums_out"),
    },
    rules=(),
    rounding="none",
)
NO_OPTIONS = (1.0, 0, "", None)


class Config(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(ctypes.c_int * 3)),
        ("count", ctypes.c_uint),
    )


class Driver:
    """Records the arguments of each launch."""

    def __init__(self) -> None:
        self.device, self.context, self.error, self.capturing = 0, 0, 0, 0
        self.launched: list[tuple[Any, ...]] = []
        launch = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.POINTER(Config), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p
        )
        get = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))
        ask = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
        self.functions = launch(self.launch), get(self.get_device), ask(self.is_capturing)

    def is_capturing(self, stream: Any, status: Any) -> int:
        status[0] = self.capturing
        return 0

    def get_device(self, device: Any) -> int:
        device[0] = self.device
        return self.context

    def launch(self, config: Any, function: Any, pointers: Any, extra: Any) -> int:
        given = config[0]
        words = tuple(struct.unpack("<Q", ctypes.string_at(pointers[i], 8))[0] for i in range(5))
        attributes = [tuple(given.attributes[i]) for i in range(given.count)]
        self.launched.append((function, given.grid_x, given.block_x, given.shared, attributes, *words))
        return self.error

    @property
    def addresses(self) -> tuple[Any, ...]:
        return self.launched[-1][-5:-1]


@pytest.fixture
def driver() -> Iterator[Driver]:
    fake = Driver()
    addresses = [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in fake.functions]
    native._load()[0].set_cuda(*addresses)
    yield fake
    native._load()[0].set_cuda(0, 0, 0)


class Launcher:
    """A stand-in for a loaded kernel. Python's launches count as ``slow``."""

    addresses = (0, 1, 2, 3)

    def __init__(self) -> None:
        self.slow: list[tuple[Any, ...]] = []
        self.repeatable = True

    def __call__(self, grid: int, arguments: Any) -> None:
        if recording.tape.on:
            recording.note(self if self.repeatable else None, grid, arguments)
        self.slow.append(tuple(arguments))

    def step(self, grid: int, arguments: Any) -> Step | None:
        words = [int(a or 0) for a in arguments[:4]] + [77]
        places = {i: i for i in range(4)}
        return Step(True, (1234, grid, 128, 512, True, 0), struct.pack("<5Q", *words), places)


class Memory:
    """Memory that a kernel marks as its own: the pieces that were taken, and the numbers of those discarded."""

    def __init__(self, per_stream: bool = False) -> None:
        self.pieces: list[Tensor] = []
        self.discarded: list[int] = []
        self.source = recording.Source(self.take, self.discarded.append, per_stream=per_stream)

    def take(self) -> tuple[Tensor, int]:
        self.pieces.append(torch.empty(4))
        return self.pieces[-1], len(self.pieces)

    def marked(self) -> int:
        """The address of a new piece."""
        address = self.take()[0].data_ptr()
        recording.mark(address, self.source)
        return address


class Op(registration.Op):
    """The contract with a kernel that counts its calls. torch's dispatcher does not know it."""

    table: Any

    def __init__(
        self,
        kernel: Callable[[Op, Any], None] | None = None,
        memory: Callable[..., None] | None = None,
        contract: Contract = CONTRACT,
    ) -> None:
        self.launcher = Launcher()
        self.asked = 0
        self._run_kernel = kernel or Op.one_launch
        self._memory = memory or (lambda *values: None)
        super().__init__(contract, self.kernel)
        self.load_table()

    def _define(self) -> tuple[Any, Any]:
        return None, None

    def _dispatch(self, inputs: Any, given: Any) -> Any:
        return None

    def _check_memory(self, inputs: Any, outputs: Any) -> None:
        self._memory(inputs, outputs)

    def kernel(self, specs: Any, a: Any) -> None:
        self.asked, self.kept = self.asked + 1, specs
        self._run_kernel(self, a)

    def one_launch(self, a: Any) -> None:
        second = None if a.y is None else a.y.data_ptr()
        self.launcher(a.x.shape[0], [a.x.data_ptr(), second, a.out.data_ptr(), a.sums_out.data_ptr()])

    def of(self, x: Any, y: Any = None, places: Any = None, *outs: Tensor | None, options: Any = NO_OPTIONS) -> Any:
        """Call the op with defaults for what is not given."""
        return self(x, y, places, (), *options, *(outs or (None, None)))

    def known(self, *arguments: Any, **options: Any) -> bool:
        """Whether such a call is repeated in C."""
        hits = self.table.counts()["hits"]
        self.of(*arguments, **options)
        return bool(self.table.counts()["hits"] > hits)

    def learn(self, *arguments: Any, **options: Any) -> None:
        """Make a call twice, so that it is known."""
        self.of(*arguments, **options)
        self.of(*arguments, **options)


def rows() -> Tensor:
    return torch.randn(3, 8)
