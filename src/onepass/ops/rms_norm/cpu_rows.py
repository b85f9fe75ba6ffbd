"""Where the row kernel's rows are: a cursor over a range of them, and the addresses of one."""

from __future__ import annotations

from typing import NamedTuple

from ...core.layout import LEVELS
from ...cpu.llvm.function import Arguments, Cell, Function
from ...cpu.llvm.vec import Float, Int
from .spec import RowSpec


class Cursor:
    """Walks over a range of rows: the current row's address in each tensor."""

    def __init__(self, f: Function, spec: RowSpec, args: Arguments, first: Int) -> None:
        self.f = f
        self.sizes = {"x": spec.x.itemsize, "codes": 1}
        for name, dtype in (("residual", spec.residual), ("new_residual", spec.residual), ("norm", spec.norm)):
            if dtype is not None:
                self.sizes[name] = dtype.itemsize
        if spec.per_row and spec.gamma is not None:
            self.sizes["row_gamma"] = spec.gamma.itemsize
        self.sizes["rstd"] = 4
        if spec.scale is not None:
            self.sizes["scale"] = spec.scale.dtype.itemsize
        self.sizes |= {f"operand{i}": operand.dtype.itemsize for i, operand in enumerate(spec.operands)}
        self.names = [name for name in self.sizes if name in args]
        self.base = {name: args.integer(name) for name in self.names}
        self.strides = {name: [args.integer(f"{name}.strides", i) for i in range(LEVELS)] for name in self.names}
        self.n1, self.n2 = args.integer("n1"), args.integer("n2")
        pair, inner = first // self.n2, first // self.n2 // self.n1
        self.indices = [Cell(f, inner), Cell(f, pair - inner * self.n1), Cell(f, first - pair * self.n2)]

    def address(self, name: str) -> Int:
        """Where the current row of a tensor begins."""
        offset = self.f.index(0)
        for cell, stride in zip(self.indices, self.strides[name], strict=True):
            offset = offset + cell.get() * stride
        return self.base[name] + offset * self.sizes[name]

    def number(self) -> Int:
        """The number of the current row."""
        i0, i1, i2 = (cell.get() for cell in self.indices)
        number: Int = (i0 * self.n1 + i1) * self.n2 + i2
        return number

    def advance(self) -> None:
        """Go to the next row: count up the innermost index and carry."""
        i0, i1, i2 = (cell.get() for cell in self.indices)
        wrap2 = (i2 + 1).eq(self.n2)
        wrap1 = wrap2 & (i1 + 1).eq(self.n1)
        zero, one = self.f.index(0), self.f.index(1)
        self.indices[2].set(wrap2.where(zero, i2 + 1))
        self.indices[1].set(wrap1.where(zero, i1 + wrap2.where(one, zero)))
        self.indices[0].set(i0 + wrap1.where(one, zero))


class Row(NamedTuple):
    """One row: its address in each tensor, and its values of the prologue's row operands.

    ``scale`` is the address of its first scale, if it has any.
    """

    at: dict[str, Int]
    scalars: dict[int, Float]
    scale: Int | None = None
