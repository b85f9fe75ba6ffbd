"""Cases of linear: inputs, calls and verification."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from onepass.formats import E4M3FN, FLOATS
from onepass.ops.linear import reference as linear_reference
from onepass.ops.linear.op import LINEAR, linear
from onepass.testing import compare
from onepass.testing.tensors import Layout, lay_out, moved, set_special, short_dtype
from tests.linear import bounds as linear_bounds
from tests.oracle import bounds
from tests.oracle.bounds import Bounds
from tests.oracle.case import GPU_ONLY, Values, case_name, labelled
from tests.oracle.memory import poison, to_cpu
from tests.oracle.samples import sample
from tests.oracle.weights import scales, whole_numbers

BF16, F16, F32 = FLOATS
E4M3, INT8, E8M0 = E4M3FN.dtype, torch.int8, torch.float8_e8m0fnu
OPS: Final = ("linear",)


@dataclass(frozen=True, eq=False)
class Case:
    """One call: rows, sizes, dtypes, options, layout and the kind of values.

    ``scale`` is none, tensor, row, column ([N, 1]), block or ue8m0.
    """

    group: str
    rows: int | tuple[int, ...]
    n: int
    k: int
    x: torch.dtype = BF16
    weight: torch.dtype | None = None
    scale: str = "none"
    gamma: torch.dtype | None = None
    residual: torch.dtype | None = None
    bias: torch.dtype | None = None
    add: torch.dtype | None = None
    layout: Layout = "contiguous"
    values: Values = "normal"
    options: dict[str, Any] = field(default_factory=dict)
    op: str = "linear"

    @property
    def lead(self) -> tuple[int, ...]:
        """The leading dimensions of x."""
        return self.rows if isinstance(self.rows, tuple) else (self.rows,)

    @property
    def columns(self) -> int:
        """Columns of the result."""
        return self.n // 2 if self.options.get("activation") else self.n

    @property
    def interpretable(self) -> bool:
        """See `Check`."""
        results = math.prod(self.lead) * self.n
        return self.group not in (*GPU_ONLY, "static") and results <= 1 << 11 and results * self.k <= 1 << 20

    @property
    def name(self) -> str:
        """See `Check`."""
        shape = "x".join(map(str, (*self.lead, self.n, self.k)))
        dtypes = (labelled(name, getattr(self, name)) for name in ("weight", "gamma", "residual", "bias", "add"))
        options = (labelled(name, value) for name, value in self.options.items())
        return case_name(
            self.group, shape, short_dtype(self.x), *dtypes, f"scale={self.scale}", *options, self.layout, self.values
        )


# --- inputs and calls -----------------------------------------------------------------------------------------------


def inputs(case: Case, device: str, seed: int = 0) -> dict[str, Any]:
    """Keyword arguments of the public function."""
    optional = [name for name in ("gamma", "residual", "bias", "add") if getattr(case, name) is not None]
    dtypes = {"x": case.x, "weight": F32, **{name: getattr(case, name) for name in optional}}
    sizes = {"N": case.n, "K": case.k, "D": case.columns}
    tensors: dict[str, Any] = {
        **sample(LINEAR, sizes, case.lead, dtypes=dtypes, optional=optional, seed=seed + case.n + case.k)
    }
    generator = torch.Generator().manual_seed(seed + case.n)
    if case.scale != "none":
        apart = case.layout != "contiguous"
        tensors["weight_scale"] = scales(case.scale, case.n, case.k, generator, apart)
    tensors["weight"] = _stored(tensors["weight"], case.weight or case.x)
    if case.values == "special":
        set_special(tensors["x"], large=1e3)
        _set_special_weights(case, tensors)
    for name in ("x", "weight", "residual", "add"):
        if name in tensors:
            tensors[name] = lay_out(tensors[name], case.layout)
    return moved(tensors, device) | case.options


def _stored(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Normal numbers as weights. Without a scale, their size gives results near 1."""
    if dtype == INT8:
        return whole_numbers(weight)
    return (weight if dtype == E4M3 else weight * (2 / weight.shape[1] ** 0.5)).to(dtype)


def _set_special_weights(case: Case, tensors: dict[str, Any]) -> None:
    """Set a row of zeros and, in fp8, both codes of NaN. Set a scale of zero and one that is NaN."""
    weight = tensors["weight"]
    weight[3] = 0
    if weight.dtype == E4M3:
        weight.view(torch.uint8)[1, 5], weight.view(torch.uint8)[case.n - 2, -1] = 0x7F, 0xFF
    scale = tensors.get("weight_scale")
    if scale is not None and scale.numel() > 2:
        last = scale.view(-1)
        if scale.dtype == E8M0:
            last.view(torch.uint8)[-1] = 255
        else:
            last[-1], last[1] = torch.nan, 0.0


def call(case: Case, arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    """The public function's results."""
    results = linear(**arguments)
    return results if isinstance(results, tuple) else (results,)


def zeroable(case: Case) -> list[tuple[int, str]]:
    """Position and name of each result that the kernel writes."""
    return [(0, "y"), *([(1, "new_residual")] if case.residual is not None else [])]


def call_into(arguments: dict[str, Any], outs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The public function writing into ``outs``."""
    given: dict[str, Any] = dict(zip(("out", "residual_out"), outs, strict=False))
    results = linear(**arguments, **given)
    return results if isinstance(results, tuple) else (results,)


def variants(case: Case, arguments: dict[str, Any], results: tuple[Tensor, ...]) -> Iterator[tuple[str, Any]]:
    """Results in the caller's tensors, whose neighbours must stay, and in place of add and the residual."""
    given = [t.new_empty(*t.shape[:-1], t.shape[-1] + 3) for t in results]
    for t in given:
        poison(t)
    outs = tuple(t[..., 1:-2] for t in given)
    yield "when written into the caller's tensors", call_into(arguments, outs)
    for index, t in enumerate(given):
        edges = torch.cat((t[..., :1], t[..., -2:]), -1)
        if not bool(edges.contiguous().view(torch.uint8).eq(0xFF).all()):
            raise AssertionError(f"result {index} was written beyond its columns")
    again, outs = {**arguments}, ()
    if case.add == results[0].dtype:
        again["add"] = arguments["add"].clone()
        outs = (again["add"],)
    if case.residual is not None:
        again["residual"] = arguments["residual"].clone()
        outs = (outs[0] if outs else torch.empty_like(results[0]), again["residual"])
    if outs:
        yield "in place", call_into(again, outs)


# --- verification ---------------------------------------------------------------------------------------------------


LONG: Final = 8192
"""Terms beyond which 2 % of float16 sums may differ from the rounded oracle, instead of 1 %."""


def verify(case: Case, arguments: dict[str, Any], results: tuple[Tensor, ...]) -> str | None:
    """None, or what is wrong: every value lies between bounds, and most are those of the exact products."""
    host, results = as_rows(to_cpu(arguments)), tuple(t.cpu() for t in results)
    if results[0].shape != (*case.lead, case.columns):
        return f"shape {list(results[0].shape)}, expected {[*case.lead, case.columns]}"
    rows = tuple(t.reshape(-1, t.shape[-1]) for t in results)
    wrong = verify_call(host, rows, arguments["x"].is_cuda)
    if wrong is not None:
        return wrong
    # the error of a long sum reaches the midpoint between two float16 numbers more often
    long = rows[0].dtype == torch.float16 and case.k > LONG
    wrong = compare.mostly_equal(rows[0], _exact(host), share=0.98 if long else 0.99)
    return wrong and f"y: {wrong}"


def _exact(host: dict[str, Any]) -> Tensor:
    """The oracle's result. It is NaN where 1 + erf or 1 + tanh cancels, because there float32 is far from exact."""
    options = {name: value for name, value in host.items() if name not in ("out_dtype", "static_weight")}
    y = linear_reference.linear(**options).y
    if options.get("activation") in ("gelu_mul", "gelu_tanh_mul"):
        gate = linear_reference.linear(**options | {"activation": None, "add": None}).y[:, : y.shape[1]]
        y = torch.where(gate < -1, torch.nan, y)
    return y


def as_rows(host: dict[str, Any]) -> dict[str, Any]:
    """Arguments whose tensors have two dimensions where they have a row for each row of x."""
    shaped = ("x", "residual", "add")
    return {n: t.reshape(-1, t.shape[-1]) if n in shaped and t is not None else t for n, t in host.items()}


def verify_call(host: dict[str, Any], rows: tuple[Tensor, ...], on_gpu: bool) -> str | None:
    """None, or what is wrong with the results of a call with these arguments, all of them in rows."""
    x, weight, residual, rounding = host["x"], host["weight"], host.get("residual"), host.get("rounding", "once")
    if residual is not None:
        h = (x.float() + residual.float()).to(residual.dtype)
        if not torch.equal(rows[1], h) and not bool(((rows[1] == h) | (rows[1].isnan() & h.isnan())).all()):
            return f"new_residual: {int((rows[1] != h).sum())} of {h.numel()} values are not x + residual"
    a = multiplied(host)
    middle = torch.where(a.low == a.high, a.low, (a.low + a.high) / 2)
    doubt = ((a.high - a.low) / 2).nan_to_num(0.0, 0.0, 0.0)
    y = linear_bounds.products(middle, weight, host.get("weight_scale"), on_gpu, dtype=x.dtype, doubt=doubt)
    options = {name: host.get(name) for name in ("bias", "activation", "add")}
    wrong = linear_bounds.result(y, x.dtype, rounding=rounding, **options).stored(rows[0])
    return wrong and f"y: {wrong}"


def multiplied(host: dict[str, Any]) -> Bounds:
    """What weight is multiplied by, rounded to x's dtype: x, the rounded sum, or the bounds of the norm."""
    x, gamma, residual, hf = host["x"], host.get("gamma"), host.get("residual"), host.get("rounding") == "hf"
    h = x.float() if residual is None else x.float() + residual.float()
    if gamma is None:
        exact = h.to(x.dtype).double()
        return Bounds(exact, exact)
    if hf and residual is not None:
        h = h.to(residual.dtype)
    wide = h.double()
    rs = bounds.reciprocal_rms(wide, host.get("eps", 1e-6))
    g = bounds.weight(gamma, host.get("weight_offset", 0.0))
    return bounds.normed(wide, rs, g, x.dtype if hf else None).rounded(x.dtype)
