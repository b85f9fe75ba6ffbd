"""Fingerprints: which differences of a forward matter, and what cannot be compared."""

from __future__ import annotations

import functools
import linecache
import sys
import textwrap
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import onepass
from onepass.models.patching import forms
from onepass.models.patching.code import Code, NotComparable, code_of
from onepass.models.patching.forms import OTHER_CODE, Norm, match

OFFSET = """
import torch
from torch import nn

class Norm(nn.Module):
    def __init__(self, size=8, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(size))

    def _inverse(self, x):
        return torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        wide = x.float()
        wide = wide * self._inverse(wide) * (1 + self.weight.float())
        return wide.to(x.dtype)
"""
TWICE = """
import torch
from torch import nn

class Norm(nn.Module):
    def __init__(self, size=8):
        super().__init__()
        self.small = 1e-6
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, rows):
        wide = rows.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.small)
        return self.weight * wide.to(rows.dtype)
"""
ROTATION = """
import torch
from torch import nn

SIGN = -1

def half(x):
    return x[..., : x.shape[-1] // 2]

def rotate(x):
    return torch.cat((SIGN * half(x), half(x)), -1)

class Module(nn.Module):
    def forward(self, x):
        return rotate(x)
"""

CHECKPOINTING = """
from functools import partial, wraps

def around(forward):
    @wraps(forward)
    def forward_with_checkpointing(self, *args, **kwargs):
        # as transformers 5.23 wraps the forward of every GradientCheckpointingLayer
        is_outermost = type(self).forward is forward_with_checkpointing
        if self.gradient_checkpointing and self.training and is_outermost:
            kwargs["use_cache"] = False
            return self._gradient_checkpointing_func(partial(forward, self, **kwargs), *args)
        return forward(self, *args, **kwargs)

    return forward_with_checkpointing

class Checkpointing:
    around = staticmethod(around)
"""

Define = Callable[..., Any]
FORMS = {OFFSET: Norm(rounding="once", weight_offset=1.0), TWICE: Norm(rounding="hf", eps="small")}


@pytest.fixture
def define(monkeypatch: pytest.MonkeyPatch) -> Iterator[Define]:
    """Run source as a module that can be imported and read, and return its last class.

    The two norms above are registered.
    """
    made: list[str] = []

    def run(source: str, package: str = "") -> Any:
        name = f"{package}onepass_test_code_{len(made)}"
        file, source = f"<{name}>", textwrap.dedent(source)
        module = sys.modules[name] = ModuleType(name)
        linecache.cache[file] = (len(source), None, source.splitlines(True), file)
        made.append(name)
        exec(compile(source, file, "exec"), vars(module))
        return [value for value in vars(module).values() if isinstance(value, type)][-1]

    monkeypatch.setattr(forms, "_registered", dict(forms._registered))
    for source, form in FORMS.items():
        forms.register(run(source), form)
    yield run
    for name in made:
        del sys.modules[name], linecache.cache[f"<{name}>"]


def fingerprint(cls: type[nn.Module]) -> str:
    return code_of(cls).fingerprint


def test_fingerprints_are_the_same_on_every_python(define: Define) -> None:
    """Otherwise the table of forms would be for one version only."""
    assert fingerprint(define(ROTATION)) == "1bdbf54c83f9"


def test_layout_annotations_docstrings_and_decorators_do_not_count(define: Define) -> None:
    other = '''
        from __future__ import annotations
        import torch
        import torch.nn

        def marked(function: object) -> object:
            return function

        class Base(torch.nn.Module):
            def rescale(self, x: torch.Tensor) -> torch.Tensor:  # another name for _inverse
                """A docstring."""
                return torch.rsqrt(
                    x.square().mean(-1, keepdim=True)
                    + self.eps
                )

        @marked
        class Other(Base):
            @marked
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                "Another one."
                unused: int
                wide: torch.Tensor = x.float()
                # a comment
                wide = wide * self.rescale(wide) * (1 + self.weight.float())
                return wide.to(x.dtype)
    '''
    assert fingerprint(define(other)) == fingerprint(define(OFFSET))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("1 + self.weight", "2 + self.weight"),
        ("1 + self.weight", "1.0 + self.weight"),
        ("self.eps)", "self.epsilon)"),  # a helper's body
        ("rsqrt", "sqrt"),
        ("keepdim=True", "keepdim=False"),
        ("forward(self, x)", "forward(self, x, gate=None)"),
        ("from torch import nn", "from torch import nn, linalg as torch"),  # the same text, another global
        ("return wide.to(x.dtype)", "return wide.type_as(x)"),
    ],
)
def test_what_the_code_does_counts(define: Define, old: str, new: str) -> None:
    assert old in OFFSET
    changed = define(OFFSET.replace(old, new))
    assert fingerprint(changed) != fingerprint(define(OFFSET))
    assert match(changed, Norm).why == OTHER_CODE


@pytest.mark.parametrize(
    ("old", "new"),
    [("SIGN = -1", "SIGN = 1"), ("// 2]", "// 4]"), ("SIGN * half(x), half(x)", "half(x), SIGN * half(x)")],
)
def test_functions_and_constants_of_the_module_count(define: Define, old: str, new: str) -> None:
    """Also functions that functions call. Their names do not count."""
    assert fingerprint(define(ROTATION.replace(old, new))) != fingerprint(define(ROTATION))
    assert fingerprint(define(ROTATION.replace("rotate", "turn"))) == fingerprint(define(ROTATION))


def test_called_names_count_by_name_only(define: Define) -> None:
    """What the caller runs itself may differ."""
    called = frozenset({"rotate"})
    codes = [code_of(define(ROTATION.replace("SIGN = -1", f"SIGN = {sign}")), called) for sign in (1, -1)]
    assert codes[0].fingerprint == codes[1].fingerprint
    renamed = code_of(define(ROTATION.replace("rotate", "turn")), called)
    assert renamed.fingerprint != codes[0].fingerprint


def test_overridden_methods_count(define: Define) -> None:
    """The code of a class's own helper, also if it inherits the forward."""
    Own: Any = define(OFFSET)

    class Same(Own):  # type: ignore[misc]
        pass

    class Different(Own):  # type: ignore[misc]
        def _inverse(self, x: Any) -> Any:
            return x

    assert code_of(Same) == code_of(Own) and code_of(Own).methods == {"_inverse"}
    assert fingerprint(Different) != fingerprint(Own)


def test_super_properties_and_static_methods_count(define: Define) -> None:
    source = """
        from torch import nn

        class Base(nn.Module):
            def forward(self, x):
                return x + 1

        class Derived(Base):
            scale = 2

            @property
            def twice(self):
                return 2 * self.weight

            @staticmethod
            def half(x):
                return x / 2

            def forward(self, x):
                return super().forward(x) * self.twice * self.half(x) * self.scale
    """
    found = fingerprint(define(source))
    assert found == fingerprint(define(source))
    for old, new in (("x + 1", "x + 2"), ("2 * self", "3 * self"), ("x / 2", "x / 3"), ("scale = 2", "scale = 3")):
        assert old in source and fingerprint(define(source.replace(old, new))) != found, old


def test_decorators_of_inner_functions_count(define: Define) -> None:
    """The decorator of a method has run when the class exists, that of an inner function runs at every call."""
    source = """
        from torch import nn

        class Module(nn.Module):
            def forward(self, x):
                def inner(y):
                    return y
                return inner(x)
    """
    decorated = source.replace("def inner", "@sorted\n                def inner")
    assert fingerprint(define(decorated)) != fingerprint(define(source))


def test_recursion_ends(define: Define) -> None:
    source = """
        from torch import nn

        def again(x, n=3):
            return again(x, n - 1) if n else x

        class Module(nn.Module):
            def forward(self, x):
                return again(x) + again(x)
    """
    assert fingerprint(define(source)) == fingerprint(define(source.replace("again", "once_more")))
    assert fingerprint(define(source)) != fingerprint(define(source.replace("n=3", "n=4")))


def test_objects_of_two_modules_are_different(define: Define) -> None:
    """Two tables of the same name may have different entries."""
    source = (
        "from torch import nn\nTABLE = {}\nclass M(nn.Module):\n    def forward(self, x):\n        return TABLE[x]\n"
    )
    assert fingerprint(define(source)) != fingerprint(define(source))


def test_functions_that_kernels_turned_into_modules(define: Define) -> None:
    """Hugging Face's ``kernels`` replaces functions by modules that call them, which changes nothing."""

    def _create_func_module(func: Any) -> Any:
        class Func(nn.Module):
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                return func(*args, **kwargs)

        return Func

    cls: Any = define(ROTATION)
    expected, home = fingerprint(cls), vars(sys.modules[cls.__module__])
    home["rotate"] = _create_func_module(home["rotate"])()
    assert fingerprint(cls) == expected
    home["rotate"].forward = lambda x: x  # what kernelize() does
    assert fingerprint(cls) != expected


def why_left(model: nn.Module) -> str:
    """Why `patch` leaves the only norm of a model."""
    with pytest.warns(onepass.models.NothingPatchedWarning):
        (left,) = onepass.patch(model).left
    return left.why


def test_missing_source_is_the_reason(define: Define) -> None:
    """As for compiled or zipped models."""
    cls: Any = define(OFFSET)
    linecache.cache[f"<{cls.__module__}>"] = (0, None, [], "")
    assert why_left(nn.Sequential(cls())) == "its code cannot be compared: the source of forward is not available"


def test_what_cannot_be_read_is_the_reason(define: Define) -> None:
    """Closures without a value, source that is no Python, and expressions that are nested too deeply."""

    class Early(nn.Module):
        def forward(self, x: Any) -> Any:
            return later(x)

    with pytest.raises(NotComparable, match="later has no value yet"):
        code_of(Early)
    later = print
    assert code_of(Early).fingerprint

    deep = (
        "from torch import nn\nclass Deep(nn.Module):\n    def forward(self, x):\n        return " + "-" * 900 + "x\n"
    )
    with pytest.raises(NotComparable, match="nested too deeply"):
        code_of(define(deep))
    cls: Any = define(OFFSET)
    linecache.cache[f"<{cls.__module__}>"] = (1, None, ["(\n"] * 40, "")
    with pytest.raises(NotComparable, match="the source of forward is not available"):
        code_of(cls)


def test_lambdas_and_other_callables_cannot_be_compared(define: Define) -> None:
    cls: Any = define(OFFSET)
    cls.forward = lambda self, x: x
    assert (
        why_left(nn.Sequential(cls()))
        == "its code cannot be compared: the source of <lambda> is not a function definition"
    )
    cls.forward = functools.partial(print)
    with pytest.raises(NotComparable, match="is a partial, not a function"):
        code_of(cls)


def test_wrapped_forwards_are_left(define: Define) -> None:
    """The source is that of the inner function, but the outer one runs. Only known decorators change nothing."""
    cls: Any = define(TWICE)
    own = cls.forward

    @functools.wraps(own)
    def doubled(self: Any, x: Any) -> Any:
        return 2 * own(self, x)

    cls.forward = doubled
    assert why_left(nn.Sequential(cls())) == f"its code cannot be compared: forward is wrapped by code of {__name__}"


@pytest.mark.parametrize("package", ["transformers.", "transformers_modules.", "my_model.", ""])
def test_gradient_checkpointing_of_transformers_changes_nothing(define: Define, package: str) -> None:
    """The same wrapper in a user's module, or in code from the hub, is left: its author may change it."""
    cls: Any = define(TWICE)
    around = define(CHECKPOINTING, package).around
    cls.forward = around(around(cls.forward))
    found = match(cls, Norm)
    if package == "transformers.":
        assert found.form == FORMS[TWICE]
    else:
        assert found.form is None and f"wrapped by code of {package}onepass_test" in found.why


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return forward(self, *args, **kwargs)", "return 2 * forward(self, *args, **kwargs)"),
        ("return forward(self, *args, **kwargs)", "return forward(self, *args)"),
        ("return forward(self, *args, **kwargs)", "forward(self, *args, **kwargs)"),
        ("return forward(self, *args, **kwargs)", "return other(self, *args, **kwargs)"),
        ("self.gradient_checkpointing and self.training and", "self.gradient_checkpointing and"),
        ("self.gradient_checkpointing and self.training and", "self.gradient_checkpointing or self.training and"),
        ("        is_outermost", "        kwargs.clear()\n        is_outermost"),
        ("        is_outermost", "        args = args * 2\n        is_outermost"),
        ("        is_outermost", "        forward = print\n        is_outermost"),
        ("        is_outermost", "        done = kwargs.clear()\n        is_outermost"),
        ("self, *args, **kwargs):", "self, *args, scale=2, **kwargs):"),
        ("        return forward(", "        else:\n            args = ()\n        return forward("),
    ],
)
def test_wrappers_that_do_more_than_checkpointing_are_left(define: Define, old: str, new: str) -> None:
    assert old in CHECKPOINTING
    cls: Any = define(TWICE)
    cls.forward = define(CHECKPOINTING.replace(old, new), "transformers.").around(cls.forward)
    assert "is wrapped by code of transformers." in match(cls, Norm).why


def test_wrappers_that_call_another_function_are_left(define: Define) -> None:
    cls: Any = define(TWICE)
    wrapper = define(CHECKPOINTING, "transformers.").around(lambda self, x: x)
    wrapper.__wrapped__, cls.forward = cls.forward, wrapper
    assert "is wrapped by code of transformers." in match(cls, Norm).why


def test_super_is_that_of_the_class_that_defines_a_forward(define: Define) -> None:
    """A subclass has the forward that it inherits as its own attribute, if something wraps it."""
    source = """
        from torch import nn

        class Base(nn.Module):
            def shift(self, x):
                return x + 1

        class Middle(Base):
            def shift(self, x):
                return x + 2

            def forward(self, x):
                return super().shift(x)

        class Last(Middle):
            pass
    """
    last: Any = define(source)
    expected = fingerprint(last.__base__)
    last.forward = define(CHECKPOINTING, "transformers.").around(last.forward)
    assert fingerprint(last) == expected == fingerprint(define(source))
    borrowed: Any = define(OFFSET)
    borrowed.forward = last.__base__.forward
    with pytest.raises(NotComparable, match="forward belongs to another class"):
        code_of(borrowed)


def test_decorators_of_transformers_change_nothing(define: Define) -> None:
    deprecation: Any = pytest.importorskip("transformers.utils.deprecation")
    cls: Any = define(TWICE)
    cls.forward = deprecation.deprecate_kwarg("x", new_name="rows", version="99.0")(cls.forward)
    assert hasattr(cls.forward, "__wrapped__")
    assert match(cls, Norm).form == FORMS[TWICE]


def test_replaced_methods_of_an_instance_are_left(define: Define) -> None:
    cls: Any = define(OFFSET)
    model: Any = nn.Sequential(cls())
    model[0]._inverse = lambda x: x
    assert why_left(model) == "one of its methods was replaced by other code"


@pytest.mark.parametrize("eps", [None, "1e-6", torch.tensor(1e-6), True])
def test_an_epsilon_that_is_no_number_is_left(define: Define, eps: Any) -> None:
    cls: Any = define(OFFSET)
    assert why_left(nn.Sequential(cls(eps=eps))).startswith("its epsilon, eps, is ")
    model = nn.Sequential(cls())
    del model[0].eps
    assert why_left(model) == "it has no eps"


def test_a_class_with_its_own_call_is_left(define: Define) -> None:
    cls: Any = define(OFFSET)
    cls.__call__ = lambda self, x: 2 * nn.Module.__call__(self, x)
    assert why_left(nn.Sequential(cls())) == "its class replaces __call__"


@pytest.mark.parametrize("source", [OFFSET, TWICE])
def test_norms_of_unknown_modules_are_replaced(define: Define, source: str) -> None:
    """Any class with this code, under any name."""
    cls: Any = define(source.replace("class Norm", "class Rescale"))
    model: Any = nn.Sequential(cls())
    with torch.no_grad():
        model[0].weight.add_(0.2 * torch.randn(8))
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    expected = model(x).detach()
    with onepass.patch(model) as handle, torch.inference_mode():
        assert [change.cls for change in handle.replaced] == ["Rescale"]
        got = model.to(torch.float32)(x)
    assert got.dtype == x.dtype and expected.abs().max() > 1
    torch.testing.assert_close(got.float(), expected.float(), rtol=2**-7, atol=0)


def test_rows_that_are_not_contiguous_are_copied(define: Define) -> None:
    cls: Any = define(TWICE)
    model: Any = nn.Sequential(cls())
    x = torch.randn(2, 8, 5).transpose(1, 2)
    expected = model(x).detach()
    with onepass.patch(model), torch.inference_mode():
        torch.testing.assert_close(model(x), expected, rtol=1e-6, atol=1e-6)


def test_code_names_its_module(define: Define) -> None:
    """An attention calls functions of this module. Without a module they cannot be found."""
    cls: Any = define(TWICE)
    assert code_of(cls) == Code(fingerprint(cls), cls.__module__, frozenset())
    home = sys.modules[cls.__module__]
    sys.modules[cls.__module__] = ModuleType(cls.__module__)
    assert code_of(cls).module == ""
    sys.modules[cls.__module__] = home
