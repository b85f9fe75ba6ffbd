"""Generates the function behind plain eager calls: validation and the kernel, with what both remember.

Each combination of options is validated once and remembered. Whole calls are remembered too: by the path in C
(`onepass.core.native`), or without it on a GPU (`onepass.core.replay`).
"""

from __future__ import annotations

import linecache
from collections.abc import Callable
from functools import partial
from operator import attrgetter, is_not
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.autograd.graph import increment_version

from . import check as validation
from . import native, replay
from .check import Writer, check_list_lines, check_option_lines, needs_grad
from .contract import Contract
from .debug import debugging
from .memory import may_write

MAX_REMEMBERED: Final = 4096
"""Combinations of options that are remembered, and calls for each of them."""
MAX_OVERLAPS: Final = 4
"""Recordings of calls that differ only in which tensors overlap, such as in place and into another tensor."""


def _write_replay(write: Writer, contract: Contract, table: bool = False) -> None:
    """On a GPU, repeat the launch of an earlier call that was like this one.

    ``like`` is what the launch depends on besides the options: dtype, shape, strides, alignment and
    device of every tensor. A call that the path in C is about to record is left to it. Calls with lists
    of tensors are not replayed. In debug mode calls with indices or counters are not either, since their
    values are read.
    """
    single = [name for name, arg in contract.args.items() if not arg.many]
    tensors = {**{name: contract.args[name] for name in single}, **dict.fromkeys(contract.out_names)}
    lists = "".join(f" and not {name}" for name, arg in contract.args.items() if arg.many)
    indices = any(arg.sample == "index" or arg.debugged for arg in contract.args.values())
    parts = []
    for name, arg in tensors.items():
        strides = f"{name}.is_contiguous() or {name}.stride()"
        facts = f"{name}.dtype, {name}.shape, {strides}, {name}.data_ptr() % 16, {name}.get_device(), {name}.is_neg()"
        parts.append(f"None if {name} is None else ({facts})" if arg is None or arg.optional else facts)
    grads = " or ".join(needs_grad(*item) for item in tensors.items())
    write(f"""
        like = found = None
        try:
            if {"not done and " if table else ""}switch.on and on_gpu({single[0]}){lists}{" and not debugging()" if indices else ""}:
                like = ({", ".join(parts)},)
                found = replays.get(like)
        except AttributeError:  # not a tensor: validation reports it
            like = None
        if found is not None:
            if may_write(written) and not (is_grad_enabled() and ({grads})):
                for again in found:
                    results = again({", ".join(tensors)})
                    if results is not None:
                        bump(written)
                        return results
            if not found or len(found) >= {MAX_OVERLAPS}:  # such calls cannot be repeated, or overlap in many ways
                like = None
        """)


def compile_call(
    contract: Contract,
    kernel: Callable[..., None],
    *,
    watched: Callable[[], bool],
    special: Callable[..., bool],
    dispatch: Callable[..., Any],
    memory: Callable[..., None],
    on_gpu: Callable[[Tensor], bool] = attrgetter("is_cuda"),
    table: Any = None,
) -> Callable[..., tuple[Tensor | None, ...]]:
    """Generate the eager entry: ``prepare`` and ``kernel`` in one function, with no argument passed twice.

    ``kernel(spec_cache, arguments)`` receives a dictionary that belongs to the combination of options
    and the contract's named tuple of `arguments`. ``dispatch(inputs, outs)`` makes the call if torch's
    dispatcher must see it: if it is ``watched``, or if a tensor is ``special``, which is tested only for
    tensors of an uncommon type or device. ``memory(inputs, outputs)`` validates the caller's outputs.
    ``table`` is the op's table of `onepass.core.native`, if calls are remembered there.
    """
    write = Writer(contract, eager=True)
    options, arguments = ", ".join(contract.options), ", ".join(contract.args)
    inputs = ", ".join([*contract.args, *contract.options])
    outs = ", ".join(contract.out_names)
    # 1, 1.0 and True are equal, so the key also contains the options' types
    key = [*contract.options]
    key += [f"type({n})" for n, option in contract.options.items() if option.type in ("float", "int", "bool")]
    floats = "".join(f"{name}, " for name, option in contract.options.items() if option.type == "float")
    first, *others = contract.args
    mutable = [name for name, arg in contract.args.items() if arg.mutable]
    common = [f"type({first}) is Tensor", f"({first}.is_cpu or {first}.is_cuda)"]
    common += [f"not {name}" if contract.args[name].many else f"type({name}) in PLAIN" for name in others]
    common += [f"type({name}) in PLAIN" for name in contract.out_names]

    write(f"def check_options({options}):", 0)
    for name, option in contract.options.items():
        check_option_lines(write, name, option)
    write("return")
    write(f"def call({inputs}, {outs}):", 0)
    if table is not None:
        # a compiler can trace the first test alone
        write(f"""
            done = 0
            if not compiling():
                done = remembered({inputs}, {outs})
                if type(done) is tuple:
                    return done
            """)
    write("event = None")
    write("try:")
    write.indent += 1
    write(f"""
        given = ({outs},)
        written = [t for t in ({", ".join(mutable + contract.out_names)},) if t is not None]
        """)
    for name, arg in contract.args.items():
        if arg.many:
            check_list_lines(write, name)
    write(f"""
        if watched() or not ({" and ".join(common)}) and special({arguments}, *given):
            return dispatch(({inputs},), given)
        key = ({", ".join(key)}{"," if key else ""})
        try:
            known = seen.get(key)
        except TypeError:
            known = None
        if known is None:
            numbers = [plain_number(n) for n in ({floats})]
            if any(map(is_not, numbers, ({floats}))):
                {floats and f"{floats} = numbers"}
                return call({inputs}, {outs})
            check_options({options})
            if len(seen) >= {MAX_REMEMBERED}:
                seen.clear()
            known = seen[key] = ({{}}, {{}})
        spec_cache, replays = known
        if profiler._is_profiler_enabled:
            event = begin_event([{arguments}])
        """)
    _write_replay(write, contract, table is not None)
    validation.write_body(write, contract, options=False)
    single = [name for name, arg in contract.args.items() if not arg.many]
    places = [i for i, name in enumerate(single) if contract.args[name].mutable]
    places += range(len(single), len(single) + len(contract.outs))
    tensors = ", ".join(single)
    write(f"""
        if written:
            memory(({inputs},), ({outs},))
        arguments = Arguments({inputs}, {outs})
        """)
    if table is not None:
        write(f"""
            if done == {native.RECORD}:
                run = partial(kernel, spec_cache, arguments)
                remember(table, run, ({inputs}, *given), ({arguments}, *given), ({arguments}, {outs}), models)
            """)
    write(f"""
        {"if" if table is None else "elif"} like is None:
            kernel(spec_cache, arguments)
        else:
            if len(replays) >= {MAX_REMEMBERED}:
                replays.clear()
            before, after = ({tensors}, *given), ({tensors}, {outs})
            run = partial(kernel, spec_cache, arguments)
            again = record(run, before, after, {places}, {len(contract.outs)})
            replays[like] = (*(found or ()), again) if again else ()
        if written:
            bump(written)
        return {outs},
        """)
    write.indent -= 1
    # reached only if something has failed: a value is not what the code above assumed
    named = ", ".join(f"{name}={name}" for name in (*contract.args, *contract.out_names))
    write(f"""
        except RuntimeError:
            blame({named})
            check_options({options})
            raise
        except (AttributeError, TypeError):
            prepare({inputs}, *given)
            raise
        finally:
            if event is not None:
                event.__exit__(None, None, None)
        """)
    write.scope.update(
        Arguments=contract.arguments,
        partial=partial,
        is_not=is_not,
        bump=increment_version,
        may_write=may_write,
        profiler=profiler,
        begin_event=partial(_begin_event, f"onepass::{contract.name}"),
        prepare=validation.validation_of(contract).prepare,
        record=replay.record,
        switch=replay.switch,
        debugging=debugging,
        on_gpu=on_gpu,
        kernel=kernel,
        watched=watched,
        special=special,
        dispatch=dispatch,
        memory=memory,
        seen={},
        table=table,
        remembered=None if table is None else table.call,
        remember=native.remember,
        compiling=torch.compiler.is_compiling,
        models=_models(write, contract),
        PLAIN=frozenset({Tensor, torch.nn.Parameter, type(None)}),
    )
    validation.run_source("\n".join(write.lines) + "\n", f"eager call of {contract.name}", write.scope)
    call: Callable[..., tuple[Tensor | None, ...]] = write.scope["call"]
    return call


def _begin_event(name: str, tensors: list[Any]) -> Any:
    """An event of torch's profiler that has begun."""
    event = replay.Event(name, [t for t in tensors if isinstance(t, Tensor)])
    event.__enter__()
    return event


def _models(write: Writer, contract: Contract) -> dict[int, int]:
    """The positions of outputs that are allocated like a tensor, and the position of that tensor."""
    positions = {name: i for i, name in enumerate(contract.args)}
    found: dict[int, int] = {}
    for i, out in enumerate(contract.outs.values(), start=len(contract.args)):
        shape = write.shapes.get(out.dims)
        if shape is not None and shape.removesuffix("_shape") in positions:
            found[i] = positions[shape.removesuffix("_shape")]
    return found


def generated_source(op_name: str) -> str:
    """The code of the op's eager calls, or "" if it has not been generated in this process."""
    return "".join(linecache.getlines(f"<onepass eager call of {op_name}>"))
