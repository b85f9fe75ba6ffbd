"""The contract of the norm, rotation and cache write of q, k and v."""

from __future__ import annotations

import torch

from ...core.contract import WEIGHT_OFFSET, Arg, Contract, Option, Out, Rule, eps, output_dtype
from ...formats import FLOATS, FP8_FORMATS, ROUNDINGS
from ...kvcache import CACHE_DTYPES
from ...rope import SECTION_STYLES, STYLES
from .launch import CACHE_LAYOUTS, MAX_HEAD, MAX_HEADS

_INTEGERS = (torch.int32, torch.int64)
_F32 = (torch.float32,)
_DENSE = "layout == 'dense'"
_PER_HEAD = "gamma_q is None or (Gq == D if per_head else Gq == Hq * D)"
_PER_HEAD_K = "gamma_k is None or (Gk == D if per_head else Gk == Hk * D)"
_ADJACENT = "gamma_q is None or per_head or {x}.stride(-2) == D or {h} == 1"
_ONE_ROW = "have adjacent heads with per_head=False"
_UNLESS_FP8 = "be None unless the cache is fp8"
_SECTIONS_FIT = (
    "height + width <= E // 2 if section_style == 'contiguous' else 3 * height <= E // 2 + 1 and 3 * width <= E // 2"
)


def _index(dims: str, doc: str) -> Arg:
    return Arg(dims, doc, _INTEGERS, optional=True, layout="any", sample="index")


def _gamma(dims: str, of: str) -> Arg:
    doc = f"weight of {of}'s norm: D elements, or those of all heads; None: no norm"
    return Arg(dims, doc, FLOATS, optional=True, sample="gamma")


def _scale(of: str) -> Arg:
    doc = f"what {of} is divided by: one number, or one for each head"
    return Arg(" | Hk", doc, _F32, optional=True, layout="any", sample="positive")


def _scale_out(of: str, when: str) -> Out:
    """A scale for each entry's heads, in the cache's layout; any strides."""
    make = "empty(A0, A1, A2, dtype=torch.float32, device=device)"
    doc = f"scale of each head of {of}, at its entry; only entries of tokens are written"
    return Out("A0 A1 A2", "torch.float32", doc, f"{of}_scale_out", when=when, make=make)


def _scale_rules(of: str) -> tuple[Rule, ...]:
    fp8 = f"{of}_cache is not None and {of}_cache.dtype in FP8"
    return (
        Rule(f"{of}_scale is None or ({fp8})", f"{of}_scale", _UNLESS_FP8),
        Rule(f"{of}_scale is None or not own_scales", f"{of}_scale", "be None with scale_out"),
    )


QK_NORM_ROPE_CACHE = Contract(
    "qk_norm_rope_cache",
    args={
        "q": Arg("... Hq D", "queries of the tokens [T] or [B, S]", FLOATS),
        "k": Arg("... Hk D", "keys; q's dtype", "(q.dtype,)"),
        "v": Arg("... Hk V", "values; q's dtype", "(q.dtype,)", optional=True),
        "gamma_q": _gamma("Gq", "q"),
        "gamma_k": _gamma("Gk", "k"),
        "freqs": Arg("P R", "rope: cos and sin of each position, interleaved", _F32, optional=True),
        "positions": _index("... | 3 ...", "rope: each token's row of freqs, or with sections its three rows"),
        "cos": Arg("... C", "rope: cosines of each token; the first half is read", FLOATS, optional=True),
        "sin": Arg("... C", "rope: sines of each token; cos' dtype", FLOATS, optional=True),
        "slots": _index("...", "slot of each token in a paged cache; negative: none"),
        "starts": _index("F", "first entry of a dense cache to write: one for all sequences, or one for each"),
        "k_scale": _scale("k"),
        "v_scale": _scale("v"),
        "k_cache": Arg("A0 A1 A2 D", "cache of k, written", CACHE_DTYPES, optional=True, mutable=True),
        "v_cache": Arg("A0 A1 A2 V", "cache of v, written; k_cache's dtype", CACHE_DTYPES, optional=True, mutable=True),
    },
    options={
        "eps": eps(),
        "weight_offset": WEIGHT_OFFSET,
        "per_head": Option("bool", True, "norm each head separately; False: all heads of a token together"),
        "style": Option("str", "half", "rope: which columns form a pair", choices=STYLES),
        "dim": Option(
            "int", None, "rope: rotated columns per head; None: freqs' width", where="dim > 0", optional=True
        ),
        "first": Option("int", 0, "start, if it is an int", where="-(2**31) <= first < 2**31"),
        "layout": Option("str", "NHD", "dimensions of the caches", choices=CACHE_LAYOUTS),
        "rounding": Option("str", "once", "where values are rounded", choices=(*ROUNDINGS, "hf_rope")),
        "height": Option("int", 0, "rope: pairs that turn by the second row of positions", where="height >= 0"),
        "width": Option("int", 0, "rope: pairs that turn by the third row of positions", where="width >= 0"),
        "section_style": Option("str", "contiguous", "rope: which pairs these are", choices=SECTION_STYLES),
        "norm_v": Option("bool", False, "norm each head of v, without a weight"),
        "own_scales": Option("bool", False, "scale_out: each head of a token has a scale of its own, which is stored"),
    },
    sizes={
        "E": "(R if dim is None else dim) if freqs is not None else C if cos is not None else 0",
        "W": "R if freqs is not None else C if cos is not None else 0",
    },
    outs={
        "q_out": Out("... Hq D", "dtype_of(q_out, q)", "q; any float dtype", "q_out"),
        "k_out": Out("... Hk D", "q_out.dtype", "k, if there is no cache", "k_out", when="k_cache is None"),
        "k_scale_out": _scale_out("k", "own_scales"),
        "v_scale_out": _scale_out("v", "own_scales and v_cache is not None"),
    },
    rules=(
        Rule("q.dim() in (3, 4)", "q", "have shape [T, Hq, D] or [B, S, Hq, D]"),
        Rule(f"0 < D <= {MAX_HEAD}", "q", f"have 1 to {MAX_HEAD} columns per head"),
        Rule(f"0 < Hq <= {MAX_HEADS}", "q", f"have 1 to {MAX_HEADS} heads"),
        Rule(f"0 < Hk <= {MAX_HEADS}", "k", f"have 1 to {MAX_HEADS} heads"),
        Rule(f"v is None or 0 < V <= {MAX_HEAD}", "v", f"have 1 to {MAX_HEAD} columns per head"),
        Rule("(gamma_q is None) == (gamma_k is None)", "gamma_k", "be given with gamma_q, or both be None"),
        Rule(_PER_HEAD, "gamma_q", "have q's columns per head, D={D} (per_head=False: those of all heads)"),
        Rule(_PER_HEAD_K, "gamma_k", "have k's columns per head, D={D} (per_head=False: those of all heads)"),
        Rule(_ADJACENT.format(x="q", h="Hq"), "q", _ONE_ROW),
        Rule(_ADJACENT.format(x="k", h="Hk"), "k", _ONE_ROW),
        Rule("freqs is None or P > 0", "freqs", "have at least one row"),
        Rule("freqs is not None or positions is None", "positions", "come with freqs"),
        Rule("(cos is None) == (sin is None)", "sin", "come with cos"),
        Rule("cos is None or sin.dtype == cos.dtype", "sin", "have cos' dtype"),
        Rule("freqs is None or cos is None", "cos", "be None with freqs"),
        Rule("dim is None or freqs is not None", "dim", "be None without freqs"),
        Rule("E % 2 == 0 and E <= W and (W == 0 or E > 0)", "dim", "be even and at most the width of the angles"),
        Rule("E <= D", "dim", "be at most q's columns per head, D={D}"),
        Rule("height + width == 0 or positions is not None", "positions", "be given with sections"),
        Rule(
            "positions is None or positions.dim() == q.dim() - 2 + (height + width > 0)",
            "positions",
            "have three rows with sections, and only then",
        ),
        Rule(_SECTIONS_FIT, "height", "fit into half of the rotated columns, {E // 2}"),
        Rule("k_cache is not None or v_cache is None", "v_cache", "be None without k_cache"),
        Rule("k_cache is None or v is None or v_cache is not None", "v_cache", "be given with k_cache and v"),
        Rule("v_cache is None or v is not None", "v", "be given with v_cache"),
        Rule("v_cache is None or v_cache.dtype == k_cache.dtype", "v_cache", "have k_cache's dtype"),
        Rule("not norm_v or v_cache is not None", "norm_v", "be False without v_cache"),
        Rule("k_cache is None or (A2 if layout == 'NHD' else A1) == Hk", "k_cache", "have k's heads, Hk={Hk}"),
        Rule(f"k_cache is None or not {_DENSE} or q.dim() == 4", "q", "have shape [B, S, Hq, D] with a dense cache"),
        Rule(f"k_cache is None or not {_DENSE} or A0 == q.shape[0]", "k_cache", "have one sequence for each of q's"),
        Rule(
            f"(slots is not None) == (k_cache is not None and not {_DENSE})",
            "slots",
            "be given with a paged cache, and only then",
        ),
        Rule(f"starts is None or (k_cache is not None and {_DENSE})", "starts", "be None without a dense cache"),
        Rule(f"first == 0 or (k_cache is not None and {_DENSE})", "first", "be None without a dense cache"),
        Rule("starts is None or F == 1 or F == q.shape[0]", "starts", "have one element, or one for each sequence"),
        Rule("not own_scales or (k_cache is not None and k_cache.dtype in FP8)", "own_scales", _UNLESS_FP8),
        *_scale_rules("k"),
        *_scale_rules("v"),
    ),
    scope={**output_dtype(FLOATS), "FP8": tuple(FP8_FORMATS)},
    rounding=(
        "once: y = round(rope((x*rs)*(gamma+offset))/scale); "
        "hf: y = round(rope(round(round(x*rs)*(gamma+offset)))/scale), where rope rounds cos, sin, every product and every sum; "
        "hf_rope: the same with round((x*rs)*(gamma+offset))"
    ),
    replaces={"q_out": ("q",), "k_out": ("k",), "k_scale_out": (), "v_scale_out": ()},
    in_place=True,
    carried={
        "rope": ("freqs", "positions", "cos", "sin", "style", "dim", "height", "width", "section_style"),
        "start": ("starts", "first"),
        "out": ("q_out", "k_out"),
        "scale_out": ("k_scale_out", "v_scale_out", "own_scales"),
    },
    known_as={
        "starts": "start",
        "first": "start",
        "height": "sections",
        "width": "sections",
        "own_scales": "scale_out",
    },
)
