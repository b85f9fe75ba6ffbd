"""What MLA's cache write takes and returns."""

from __future__ import annotations

import torch
from torch import Tensor

from ..contract.declaration import Arg, Contract, Option, Out, Rule
from ..formats import FLOATS, FP8_FORMATS
from ..kvcache import CACHE_DTYPES, INDEX_DTYPES
from ..rope import STYLES
from ..specs.mla_cache import MAX_HEADS, MAX_LATENT, MAX_ROPE

Q_DTYPES = (*FLOATS, *FP8_FORMATS)
_PLACED = "slot_mapping is not None"
_TURNED = "(positions is not None or E == 0)"


def _dtype_of(out: Tensor | None, q: Tensor) -> torch.dtype:
    """The dtype of the caller's output where it is one that results can have."""
    return out.dtype if isinstance(out, Tensor) and out.dtype in Q_DTYPES else q.dtype


FUSED_ROPE_RMSNORM_QUANTIZATION = Contract(
    "fused_rope_rmsnorm_quantization",
    args={
        "q_rope": Arg("T H R", "the columns of each head of q that may turn", FLOATS),
        "kv": Arg("T C", "latent, then the columns of k that may turn", FLOATS),
        "gamma": Arg("L", "weight of the latent's norm; any float dtype", FLOATS, sample="gamma"),
        "freqs_cis": Arg("F W", "cos and sin of each position, interleaved", FLOATS, optional=True),
        "input_row_offsets": Arg("O", "first token of each request, then of none", INDEX_DTYPES, optional=True, sample="index"),
        "cache_lengths": Arg("B", "tokens of each request that are in the cache", INDEX_DTYPES, optional=True, sample="index"),
        "lookup_table": Arg("B X", "pages of each request", INDEX_DTYPES, optional=True, sample="index"),
        "slot_mapping": Arg("T", "place of each token; below 0: none", (torch.int64, torch.int32), optional=True, sample="index"),
        "positions": Arg("T", "row of freqs_cis of each token", (torch.int64, torch.int32), optional=True, sample="index"),
        "kv_scale": Arg("", "what all entries are divided by", (torch.float32,), optional=True, layout="any", sample="positive"),
        "blocks": Arg("P S C", "pages of entries, written", CACHE_DTYPES, mutable=True),
        "per_token_scale": Arg(
            "P S", "receives what each entry was divided by", (torch.float32,), optional=True, layout="any", mutable=True,
        ),
    },
    options={
        "epsilon": Option("float", 1e-6, "added to the mean of squares", where="0 <= epsilon <= 3.4e38"),
        "rope_style": Option("str", "interleaved", "which columns are a pair", choices=STYLES),
        "rope_dim": Option("int", None, "columns that turn; None: freqs_cis' width", where="rope_dim >= 0", optional=True),
        "weight_offset": Option("float", 0.0, "added to gamma in float32", where="-3.4e38 <= weight_offset <= 3.4e38"),
        "rounding": Option("str", "once", "where values are rounded", choices=("once", "reference")),
        "q_dtype": Option(
            "ScalarType", None, "dtype of the result; None: that of q_rope_output, or q_rope's", choices=Q_DTYPES, optional=True,
        ),
        "kv_norm_dim": Option(
            "int", None, "columns of kv that are normed; None: all but q_rope's", where="kv_norm_dim > 0", optional=True,
        ),
    },
    sizes={"E": "0 if freqs_cis is None or rope_dim == 0 else W if rope_dim is None else rope_dim"},
    outs={
        "q_rope_output": Out("T H R", "q_dtype or dtype_of(q_rope_output, q_rope)", "q turned", "q_rope_output"),
    },
    rules=(
        Rule(f"0 < H <= {MAX_HEADS}", "q_rope", f"have 1 to {MAX_HEADS} heads"),
        Rule(f"R <= {MAX_ROPE}", "q_rope", f"have at most {MAX_ROPE} columns"),
        Rule(f"0 < L <= {MAX_LATENT}", "gamma", f"have 1 to {MAX_LATENT} elements"),
        Rule("kv_norm_dim is None or kv_norm_dim == L", "kv_norm_dim", "be gamma's length"),
        Rule(
            "C == L + R or (kv_norm_dim is not None and C > L + R)", "kv",
            "have gamma's and q_rope's columns (with kv_norm_dim: at least)",
        ),
        Rule(f"C - R <= {MAX_LATENT}", "kv", f"have at most {MAX_LATENT} columns before q_rope's"),
        Rule("freqs_cis is not None or rope_dim == 0 or (R == 0 and rope_dim is None)", "freqs_cis", "be given unless rope_dim is 0"),
        Rule("freqs_cis is None or F > 0", "freqs_cis", "have at least one row"),
        Rule(
            "E % 2 == 0 and E <= R and (freqs_cis is None or E <= W)", "rope_dim",
            "be even, at most q_rope's columns and freqs_cis' width",
        ),
        Rule(
            f"input_row_offsets is not None or ({_PLACED} and {_TURNED})", "input_row_offsets",
            "be given unless slot_mapping and, with a rotation, positions are",
        ),
        Rule(
            f"cache_lengths is not None or ({_PLACED} and {_TURNED})", "cache_lengths",
            "be given unless slot_mapping and, with a rotation, positions are",
        ),
        Rule(f"lookup_table is not None or {_PLACED}", "lookup_table", "be given unless slot_mapping is"),
        Rule(
            "input_row_offsets is None or cache_lengths is None or O == B + 1", "input_row_offsets",
            "have one element more than cache_lengths",
        ),
        Rule("S > 0", "blocks", "have at least one entry a page"),
        Rule("kv_scale is None or blocks.dtype in FP8", "kv_scale", "be None unless the cache is fp8"),
        Rule("per_token_scale is None or blocks.dtype in FP8", "per_token_scale", "be None unless the cache is fp8"),
        Rule("per_token_scale is None or kv_scale is None", "per_token_scale", "be None with kv_scale"),
    ),
    scope={"dtype_of": _dtype_of, "FP8": tuple(FP8_FORMATS)},
    rounding=(
        "once: entry = round((concat((x*rs)*(gamma+offset), rope(k)))/scale), q = round(rope(q)); "
        "reference: entry = round(concat(round(round(x*rs)*(gamma+offset)), round(rope(k)))/scale), q = round(round(rope(q)))"
    ),
    replaces={"q_rope_output": ("q_rope",)},
    in_place=True,
    carried={"k_cache": ("blocks", "cache_lengths", "lookup_table")},
)  # fmt: skip
