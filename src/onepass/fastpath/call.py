"""Writes the function that a plain eager call goes through: `onepass.contract.validation`'s checks, the kernel, and the memory of both.

A combination of options is checked once and remembered. On a GPU a whole call is remembered too (`onepass.fastpath.replay`).
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor

from ..contract.declaration import Contract
from ..contract.validation import Writer, check_list_lines, check_option_lines, run_source, write_body
from . import replay
from .debug import debugging

MAX_REMEMBERED: Final = 4096
"""Combinations of options whose check is remembered, and calls with each of them."""


def _kinds(contract: Contract) -> list[str]:
    """What remembered options are also known by: 1, 1.0 and True are equal, and not all of them are what a bool or float is."""
    return [f"type({n})" for n, option in contract.options.items() if option.type in ("float", "int", "bool")]


def _write_replay(write: Writer, contract: Contract) -> None:
    """On a GPU, a call like an earlier one: launch what that one launched.

    ``like`` is what the launch depends on besides the options: dtype, shape, strides, alignment and device of every tensor.
    Calls with lists of tensors are not replayed, nor while debugging, when indices and counters are read.
    """
    single = [name for name, arg in contract.args.items() if not arg.many]
    optional = {name for name in single if contract.args[name].optional}
    outs = [out.argument for out in contract.outs.values()]
    lists = [f" and not {name}" for name, arg in contract.args.items() if arg.many]
    indices = any(arg.sample == "index" or arg.debugged for arg in contract.args.values())
    parts, grads = [], []
    for name in [*single, *outs]:
        strides = f"{name}.is_contiguous() or {name}.stride()"
        facts = f"{name}.dtype, {name}.shape, {strides}, {name}.data_ptr() % 16, {name}.get_device()"
        if name in contract.args and contract.args[name].layout == "any":
            facts += f", {name}.is_neg()"
        absent = name in optional or name in outs
        parts.append(f"None if {name} is None else ({facts})" if absent else facts)
        grads.append(f"({name} is not None and {name}.requires_grad)" if absent else f"{name}.requires_grad")
    condition = f"switch.on and on_gpu({single[0]}){''.join(lists)}{' and not debugging()' if indices else ''}"
    write("like = found = None")
    write("try:")
    write(f"    if {condition}:")
    write(f"        like = ({', '.join(parts)},)")
    write("        found = replays.get(like)")
    write("except AttributeError:  # not a tensor: the checks will say so")
    write("    like = None")
    write("if found is not None:")
    write("    like = None")
    write(f"    if found and not (is_grad_enabled() and ({' or '.join(grads)})):")
    write(f"        done = found({', '.join([*single, *outs])})")
    write("        if done is not None:")
    write("            return done")


def compile_call(
    contract: Contract,
    kernel: Callable[..., None],
    *,
    watched: Callable[[], bool],
    special: Callable[..., bool],
    dispatch: Callable[..., Any],
    memory: Callable[..., None],
    on_gpu: Callable[[Tensor], bool] = attrgetter("is_cuda"),
) -> Callable[..., tuple[Tensor | None, ...]]:
    """Write and compile the eager entry: ``prepare`` and ``kernel`` in one function, with no argument passed twice.

    A combination of options is checked once and remembered, with a dictionary in which the kernel may note what it
    means (``kernel(notes, *inputs, *outputs)``). ``dispatch(inputs, outs)`` takes the call where torch's dispatcher
    must see it: when it is ``watched`` or a tensor is ``special``, which only a tensor of another type or device than
    the commonest is asked. ``memory(inputs, outputs)`` judges the outputs that the caller gave.
    """
    write = Writer(contract, eager=True)
    options = ", ".join(contract.options)
    inputs = ", ".join([*contract.args, *contract.options])
    outs = ", ".join(out.argument for out in contract.outs.values())
    write(f"def check_options({options}):", 0)
    for name, option in contract.options.items():
        check_option_lines(write, name, option)
    write("return")
    write(f"def call({inputs}, {outs}):", 0)
    write("try:")
    write.indent += 1
    write(f"given = ({outs},)")
    for name, arg in contract.args.items():
        if arg.many:
            check_list_lines(write, name)
    first, *others = contract.args
    usual = [f"type({first}) is Tensor", f"({first}.is_cpu or {first}.is_cuda)"]
    for name in others:
        usual.append(f"not {name}" if contract.args[name].many else f"type({name}) in PLAIN")
    usual += [f"type({out.argument}) in PLAIN" for out in contract.outs.values()]
    unwritten = [f"{out.argument} is None" for out in contract.outs.values()]
    if any(arg.mutable for arg in contract.args.values()):
        unwritten = ["False"]
    write(f"if watched() or not ({' and '.join(usual)}) and special({', '.join(contract.args)}, *given):")
    write(f"    return dispatch(({inputs},), given)")
    remembered = [*contract.options, *_kinds(contract)]
    write(f"key = ({', '.join(remembered)}{',' if remembered else ''})")
    write("try:")
    write("    known = seen.get(key)")
    write("except TypeError:")
    write("    known = None")
    write("if known is None:")
    write(f"    check_options({options})")
    write(f"    if len(seen) >= {MAX_REMEMBERED}:")
    write("        seen.clear()")
    write("    known = seen[key] = ({}, {})")
    write("notes, replays = known")
    _write_replay(write, contract)
    write(f"plain = {' and '.join(unwritten)}")
    write_body(write, contract, options=False)
    write("if not plain:")
    write(f"    memory(({inputs},), ({outs},))")
    single = [name for name, arg in contract.args.items() if not arg.many]
    written = [i for i, name in enumerate(single) if contract.args[name].mutable]
    written += range(len(single), len(single) + len(contract.outs))
    write("if like is not None:")
    write(f"    if len(replays) >= {MAX_REMEMBERED}:")
    write("        replays.clear()")
    before, after = f"({', '.join(single)}, *given)", f"({', '.join(single)}, {outs})"
    run = f"lambda: kernel(notes, {inputs}, {outs})"
    write(f"    replays[like] = record({run}, {before}, {after}, {written}, {len(contract.outs)}) or False")
    write(f"    return {outs},")
    write(f"kernel(notes, {inputs}, {outs})")
    write(f"return {outs},")
    write.indent -= 1
    # looked into only where something has failed: a value that is not what the lines above took it for
    tensors = ", ".join(
        f"{name}={name}" for name in (*contract.args, *(out.argument for out in contract.outs.values()))
    )
    write("except RuntimeError:")
    write(f"    blame({tensors})")
    write(f"    check_options({options})")
    write("    raise")
    write("except (AttributeError, TypeError):")
    write(f"    prepare({inputs}, *given)")
    write("    raise")
    write.scope.update(
        prepare=contract.prepare,
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
        PLAIN=frozenset({Tensor, torch.nn.Parameter, type(None)}),
    )
    run_source("\n".join(write.lines) + "\n", f"call {contract.name}", write.scope)
    call: Callable[..., tuple[Tensor | None, ...]] = write.scope["call"]
    return call
