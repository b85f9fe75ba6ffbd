"""Where things are: the fields of the argument block, and the rows of each tensor."""

from __future__ import annotations

from typing import NamedTuple

from llvmlite import ir

from ...specs.layout import LEVELS
from ...specs.rms_norm import RowSpec
from .. import arguments
from .function import Cell, Function
from .vec import F32, I64, Float, Int


class Fields:
    """The argument block's values, loaded once a call."""

    def __init__(self, f: Function, spec: RowSpec, block: Int) -> None:
        self.f = f
        self.block = block
        self.offsets = arguments.offsets(spec)

    def __contains__(self, name: str) -> bool:
        return name in self.offsets

    def integer(self, name: str, index: int = 0) -> Int:
        """A 64-bit field."""
        return Int(self.f.builder, self.f.load(self.block + (self.offsets[name] + 8 * index), I64, lanes=0))

    def number(self, name: str) -> Float:
        """A float64 field, rounded to float32."""
        raw = self.f.load(self.block + self.offsets[name], ir.DoubleType(), lanes=0)
        return Float(self.f.builder, self.f.builder.fptrunc(raw, F32))

    def count(self, name: str, by: Int) -> Int:
        """Add to a 64-bit field that threads share; returns what was there."""
        counter = self.f.pointer(self.block + self.offsets[name])
        return Int(self.f.builder, self.f.builder.atomic_rmw("add", counter, by.ir, "monotonic"))


class Rows:
    """Walks over a range of rows: the current row's address in each tensor."""

    def __init__(self, f: Function, spec: RowSpec, fields: Fields, first: Int) -> None:
        self.f = f
        self.sizes = {"x": spec.x.itemsize, "codes": 1}
        for name, dtype in (("residual", spec.residual), ("new_residual", spec.residual), ("norm", spec.norm)):
            if dtype is not None:
                self.sizes[name] = dtype.itemsize
        if spec.scale is not None:
            self.sizes["scale"] = spec.scale.dtype.itemsize
        self.sizes |= {f"operand{i}": operand.dtype.itemsize for i, operand in enumerate(spec.operands)}
        self.names = [name for name in self.sizes if name in fields]
        self.base = {name: fields.integer(name) for name in self.names}
        self.strides = {name: [fields.integer(f"{name}.strides", i) for i in range(LEVELS)] for name in self.names}
        self.n1, self.n2 = fields.integer("n1"), fields.integer("n2")
        pair, inner = first // self.n2, first // self.n2 // self.n1
        self.place = [Cell(f, inner), Cell(f, pair - inner * self.n1), Cell(f, first - pair * self.n2)]

    def address(self, name: str) -> Int:
        """Where the current row of a tensor begins."""
        offset = self.f.index(0)
        for cell, stride in zip(self.place, self.strides[name], strict=True):
            offset = offset + cell.get() * stride
        return self.base[name] + offset * self.sizes[name]

    def advance(self) -> None:
        """Go to the next row: count up the innermost index and carry."""
        i0, i1, i2 = (cell.get() for cell in self.place)
        wrap2 = (i2 + 1).eq(self.n2)
        wrap1 = wrap2 & (i1 + 1).eq(self.n1)
        zero, one = self.f.index(0), self.f.index(1)
        self.place[2].set(wrap2.where(zero, i2 + 1))
        self.place[1].set(wrap1.where(zero, i1 + wrap2.where(one, zero)))
        self.place[0].set(i0 + wrap1.where(one, zero))


class Place(NamedTuple):
    """One row: where it begins in each tensor, and its values of the prologue's row operands."""

    at: dict[str, Int]
    scalars: dict[int, Float]
