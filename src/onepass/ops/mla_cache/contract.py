"""The contract of MLA's cache write."""

from __future__ import annotations

import torch

from ...core.contract import WEIGHT_OFFSET, Arg, Contract, Option, Out, Rule, eps, output_dtype
from ...formats import FLOATS, FP8_FORMATS
from ...kvcache import CACHE_DTYPES, DS_MLA, DS_MLA_BYTES, DS_MLA_COLUMNS, ENTRY_FORMATS, INDEX_DTYPES
from ...rope import STYLES
from .launch import MAX_HEADS, MAX_LATENT, MAX_ROPE

OUT_DTYPES = (*FLOATS, *FP8_FORMATS)
_SIGNED = (torch.int64, torch.int32)
_F32 = (torch.float32,)
_PLACED = "slot_mapping is not None"
_PLACED_AND_TURNED = "(slot_mapping is not None and (positions is not None or E == 0))"
_UNLESS_PLACED = "be given unless slot_mapping is (with a rotation: slot_mapping and positions)"
_NO_FREQS = "freqs_cis is not None or rope_dim == 0 or (R == 0 and rope_dim is None)"
_ALL_COLUMNS = "C == L + R or (kv_norm_dim is not None and C > L + R)"
_ONE_MORE = "input_row_offsets is None or cache_lengths is None or O == B + 1"
_OUT_DTYPE = "dtype of the result; None: that of q_rope_output, or q_rope's"
_CACHES = (*CACHE_DTYPES, torch.uint8)
_PACKED = f"entry_format == '{DS_MLA}'"
_DS_MLA_KV = "have {} columns and then q_rope's {} with {}".format(*DS_MLA_COLUMNS, DS_MLA)
_FITS = f"(C - R, R) == {DS_MLA_COLUMNS}"
_ALIGNED = "(blocks.storage_offset() | blocks.stride(0) | blocks.stride(1)) % 4 == 0"
_EVEN = "E % 2 == 0 and E <= R and (freqs_cis is None or E <= W)"


def _index(dims: str, doc: str, dtypes: tuple[torch.dtype, ...] = INDEX_DTYPES) -> Arg:
    return Arg(dims, doc, dtypes, optional=True, sample="index")


def _integer(doc: str, where: str) -> Option:
    return Option("int", None, doc, where=where, optional=True)


FUSED_ROPE_RMSNORM_QUANTIZATION = Contract(
    "fused_rope_rmsnorm_quantization",
    args={
        "q_rope": Arg("T H R", "the columns of each head of q that may be rotated", FLOATS),
        "kv": Arg("T C", "latent, then the columns of k that may be rotated", FLOATS),
        "gamma": Arg("L", "weight of the latent's norm; any float dtype", FLOATS, sample="gamma"),
        "freqs_cis": Arg("F W", "cos and sin of each position, interleaved", FLOATS, optional=True),
        "input_row_offsets": _index("O", "first token of each request, then the end of the last"),
        "cache_lengths": _index("B", "number of each request's tokens in the cache"),
        "lookup_table": _index("B X", "pages of each request"),
        "slot_mapping": _index("T", "slot of each token; negative: none", _SIGNED),
        "positions": _index("T", "row of freqs_cis of each token", _SIGNED),
        "kv_scale": Arg("", "what entries are divided by", _F32, optional=True, layout="any", sample="positive"),
        "blocks": Arg("P S Z", "pages of entries, written; kv's columns, or bytes", _CACHES, mutable=True),
        "per_token_scale": Arg("P S", "receives each entry's divisor", _F32, optional=True, layout="any", mutable=True),
    },
    options={
        "epsilon": eps("epsilon"),
        "rope_style": Option("str", "interleaved", "which columns form a pair", choices=STYLES),
        "rope_dim": _integer("rotated columns; None: freqs_cis' width", "rope_dim >= 0"),
        "weight_offset": WEIGHT_OFFSET,
        "rounding": Option("str", "once", "where values are rounded", choices=("once", "reference")),
        "out_dtype": Option("ScalarType", None, _OUT_DTYPE, OUT_DTYPES, optional=True),
        "kv_norm_dim": _integer("normed columns of kv; None: all but q_rope's", "kv_norm_dim > 0"),
        "entry_format": Option("str", "plain", "one dtype, or codes, scales and bfloat16", choices=ENTRY_FORMATS),
    },
    sizes={"E": "0 if freqs_cis is None or rope_dim == 0 else W if rope_dim is None else rope_dim"},
    outs={"q_rope_output": Out("T H R", "out_dtype or dtype_of(q_rope_output, q_rope)", "rotated q", "q_rope_output")},
    rules=(
        Rule(f"0 < H <= {MAX_HEADS}", "q_rope", f"have 1 to {MAX_HEADS} heads"),
        Rule(f"R <= {MAX_ROPE}", "q_rope", f"have at most {MAX_ROPE} columns"),
        Rule(f"0 < L <= {MAX_LATENT}", "gamma", f"have 1 to {MAX_LATENT} elements"),
        Rule("kv_norm_dim is None or kv_norm_dim == L", "kv_norm_dim", "be gamma's length"),
        Rule(_ALL_COLUMNS, "kv", "have gamma's and q_rope's columns (with kv_norm_dim: at least)"),
        Rule(f"C - R <= {MAX_LATENT}", "kv", f"have at most {MAX_LATENT} columns before q_rope's"),
        Rule(f"Z == C or {_PACKED}", "blocks", "have kv's columns, C={C}"),
        Rule(f"(blocks.dtype == torch.uint8) == ({_PACKED})", "blocks", f"be uint8 with {DS_MLA}, and only then"),
        Rule(f"not ({_PACKED}) or {_FITS}", "kv", _DS_MLA_KV),
        Rule(f"not ({_PACKED}) or Z == {DS_MLA_BYTES}", "blocks", f"have {DS_MLA_BYTES} bytes per entry with {DS_MLA}"),
        Rule(f"not ({_PACKED}) or {_ALIGNED}", "blocks", f"have entries that begin on 4 bytes with {DS_MLA}"),
        Rule(_NO_FREQS, "freqs_cis", "be given unless rope_dim is 0"),
        Rule("freqs_cis is None or F > 0", "freqs_cis", "have at least one row"),
        Rule(_EVEN, "rope_dim", "be even, at most q_rope's columns and freqs_cis' width"),
        Rule(f"input_row_offsets is not None or {_PLACED_AND_TURNED}", "input_row_offsets", _UNLESS_PLACED),
        Rule(f"cache_lengths is not None or {_PLACED_AND_TURNED}", "cache_lengths", _UNLESS_PLACED),
        Rule(f"lookup_table is not None or {_PLACED}", "lookup_table", "be given unless slot_mapping is"),
        Rule(_ONE_MORE, "input_row_offsets", "have one element more than cache_lengths"),
        Rule("S > 0", "blocks", "have at least one entry per page"),
        Rule("kv_scale is None or blocks.dtype in FP8", "kv_scale", "be None unless the cache is fp8"),
        Rule("per_token_scale is None or blocks.dtype in FP8", "per_token_scale", "be None unless the cache is fp8"),
        Rule("per_token_scale is None or kv_scale is None", "per_token_scale", "be None with kv_scale"),
    ),
    scope={**output_dtype(OUT_DTYPES), "FP8": tuple(FP8_FORMATS)},
    rounding=(
        "once: entry = round((concat((x*rs)*(gamma+offset), rope(k)))/scale), q = round(rope(q)); "
        "reference: entry = round(concat(round(round(x*rs)*(gamma+offset)), round(rope(k)))/scale), q = round(round(rope(q)))"
    ),
    replaces={"q_rope_output": ("q_rope",)},
    in_place=True,
    carried={"k_cache": ("blocks", "cache_lengths", "lookup_table", "entry_format")},
)
