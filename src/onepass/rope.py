"""Rotary position embedding as an argument: `Rope` has the angles, the pairs of columns and their number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from torch import Tensor

RopeStyle = Literal["half", "interleaved"]
STYLES: Final[tuple[RopeStyle, ...]] = ("half", "interleaved")
SectionStyle = Literal["contiguous", "interleaved"]
SECTION_STYLES: Final[tuple[SectionStyle, ...]] = ("contiguous", "interleaved")


@dataclass(slots=True, eq=False)  # not frozen, which would double what one costs per layer and token
class Rope:
    """Rotate the first ``dim`` columns of every head by the angles of the token's position::

        a, b = a * cos - b * sin, b * cos + a * sin

    The angles are a table, ``freqs``, or each token's own, ``cos`` and ``sin``.

    Args:
        freqs: [max_seq, dim] float32, (cos, sin) of each pair, interleaved: c0, s0, c1, s1, ...
        positions: Each token's row of freqs: int32 or int64 with the leading shape. None: the token's index in the last
            leading dimension. A position outside freqs uses the nearest row. With ``ONEPASS_DEBUG=1`` in the environment it
            raises instead. With ``sections`` three per token, [3, ...]: time, height and width.
        style: "half" pairs columns i and i + dim/2 (Llama, Qwen), "interleaved" columns 2i and 2i + 1 (GPT-J, DeepSeek).
        dim: Even, and at most freqs' width, which None means. Further columns of a head are not rotated.
        head_dim: Columns of a head. Required if the op cannot infer it.
        cos: [..., dim], one row per token ([1, S, dim] serves every sequence), as transformers' ``position_embeddings``. Its
            second half repeats the first and is not read. `qk_norm_rope_cache` takes it.
        sin: The same for sines.
        sections: mRoPE: how many pairs turn by the time, by the height and by the width of ``positions``, together
            ``dim / 2``; transformers' and vLLM's ``mrope_section``. `qk_norm_rope_cache` takes it. None: one position per token.
        section_style: "contiguous": the first pairs turn by the time, then those by the height, then those by the width
            (Qwen2-VL, Qwen2.5-VL, GLM-4V). "interleaved": pairs turn by time, height and width in turn, and by the time where
            a section has ended (Qwen3-VL, Qwen3.5).

    >>> import torch, onepass
    >>> quarter = torch.tensor([[1.0, 0.0], [0.0, 1.0]])  # no rotation at position 0, a quarter turn at 1
    >>> q = k = torch.tensor([[1.0, 1.0], [1.0, 1.0]])
    >>> onepass.qk_rms_norm(q, k, torch.ones(2), torch.ones(2), rope=onepass.Rope(quarter, head_dim=2))[0]
    tensor([[ 1.0000,  1.0000],
            [-1.0000,  1.0000]])
    """

    freqs: Tensor | None = None
    positions: Tensor | None = None
    style: RopeStyle = "half"
    dim: int | None = None
    head_dim: int | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    sections: tuple[int, int, int] | None = None
    section_style: SectionStyle = "contiguous"
