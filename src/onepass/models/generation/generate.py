"""``model.generate(..., custom_generate=onepass.models.generate)``: decode steps replayed from a CUDA graph."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FrameType
from typing import Any, Final, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from ...errors import Unsupported
from ..forwards.linear import projections_of
from .request import Request, check_inputs, read_request, refuse, step_shape
from .state import Model, State

KEPT: Final = 4
"""Steps that are kept per model, each with its cache. Further ones replace those used longest ago."""


WARM_UP: Final = 3
"""Steps before the recording, in which kernels are compiled and libraries allocate their workspaces."""
STEPS_PER_LOOK: Final = 8
"""Replays between two looks at the results. The host waits for one look while the device has the next steps queued."""

Save = Callable[[], Callable[[], None]]


class Runner(Protocol):
    """Runs a step again and again. A step reads and writes the same tensors every time."""

    steps_per_look: int

    def run(self, step: Callable[[], None], save: Save) -> None:
        """Run the step once. ``save`` saves the tensors, and returns a function that restores them."""


class Eager:
    """Calls the step. The host sees every result at once, so it looks after each step."""

    steps_per_look = 1

    def run(self, step: Callable[[], None], save: Save) -> None:
        """Call the step."""
        step()


class Graph:
    """Records the step in a CUDA graph at the first call, and replays it.

    ``generator`` is the generator that the step draws from. Every replay continues its sequence.
    """

    steps_per_look = STEPS_PER_LOOK

    def __init__(self, device: torch.device, generator: torch.Generator | None = None) -> None:
        self.device = device
        self.generator = generator
        self.graph: torch.cuda.CUDAGraph | None = None

    def run(self, step: Callable[[], None], save: Save) -> None:
        """Replay the step, which is recorded if it was not."""
        with torch.cuda.device(self.device):
            if self.graph is None:
                self.graph = self._record(step, save)
            self.graph.replay()

    def _record(self, step: Callable[[], None], save: Save) -> torch.cuda.CUDAGraph:
        restore = save()
        state = self.generator.get_state() if self.generator is not None else None
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                step()
                restore()
        torch.cuda.current_stream().wait_stream(stream)
        if self.generator is not None and state is not None:
            self.generator.set_state(state)
        graph = torch.cuda.CUDAGraph()
        if self.generator is not None:
            graph.register_generator_state(self.generator)
        # Other threads, such as the reader of a streamer, may use the device meanwhile.
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                step()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise Unsupported(
                f"generate: a step of this model cannot be recorded in a CUDA graph ({why}); leave out `custom_generate`"
            ) from error
        return graph


class Look(NamedTuple):
    """Rows that are on their way to the host."""

    rows: Tensor
    arrived: torch.cuda.Event | None
    """An event of the device, or None if the rows have arrived."""

    def wait(self) -> Tensor:
        """The rows, once they have arrived."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.rows


class Reader:
    """Copies rows of a tensor to the host, without waiting for them. At most ``SLOTS`` looks may be under way."""

    SLOTS: Final = 3

    def __init__(self, source: Tensor, rows: int) -> None:
        self.source = source
        self.next = 0
        self.slots: list[tuple[Tensor, Any]] = []
        if source.device.type == "cuda":
            shape = (rows, *source.shape[1:])
            for _ in range(self.SLOTS):
                self.slots.append((torch.empty(shape, dtype=source.dtype, pin_memory=True), torch.cuda.Event()))

    def send(self, begin: int, end: int) -> Look:
        """Start to copy the rows from ``begin`` to ``end``."""
        rows = self.source[begin:end]
        if not self.slots:
            return Look(rows.cpu().clone(), None)
        memory, arrived = self.slots[self.next]
        self.next = (self.next + 1) % self.SLOTS
        target = memory[: end - begin]
        target.copy_(rows, non_blocking=True)
        arrived.record()
        return Look(target, arrived)


class Identity:
    """Where a model's weights lie, which forwards its modules have, and which hooks.

    A recorded step is valid while these are the same. The model is not kept alive.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.pointers = tuple(self._pointers(model))
        self.forwards = tuple(map(_reference, self._forwards(model)))

    def matches(self, model: torch.nn.Module) -> bool:
        """Whether nothing was moved, replaced, patched or hooked since."""
        if self.pointers != tuple(self._pointers(model)):
            return False
        now = list(self._forwards(model))
        return len(now) == len(self.forwards) and all(map(_refers_to, self.forwards, now))

    @staticmethod
    def _pointers(model: torch.nn.Module) -> Iterator[object]:
        for module in model.modules():
            yield module.training
            yield from map(_pointer, (*module._parameters.values(), *module._buffers.values()))
            for merged in projections_of(module):
                yield from (_pointer(getattr(merged, name, None)) for name in ("weight", "scale", "bias"))
            yield from (*module._forward_hooks, *module._forward_pre_hooks)

    @staticmethod
    def _forwards(model: torch.nn.Module) -> Iterator[object]:
        return (module.__dict__.get("forward") for module in model.modules())


class Kept:
    """A step with its tensors, how it is run, and the model it was made for."""

    def __init__(self, state: State, runner: Runner, identity: Identity) -> None:
        self.state, self.runner, self.identity = state, runner, identity
        self.reader = Reader(state.history, runner.steps_per_look)
        self.fresh = True


def _pointer(tensor: Tensor | None) -> object:
    return None if tensor is None else (tensor.data_ptr(), tensor.dtype, tensor.shape)


def _reference(forward: object) -> weakref.ref[object] | None:
    """A weak reference to a replaced forward; None stands for the class's own."""
    return None if forward is None else weakref.ref(forward)


def _refers_to(reference: weakref.ref[object] | None, forward: object) -> bool:
    """Whether a module still has this forward. One that is gone is not the class's own."""
    return forward is None if reference is None else forward is not None and reference() is forward


_KEPT: weakref.WeakKeyDictionary[Any, OrderedDict[Any, Kept]] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def generate(
    model: Model,
    input_ids: Tensor,
    logits_processor: Sequence[object] = (),
    stopping_criteria: Sequence[object] = (),
    generation_config: GenerationConfig | None = None,
    synced_gpus: bool = False,
    streamer: BaseStreamer | None = None,
    generator: torch.Generator | None = None,
    **model_kwargs: Any,
) -> Tensor:
    """Generate tokens as transformers' own loop does, without its cost per token.

    Pass it to transformers: ``model.generate(**inputs, max_new_tokens=64, custom_generate=onepass.models.generate)``.

    The prompt runs as usual. Then one decode step is recorded in a CUDA graph: the model with a static cache, the choice of
    the token and the next position. The step is replayed for every token, and the host does not wait for it: it reads
    the tokens every few steps, and drops those after the end. The step and its cache are kept for the next call with the
    same batch size and a similar length. On a CPU the step is called, not recorded.

    It supports greedy choice, temperature, top-k and top-p, attention masks of prompts padded on the left, streamers,
    ``max_new_tokens`` and ``max_length``, and several end-of-sequence ids.

    Args:
        model: The model. transformers passes this and the next four arguments.
        input_ids: Prompts [batch, tokens].
        logits_processor: As in transformers.
        stopping_criteria: As in transformers.
        generation_config: As in transformers.
        synced_gpus: Must be False.
        streamer: Receives the tokens of each step.
        generator: What sampling draws from; None: torch's default generator.
        **model_kwargs: Arguments of the model's forward.

    Returns:
        Prompts and new tokens, [batch, all tokens].

    Raises:
        ContractError: For anything that is not listed above; the message names it.
        Unsupported: If a step of the model cannot be recorded.

    >>> import torch, transformers, onepass
    >>> sizes = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    >>> config = transformers.LlamaConfig(**sizes, num_attention_heads=2, eos_token_id=None)
    >>> model = transformers.LlamaForCausalLM(config).eval()
    >>> prompt = torch.tensor([[1, 2, 3]])
    >>> options = {"max_new_tokens": 4, "do_sample": False}
    >>> tokens = model.generate(prompt, **options, custom_generate=onepass.models.generate)
    >>> torch.equal(tokens, model.generate(prompt, **options))
    True
    """
    called_by = _caller(inspect.currentframe())
    streamer = streamer if streamer is not None else called_by.get("streamer")
    refuse("assistant_model", called_by.get("assistant_model"))
    refuse("synced_gpus", synced_gpus or called_by.get("synced_gpus"))
    request = read_request(
        model, input_ids, logits_processor, stopping_criteria, cast(GenerationConfig, generation_config), model_kwargs
    )
    # The prompt runs as in transformers' loop, with the cache that transformers made or the caller passed.
    inputs = model.prepare_inputs_for_generation(
        input_ids, next_sequence_length=request.fresh, is_first_iteration=True, **model_kwargs
    )
    logits = model(**inputs, return_dict=True).logits[:, -1]
    kept = _take(model, request)
    state = kept.state
    state.load(request.cache, request.mask, request.positions, request.eos, request.pad)
    if not request.keeps_cache and isinstance(request.cache, DynamicCache):
        request.cache.layers.clear()  # nobody reads it again
    source = _generator(generator, input_ids.device)
    if state.generator is not None:
        state.generator.set_state(source.get_state())
    state.choose(logits)
    if kept.fresh:
        check_inputs(model, request, state)
        kept.fresh = False
    del logits, inputs
    with model._optimize_model_for_decode():
        length = _run(kept, model, request, streamer)
    if state.generator is not None:
        source.set_state(state.generator.get_state())
    result = torch.cat([input_ids, state.history[:length].T.to(input_ids.dtype)], dim=1)
    if request.keeps_cache:
        state.store(request.cache, request.mask.shape[1] + length - 1)
    _put_back(model, request, kept)
    if streamer is not None:
        streamer.end()
    return result


def _run(kept: Kept, model: Model, request: Request, streamer: BaseStreamer | None) -> int:
    """Run steps until all sequences have ended; the number of tokens to keep. The first one is already chosen."""
    state, runner = kept.state, kept.runner
    step = partial(state.step, model)
    eos = torch.tensor(request.eos, dtype=torch.long)
    running = torch.ones(state.shape.batch, dtype=torch.bool)
    looks: deque[Look] = deque([kept.reader.send(0, 1)])
    sent, seen = 1, 0
    # The device gets more steps before the host waits for the last ones, so that it always has work.
    ahead = 0 if runner.steps_per_look == 1 else 1
    while seen < request.new_tokens:
        while sent < request.new_tokens and len(looks) <= ahead:
            count = min(runner.steps_per_look, request.new_tokens - sent)
            for _ in range(count):
                runner.run(step, state.save)
            looks.append(kept.reader.send(sent, sent + count))
            sent += count
        for tokens in looks.popleft().wait():
            seen += 1
            if streamer is not None:
                streamer.put(tokens.clone())  # type: ignore[no-untyped-call]
            if request.eos:
                running &= (tokens.unsqueeze(1) != eos).all(1)
                if not running.any():
                    return seen
    return seen


def _take(model: Model, request: Request) -> Kept:
    """The kept step for such a request, or a new one. Until it is put back, no other call finds it."""
    with _LOCK:
        kept = _KEPT.get(model, OrderedDict()).pop(request.key, None)
    if kept is not None and kept.identity.matches(model):
        return kept
    del kept  # its memory is free before the new one needs it
    device = request.mask.device
    shape = step_shape(model, request)
    state = State(shape, request.cache, model.config, device, request.warpers, request.sampling)
    return Kept(state, _runner(device, state.generator), Identity(model))


def _runner(device: torch.device, generator: torch.Generator | None) -> Runner:
    return Graph(device, generator) if device.type == "cuda" else Eager()


def _put_back(model: Model, request: Request, kept: Kept) -> None:
    with _LOCK:
        entries = _KEPT.setdefault(model, OrderedDict())
        entries[request.key] = kept
        entries.move_to_end(request.key)
        while len(entries) > KEPT:
            entries.popitem(last=False)


def _generator(own: torch.Generator | None, device: torch.device) -> torch.Generator:
    if own is not None:
        return own
    if device.type == "cuda":
        torch.cuda.init()
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator


def _caller(frame: FrameType | None) -> dict[str, Any]:
    """The arguments of `model.generate`, which does not pass all of them on: a streamer would be lost."""
    caller = frame.f_back if frame is not None else None
    if caller is None or "custom_generate" not in caller.f_locals:
        return {}
    names = ("streamer", "assistant_model", "synced_gpus")
    return {name: caller.f_locals.get(name) for name in names}
