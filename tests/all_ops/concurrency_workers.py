"""Functions that test_concurrency.py runs in processes: `python -m tests.all_ops.concurrency_workers NAME [ARGUMENT]...`.

NAME is a function of this module; its result is printed as one line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from onepass.cpu import compile as compiler
from onepass.cpu import threads
from tools import concurrency

TEAM = 4
"""Threads that share the work of a call, whatever the number of cores."""
Work = list[tuple[Any, Any, dict[str, Any]]]


def prepared(*chosen: int) -> Work:
    """All jobs, or the chosen ones, with their inputs."""
    jobs = concurrency.jobs()
    return [(m, c, m.inputs(c, "cpu")) for m, c in ([jobs[i] for i in chosen] if chosen else jobs)]


FAMILIES = (0, 4, 6, 11)
"""One small job of each kernel family."""
FEW = (0, 6, 11)


def digests(work: Work) -> list[str]:
    return [
        hashlib.sha256(b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in m.call(c, i))).hexdigest()
        for m, c, i in work
    ]


def child_digests(work: Work) -> list[str]:
    """The same in a forked child, where torch's own operators must not enter OpenMP: only onepass has a team there."""
    torch.set_num_threads(1)
    torch.get_num_threads = lambda: TEAM
    return digests(work)


def start_child(function: Callable[[], Any]) -> tuple[int, int]:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(40)
            os.write(write, json.dumps(function()).encode())
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(write)
    return child, read


def end_child(child: int, read: int) -> Any:
    with open(read, "rb") as stream:
        told = stream.read()
    _, status = os.waitpid(child, 0)
    return json.loads(told) if status == 0 else f"ended with status {status}"


def in_child(function: Callable[[], Any]) -> Any:
    return end_child(*start_child(function))


# --- threads and forks ----------------------------------------------------------------------------------------------


def cold_threads() -> dict[str, Any]:
    """First calls of every op from eight threads, with a linker that is slow to become available."""
    torch.set_num_threads(TEAM)
    llvm = compiler._llvm()
    made: list[Any] = []
    original = llvm.create_lljit_compiler

    def slow(*arguments: Any) -> Any:
        time.sleep(1.0)
        made.append(original(*arguments))
        return made[-1]

    llvm.create_lljit_compiler = slow
    wrong = concurrency.at_once("cpu", rounds=1)
    return {"wrong": wrong, "linkers": len(made), "files": len(os.listdir(os.environ["ONEPASS_CACHE_DIR"]))}


def forks() -> dict[str, Any]:
    """Children forked at different moments of their parent's life run every op."""
    torch.set_num_threads(TEAM)
    work = prepared()
    found: dict[str, Any] = {"after the import": in_child(lambda: child_digests(work))}
    expected = digests(work)
    found["after calls on a team"] = in_child(lambda: child_digests(work))
    found["a child's child"] = in_child(lambda: in_child(lambda: child_digests(work)))

    ended = threading.Event()

    def busy() -> None:
        while not ended.is_set():
            digests(work)

    others = [threading.Thread(target=busy) for _ in range(2)]
    for thread in others:
        thread.start()
    for number in range(5):
        found[f"while threads work, {number}"] = in_child(lambda: child_digests(work))
    ended.set()
    for thread in others:
        thread.join()

    told: list[Any] = []
    thread = threading.Thread(target=lambda: told.append(in_child(lambda: child_digests(work))))
    thread.start()
    thread.join()
    found["from a thread"] = told[0]
    found["while a thread compiles"] = _fork_during_compilation(work)
    return {name: value == expected or value for name, value in found.items()}


def _fork_during_compilation(work: Work) -> Any:
    """The child needs the compiler, which a thread of the parent was using at the moment of the fork."""
    os.environ["ONEPASS_CACHE_DIR"] = "off"
    compiling = threading.Event()
    original = compiler.compile_ir

    def slow(*arguments: Any) -> bytes:
        compiling.set()
        time.sleep(0.5)
        return original(*arguments)

    x, gamma = torch.randn(3, 64, dtype=torch.float16), torch.randn(64, dtype=torch.float16)
    import onepass

    def child() -> Any:
        compiler.compile_ir = original
        onepass.rms_norm(x, gamma, rounding="hf")
        return child_digests(work)

    compiler.compile_ir = slow  # type: ignore[assignment]
    thread = threading.Thread(target=onepass.rms_norm, args=(x, gamma))
    thread.start()
    compiling.wait(600)
    result = in_child(child)
    thread.join()
    compiler.compile_ir = original
    return result


def _spawned(gate: Any, answers: Any) -> None:
    torch.set_num_threads(TEAM)
    gate.wait(600)
    answers.put(digests(prepared(*FAMILIES)))


def spawn() -> dict[str, Any]:
    """Two spawned processes start at once with one cold cache; then their parent reads what they wrote."""
    context = multiprocessing.get_context("spawn")
    gate, answers = context.Barrier(2), context.Queue()
    children = [context.Process(target=_spawned, args=(gate, answers)) for _ in range(2)]
    for child in children:
        child.start()
    told = [answers.get(timeout=600) for _ in children]
    for child in children:
        child.join(600)
    files = sound_files()
    compiler.compile_ir = refuse  # type: ignore[assignment]
    return {"same": told == [digests(prepared(*FAMILIES))] * 2, "files": files, "left": unfinished()}


# --- the cache ------------------------------------------------------------------------------------------------------


def refuse(*_: Any) -> bytes:
    raise AssertionError("asked the compiler")


def directory() -> Path:
    found = compiler.cache_directory()
    assert found is not None
    return found


def sound_files() -> int:
    """The number of files in the cache; a damaged one is an error."""
    files = list(directory().glob("*.o"))
    assert all(compiler.read_object(file) for file in files)
    return len(files)


def unfinished() -> int:
    return len(list(directory().glob(compiler.UNFINISHED + "*")))


def cold_caches(rounds: str) -> list[Any]:
    """Processes forked before anything was compiled fill one cache concurrently, two at a time."""
    torch.set_num_threads(1)
    work = prepared(*FEW)
    compiler.host()
    report = []
    for _ in range(int(rounds)):
        with tempfile.TemporaryDirectory() as place:
            os.environ["ONEPASS_CACHE_DIR"] = place
            closed, gate = os.pipe()

            def wait_and_work(closed: int = closed, gate: int = gate) -> list[str]:
                os.close(gate)
                os.read(closed, 1)  # until the parent closes its end
                return digests(work)

            children = [start_child(wait_and_work) for _ in range(2)]
            os.close(gate)
            first, second = (end_child(*child) for child in children)
            os.close(closed)

            def without_compiler() -> list[str]:
                compiler.compile_ir = refuse  # type: ignore[assignment]
                return digests(work)

            third = in_child(without_compiler)
            report.append([first == second == third and first, sound_files(), unfinished()])
    return report


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_at(moment: str) -> None:
    make, replace = tempfile.mkstemp, os.replace

    def created(**options: Any) -> Any:
        make(**options)
        _die()

    def half(handle: int, *_: Any) -> Any:
        os.write(handle, compiler.MAGIC + b"half")
        _die()

    def before_rename(*_: Any) -> None:
        _die()

    def renamed(*paths: Any) -> None:
        replace(*paths)
        _die()

    match moment:
        case "created":
            tempfile.mkstemp = created  # type: ignore[assignment]
        case "half written":
            compiler.open = half  # type: ignore[attr-defined]
        case "before the rename":
            os.replace = before_rename  # type: ignore[assignment]
        case "renamed":
            os.replace = renamed  # type: ignore[assignment]


def killed() -> dict[str, Any]:
    """Processes killed while writing a file, then one that finds what they left."""
    torch.set_num_threads(1)
    work = prepared(*FEW)
    compiler.host()
    expected = in_child(lambda: digests(work))
    report: dict[str, Any] = {}
    for moment in ("created", "half written", "before the rename", "renamed"):
        with tempfile.TemporaryDirectory() as place:
            os.environ["ONEPASS_CACHE_DIR"] = place

            def write(moment: str = moment) -> None:
                _die_at(moment)
                digests(work)

            died = in_child(write)
            left, whole = unfinished(), sound_files()
            right = in_child(lambda: digests(work)) == expected
            kept = unfinished()
            for file in directory().glob(compiler.UNFINISHED + "*"):
                os.utime(file, (time.time() - 7200,) * 2)
            os.unlink(next(directory().glob("*.o")))
            again = in_child(lambda: digests(work)) == expected
            report[moment] = [died, left, whole, right, kept, again, sound_files(), unfinished()]
    return report


# --- interrupts -----------------------------------------------------------------------------------------------------


def interrupts(rounds: str) -> dict[str, Any]:
    """An interrupt somewhere in a first call, then in the middle of kernels on either team; the next call is right.

    The first one comes in the compiler whatever the machine's speed; where the others come is left to a timer.
    """
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    torch.set_num_threads(TEAM)
    random.seed(0)
    cold = 0
    original = compiler.compile_ir

    def interrupted(*arguments: Any) -> bytes:
        compiler.compile_ir = original
        signal.raise_signal(signal.SIGALRM)
        return original(*arguments)

    compiler.compile_ir = interrupted  # type: ignore[assignment]
    for module, case, given in prepared(0, 2, 4, 6, 11):
        if compiler.compile_ir is original:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(0.005, 0.1))
        try:
            module.call(case, given)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            cold += 1
        wrong = module.verify(case, given, module.call(case, given))
        if wrong:
            return {"wrong": f"{case.op} after an interrupt of its first call: {wrong}"}

    import onepass

    x, gamma = torch.randn(1000, 4096), torch.randn(4096)
    expected = onepass.rms_norm(x, gamma)
    first = digests(work := prepared(0, 2, 4, 6, 11))
    warm = 0
    for team in (threads._team(), ("own", threads._own_team())):
        threads._team = lambda team=team: team  # type: ignore[assignment]
        for _ in range(int(rounds)):
            signal.setitimer(signal.ITIMER_REAL, random.uniform(0.001, 0.02))
            try:
                while True:
                    onepass.rms_norm(x, gamma)
            except KeyboardInterrupt:
                warm += 1
            if not torch.equal(onepass.rms_norm(x, gamma), expected):
                return {"wrong": "a call after an interrupt"}
        if digests(work) != first:
            return {"wrong": "ops after interrupts"}
    told: list[Any] = []  # no lock is left held: another thread can have a kernel compiled
    half = x[:3].half()
    thread = threading.Thread(target=lambda: told.append(onepass.rms_norm(half, gamma.half())), daemon=True)
    thread.start()
    thread.join(600)
    return {"wrong": None if told else "a thread cannot compile", "cold": cold, "warm": warm}


if __name__ == "__main__":
    name, *words = sys.argv[1:]
    print(json.dumps(globals()[name](*words)))
