"""Valid arguments of every op, by its contract's names, and the memory that calls touch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import onepass
from onepass.core.check import validation_of
from onepass.core.contract import Contract
from onepass.ops.linear.op import LINEAR
from onepass.ops.mla_cache import op as mla_cache
from onepass.ops.qk_cache import op as qk_cache
from onepass.ops.rms_norm import op as rows
from onepass.ops.rms_norm.finish import LAYER_NORM
from onepass.testing.samples import sample

BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32
FP8 = torch.float8_e4m3fn
Arguments = dict[str, Any]


def names(contract: Contract) -> list[str]:
    return [*contract.args, *contract.options, *contract.out_names]


def arguments(
    contract: Contract,
    sizes: dict[str, int],
    lead: tuple[int, ...],
    first: str,
    optional: tuple[str, ...] = (),
    **changes: Any,
) -> Arguments:
    dtypes = {first: BF16, **{n: v for n, v in changes.items() if n in contract.args and isinstance(v, torch.dtype)}}
    tensors = sample(contract, sizes, lead, dtypes=dtypes, optional=optional)
    found: Arguments = {n: () if a.many else tensors.get(n) for n, a in contract.args.items()}
    found |= {n: option.default for n, option in contract.options.items()}
    found |= {n: v for n, v in changes.items() if n not in dtypes}
    return found


def with_outputs(contract: Contract, given: Arguments) -> Arguments:
    """Add caller-allocated outputs, filled with a pattern."""
    given = {**given, **{out.argument: None for out in contract.outs.values()}}
    made = validation_of(contract).prepare(*[given[name] for name in names(contract)])
    for out, tensor in zip(contract.outs.values(), made, strict=True):
        given[out.argument] = None if tensor is None else poisoned(tensor)
    return given


def poisoned(tensor: Tensor) -> Tensor:
    whole(tensor).fill_(0x5A)
    return tensor


def norm_arguments(contract: Contract = rows.RMS_NORM) -> Arguments:
    return arguments(contract, {"N": 64}, (3, 2), "x", ("gamma", "residual"), eps=0.5, weight_offset=0.0)


def heads_arguments() -> Arguments:
    """A gamma for each head, and the reciprocal RMS."""
    optional = ("head_gamma", "residual")
    given = arguments(rows.RMS_NORM, {"N": 64, "H": 2}, (3, 2), "x", optional, eps=0.5, weight_offset=1.0)
    return given | {"return_rstd": True}


def public_gamma(given: Arguments) -> Arguments:
    """The public function's arguments: one ``gamma`` of either kind."""
    gamma = given["gamma"] if given["head_gamma"] is None else given["head_gamma"]
    return {name: value for name, value in given.items() if name != "head_gamma"} | {"gamma": gamma}


def split_gamma(given: Arguments) -> Arguments:
    """The contract's two arguments for the public function's ``gamma``: that of heads has two dimensions."""
    gamma = public_gamma(given)["gamma"]
    heads = isinstance(gamma, Tensor) and gamma.dim() == 2
    return given | {"gamma": None if heads else gamma, "head_gamma": gamma if heads else None}


def public_bound(given: Arguments) -> Any:
    """The public function's ``scale_ub``, a number or a tensor."""
    return given["scale_ub"] if given["scale_ub_tensor"] is None else given["scale_ub_tensor"]


def split_bound(given: Arguments) -> Arguments:
    """The contract's two arguments for the public function's ``scale_ub``."""
    bound = public_bound(given)
    tensor = isinstance(bound, Tensor)
    return given | {"scale_ub": None if tensor else bound, "scale_ub_tensor": bound if tensor else None}


def split_both(given: Arguments) -> Arguments:
    """The contract's arguments for the public function's ``gamma`` and ``scale_ub``."""
    return split_gamma(split_bound(given))


def gated_arguments() -> Arguments:
    given = arguments(rows.RMS_NORM, {"N": 64}, (3,), "x", ("gamma", "gate", "bias"), eps=0.5, weight_offset=0.0)
    return given | {"rounding": "hf", "out_dtype": F32}


def layer_arguments() -> Arguments:
    return arguments(LAYER_NORM, {"N": 64}, (3, 2), "x", ("gamma", "residual", "bias"), eps=0.5, weight_offset=0.0)


def layer_heads_arguments() -> Arguments:
    given = arguments(LAYER_NORM, {"N": 64, "H": 2}, (3, 2), "x", ("head_gamma",), eps=0.5, weight_offset=1.0)
    return given | {"return_rstd": True}


def fp8_arguments() -> Arguments:
    given = norm_arguments(rows.RMS_NORM_FUSED_FP8)
    given |= {"group_size": 64, "return_norm": True, "scale_ub": 1.0, "fp8_max": 448.0, "weight_offset": 1.0}
    given["prologue_args"] = [torch.randn(3, 2, 64).bfloat16()]
    return given | {"prologue": onepass.prologues.silu_and_mul.key}


def quant_arguments() -> Arguments:
    """Pairs of 4-bit codes, swizzled scales and a scale in memory."""
    optional = ("gamma", "residual", "global_scale")
    given = arguments(rows.RMS_NORM_FUSED_QUANT, {"N": 96}, (3, 2), "x", optional, eps=0.5)
    given |= {"format": "nvfp4", "group_size": 16, "scale_format": "e4m3", "scales_dtype": FP8}
    return given | {"scale_layout": "128x4", "return_norm": True, "rounding": "stored"}


def packed_arguments() -> Arguments:
    """A prologue, and four exponents per word."""
    given = arguments(
        rows.RMS_NORM_FUSED_QUANT, {"N": 160}, (5,), "x", ("gamma", "scale_ub_tensor"), eps=0.0, weight_offset=1
    )
    given |= {"format": "mxfp8", "group_size": 32, "scale_format": "ue8m0", "scales_dtype": I32, "min_scale": 0.25}
    given["prologue_args"] = [torch.randn(5, 160).bfloat16()]
    return given | {"scale_layout": "column_packed", "prologue": onepass.prologues.silu_and_mul.key}


def static_arguments() -> Arguments:
    optional = ("gamma", "residual", "static_scale")
    return arguments(rows.RMS_NORM_FUSED_FP8, {"N": 64}, (3,), "x", optional, eps=0.0, weight_offset=1)


def vllm_arguments() -> Arguments:
    optional = ("gamma", "residual", "scale_ub_tensor")
    given = arguments(rows.RMS_NORM_FUSED_FP8, {"N": 64}, (3,), "x", optional, eps=0.0, weight_offset=1)
    given |= {"rounding": "hf", "round_sum": False, "quantize": "divide", "min_scale": 0.25}
    return given | {"return_rstd": True}


def linear_arguments(**changes: Any) -> Arguments:
    """All arguments, with a scale per row."""
    optional = ("gamma", "residual", "bias", "weight_scale", "add")
    options = {"eps": 0.5, "weight_offset": 1.0, "activation": "silu_mul"}
    return arguments(LINEAR, {"N": 24, "K": 32, "S": 24, "D": 12}, (3, 2), "x", optional, **(options | changes))


def blocks_arguments() -> Arguments:
    """Weights in fp8 with a scale per block, and a float32 result."""
    sizes = {"N": 130, "K": 140, "P": 2, "Q": 2, "D": 130}
    options = {"weight": FP8, "add": F32, "eps": 0.0, "out_dtype": F32}
    return arguments(LINEAR, sizes, (3,), "x", ("block_scale", "add"), **options)


def gemv_arguments(contract: Contract, **changes: Any) -> Arguments:
    sizes = {"M": 3, "N": 40, "K": 32, "W0": 24, "W1": 8, "S": 40, "C": 2, "E": 48, "B": 3}
    optional = ("gamma1", "weight_scale", "trace", "units")
    given = arguments(contract, sizes, (), "act", optional, eps=0.5, **changes)
    for name in ("finish_counter", "trace", "units"):
        if name in given:
            given[name].zero_()
    return given


def qk_arguments(contract: Contract, lead: tuple[int, ...] = (2, 3), **changes: Any) -> Arguments:
    sizes = {"Nq": 48, "Nk": 16, "Gq": 48, "Gk": 16, "Hq": 3, "Hk": 2, "D": 16, "P": 4, "R": 16}
    optional = ("freqs", "positions") if "freqs" in contract.args else ()
    options = {"weight_offset": 1.0, "dim": 8, "head_dim": 16} if optional else {}
    options |= {name: 0.5 for name in ("eps_k", "epsilon_k") if name in contract.options}
    return arguments(contract, sizes, lead, "q", optional, **(options | changes))


def mla_arguments(scale: str) -> Arguments:
    contract = mla_cache.FUSED_ROPE_RMSNORM_QUANTIZATION
    sizes = {"T": 5, "H": 3, "R": 8, "C": 40, "L": 32, "F": 6, "W": 8, "O": 3, "B": 2, "X": 4, "P": 8, "S": 4, "Z": 40}
    optional = ["freqs_cis", "input_row_offsets", "cache_lengths", "lookup_table", "positions", scale]
    index = dict.fromkeys(("input_row_offsets", "cache_lengths", "lookup_table"), I32)
    given = arguments(contract, sizes, (), "q_rope", tuple(optional), epsilon=0.5, rope_dim=8, **index)
    given["input_row_offsets"] = torch.tensor([0, 2, 5], dtype=I32)
    given["cache_lengths"] = torch.tensor([3, 1], dtype=I32)
    given["lookup_table"] = torch.tensor([[5, 1, 0, 3], [2, 7, 6, 4]], dtype=I32)
    return given


def qk_cache_arguments(layout: str, angles: tuple[str, str]) -> Arguments:
    """A paged fp8 cache, or a dense one of bfloat16; angles from a table or as a pair."""
    dense = layout == "dense"
    sizes = {"Hq": 3, "Hk": 2, "D": 16, "V": 8, "Gq": 16, "Gk": 16, "P": 4, "R": 16, "C": 8, "F": 2}
    sizes |= {"A0": 2, "A1": 2, "A2": 5} if dense else {"A0": 4, "A1": 3, "A2": 2}
    optional = ("v", "gamma_q", "gamma_k", *angles, "k_cache", "v_cache")
    places = ("starts",) if dense else ("slots", "k_scale", "v_scale")
    dtypes = {} if not dense else {"k_cache": BF16, "v_cache": BF16}
    options = {"eps": 0.5, "weight_offset": 1.0, "layout": layout, "dim": None if dense else 8}
    return arguments(qk_cache.QK_NORM_ROPE_CACHE, sizes, (2, 3), "q", (*optional, *places), **(options | dtypes))


# --- memory ---------------------------------------------------------------------------------------------------------


def tensors_of(given: Mapping[str, Any]) -> list[Tensor]:
    """Every tensor that owns memory."""
    found: list[Tensor] = []
    for value in given.values():
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if type(item) in (Tensor, torch.nn.Parameter) and item.layout is torch.strided and not item.is_meta:
                found.append(item.detach())
    return found


def whole(tensor: Tensor) -> Tensor:
    """All bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def memory(given: Mapping[str, Any]) -> dict[int, Tensor]:
    return {t.untyped_storage().data_ptr(): whole(t) for t in tensors_of(given)}


def copied(given: Arguments) -> Arguments:
    return {
        n: [t.clone() for t in v] if isinstance(v, list) else v.clone() if isinstance(v, Tensor) else v
        for n, v in given.items()
    }
