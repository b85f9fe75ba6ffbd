"""Triton's interpreter without the work that it repeats for every operation.

Its own code patches the language at every call of a device function, builds the type, the shape and the name of
every intermediate result anew, and converts operands that need no conversion. Results are the same without that, in a
quarter of the time. What a version of Triton does differently is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch

_running: list[None] = []


def interpreting() -> bool:
    """Whether kernels are interpreted now. Then the memory that torch allocates is poisoned."""
    return bool(_running)


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Interpret kernels with the language patched once, and with types and shapes that are kept."""
    with ExitStack() as stack:
        stack.enter_context(_memory_poisoned())
        stack.enter_context(_language_patched_once())
        stack.enter_context(_types_kept())
        stack.enter_context(_equal_types_accepted())
        stack.enter_context(_products_in_float64())
        yield


@contextmanager
def _memory_poisoned() -> Iterator[None]:
    """torch fills new tensors with NaN or the largest integer, so that what a kernel does not write is noticed."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    _running.append(None)
    try:
        yield
    finally:
        _running.pop()
        torch.use_deterministic_algorithms(before)


@contextmanager
def _language_patched_once() -> Iterator[None]:
    import triton.language
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_patch_lang") or not hasattr(interpreter, "_LangPatchScope"):
        yield  # other versions of Triton patch differently
        return
    original, undo = interpreter._patch_lang, interpreter._LangPatchScope()
    seen_by_kernels = SimpleNamespace(__globals__={"tl": triton.language, "core": triton.language.core})
    scope = original(seen_by_kernels)
    interpreter._patch_lang = lambda _: undo  # there is nothing to undo
    try:
        yield
    finally:
        interpreter._patch_lang = original
        scope.restore()


@contextmanager
def _types_kept() -> Iterator[None]:
    from triton.language import core
    from triton.runtime import interpreter

    block, tensor = core.block_type(core.float32, [2, 4]), core.tensor(None, core.float32)
    expected = ({"element_ty", "shape", "numel", "name"}, {"handle", "shape", "numel", "type", "dtype"})
    if (set(vars(block)), set(vars(tensor))) != expected or not hasattr(interpreter, "_get_np_dtype"):
        yield  # other versions of Triton have other types
        return
    replaced = [
        (core.block_type, "__init__", _block_types(core)),
        (core.tensor, "__init__", _tensors(core)),
        (interpreter, "_get_np_dtype", _numpy_types(core, interpreter)),
    ]
    with _replaced(replaced):
        yield


@contextmanager
def _equal_types_accepted() -> Iterator[None]:
    """Operands of one shape and dtype are neither compared by name nor converted. Needs the shapes of `_types_kept`."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    signatures = {
        "binary_op_type_checking_impl": "self lhs rhs allow_lhs_ptr allow_rhs_ptr arithmetic_check div_or_mod",
        "broadcast_impl_value": "self lhs rhs",
        "cast": "self input dst_ty fp_downcast_rounding",
    }
    for name, expected in signatures.items():
        if " ".join(signature(getattr(TritonSemantic, name, lambda: None)).parameters) != expected:
            yield  # other versions of Triton convert differently
            return
    functions = (_checks(core, TritonSemantic), _broadcasts(core, TritonSemantic), _casts(TritonSemantic))
    with _replaced([(TritonSemantic, name, new) for name, new in zip(signatures, functions, strict=True)]):
        yield


@contextmanager
def _products_in_float64() -> Iterator[None]:
    """Sum the products of a dot in float64, where those of 16-bit numbers are exact.

    numpy's BLAS sums the rows of a float32 matrix in different orders on some CPUs, so a row would not keep its bytes.
    """
    import numpy as np
    from triton.runtime import interpreter

    original = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        if d.data.dtype != np.float32 or a.dtype.primitive_bitwidth == 8:
            return original(self, a, b, d, *precision)
        with np.errstate(all="ignore"):  # NaN and infinity are values like others
            total = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
        return interpreter.TensorHandle(total + d.data, d.dtype.scalar)

    with _replaced([(interpreter.InterpreterBuilder, "create_dot", create_dot)]):
        yield


@contextmanager
def _replaced(replaced: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Attributes of objects, by name, for a while."""
    originals = [getattr(owner, name) for owner, name, _ in replaced]
    for owner, name, function in replaced:
        setattr(owner, name, function)
    try:
        yield
    finally:
        for (owner, name, _), original in zip(replaced, originals, strict=True):
            setattr(owner, name, original)


def _checks(core: Any, semantic: Any) -> Callable[..., tuple[Any, Any]]:
    """`binary_op_type_checking_impl`, which returns numbers of one type as they are. Quotients of halves are float32."""
    original, block_type, tensor = semantic.binary_op_type_checking_impl, core.block_type, core.tensor
    converted = (core.float16, core.bfloat16)

    def check(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> tuple[Any, Any]:
        if type(lhs) is tensor and type(rhs) is tensor and lhs.dtype is rhs.dtype:
            left, right, dtype = lhs.type, rhs.type, lhs.dtype
            same = type(left) is type(right) and (type(left) is not block_type or left.shape is right.shape)
            if same and not dtype.is_ptr() and not (div_or_mod and dtype in converted):
                return lhs, rhs
        found: tuple[Any, Any] = original(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
        return found

    return check


def _broadcasts(core: Any, semantic: Any) -> Callable[..., tuple[Any, Any]]:
    """`broadcast_impl_value`, which returns blocks of one shape as they are."""
    original, block_type = semantic.broadcast_impl_value, core.block_type

    def broadcast(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        left, right = lhs.type, rhs.type
        if type(left) is block_type and type(right) is block_type and left.shape is right.shape:
            return lhs, rhs
        found: tuple[Any, Any] = original(self, lhs, rhs)
        return found

    return broadcast


def _casts(semantic: Any) -> Callable[..., Any]:
    """`cast`, which returns a tensor of the wanted dtype as it is."""
    original = semantic.cast

    def cast(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
        if input.type.scalar is dst_ty.scalar:
            return input
        return original(self, input, dst_ty, fp_downcast_rounding)

    return cast


def _block_types(core: Any) -> Callable[[Any, Any, Any], None]:
    """`block_type.__init__`, which takes the shape and the size of the first type with this shape."""
    original = core.block_type.__init__
    known: dict[tuple[int, ...], tuple[Any, Any, str]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple([s.value if isinstance(s, core.constexpr) else s for s in shape])
        sizes = known.get(key)
        if sizes is None:
            original(self, element_ty, shape)
            known[key] = self.shape, self.numel, str(self.shape)
        else:
            self.element_ty = element_ty
            self.shape, self.numel, text = sizes
            self.name = f"<{text}, {element_ty}>"

    return init


def _tensors(core: Any) -> Callable[[Any, Any, Any], None]:
    """`tensor.__init__`, which takes the shape and the size of the first tensor with this shape."""
    original = core.tensor.__init__
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        shape = (*type.shape,) if type.is_block() else ()
        sizes = known.get(shape)
        if sizes is None:
            original(self, handle, type)
            known[shape] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = sizes

    return init


def _numpy_types(core: Any, interpreter: Any) -> Callable[[Any], Any]:
    """`_get_np_dtype`, which builds its table once per type of elements."""
    original = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def numpy_type(kind: Any) -> Any:
        element = kind.element_ty if isinstance(kind, core.block_type) else kind
        found = known.get(element.name)
        if found is None:
            found = known[element.name] = original(kind)
        return found

    return numpy_type
