"""torch's CUDA graphs on a CPU: a recorded step is called at each replay, and recording leaves no trace in its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from onepass.models.generation import generate as generation


class StandIn:
    """Counts recordings, warm-up steps and replays, and replaces `torch.cuda`'s functions while installed."""

    def __init__(self) -> None:
        self.recorded = self.warm_up = self.replayed = 0
        self.capturing = False
        self.step: Callable[[], None] = lambda: None
        self.save: Any = None

    def install(self, patch: pytest.MonkeyPatch) -> StandIn:
        patch.setattr(generation, "_runner", generation.Graph)
        patch.setattr(generation.Graph, "run", self._watched(generation.Graph.run))
        stream = type("Stream", (), {"wait_stream": lambda *_: None})
        for name, value in {
            "CUDAGraph": type("CUDAGraph", (_Graph,), {"stand_in": self}),
            "Stream": stream,
            "current_stream": stream,
            "stream": lambda _: nullcontext(),
            "device": lambda _: nullcontext(),
            "graph": self._recording,
        }.items():
            patch.setattr(torch.cuda, name, value)
        return self

    def _watched(self, run: Any) -> Any:
        def watched(runner: Any, step: Callable[[], None], save: Any) -> None:
            def counted() -> None:
                self.warm_up += not self.capturing
                step()

            self.step, self.save = step, save
            run(runner, counted, save)

        return watched

    @contextmanager
    def _recording(self, graph: Any, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        restore, generator = self.save(), graph.generator
        state = generator.get_state() if generator is not None else None
        self.capturing = True
        yield
        self.capturing = False
        restore()
        if generator is not None:
            generator.set_state(state)
        self.recorded += 1


class _Graph:
    stand_in: StandIn

    def __init__(self) -> None:
        self.generator: torch.Generator | None = None

    def register_generator_state(self, generator: torch.Generator) -> None:
        self.generator = generator

    def replay(self) -> None:
        self.stand_in.replayed += 1
        self.stand_in.step()
