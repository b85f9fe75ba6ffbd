"""Triton's interpreter without the work that it repeats for every operation.

Its own code patches the language at every call of a device function, and builds the type, the shape and the name of
every intermediate result anew. Results are the same without that, in a third of the time. What a version of Triton
does differently is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Interpret kernels with the language patched once, and with types and shapes that are kept."""
    with ExitStack() as stack:
        stack.enter_context(_language_patched_once())
        stack.enter_context(_types_kept())
        yield


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
    originals = [getattr(owner, name) for owner, name, _ in replaced]
    for owner, name, function in replaced:
        setattr(owner, name, function)
    try:
        yield
    finally:
        for (owner, name, _), original in zip(replaced, originals, strict=True):
            setattr(owner, name, original)


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
