"""GPU kernels of `rms_norm_fused_quant`: interpreted, and what they compile to."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

import onepass
from onepass.formats import QUANT_FORMATS
from onepass.gpu.tuning.table import Regime
from tests import matrix
from tests.all_ops.test_interpreter import PROGRAM
from tests.helpers.interpreting import interpret, passed_checks
from tests.oracle.batch_regime import REGIMES, assuming
from tools.evidence import records

GROUPS = ("formats", "groups", "values", "places", "levels")


@pytest.mark.full  # all_ops/test_interpreter.py interprets cases of every op
@pytest.mark.slow
def test_interpreted_kernels_pass_their_cases() -> None:
    """Short rows of the groups that differ in codes, scales, places and stride levels."""
    short = [c for c in matrix.select(["rms_norm_fused_quant"]) if c.interpretable and c.group in GROUPS]
    indices = [matrix.CASES.index(c) for c in short if getattr(c, "n", 0) <= 384][::2]
    assert len(indices) > 20
    assert json.loads(interpret("-c", PROGRAM, json.dumps(indices)).splitlines()[-1]) == []


@pytest.mark.full  # all_ops/test_interpreter.py interprets cases of every op
def test_tiles_of_layer_norm_give_the_same_codes() -> None:
    """A case runs with the tile of every regime."""
    layer: dict[str, Any] = {"statistic": "layer", "format": "e4m3fn"}
    assert {regime: _tile(regime, **layer) for regime in REGIMES} == {
        "small": "7*1024/4w/v8",
        "large": "7*1024/4w/v8",
        "streaming": "7*1024/4w/v8/r80/late",
    }
    assert passed_checks("rms_norm_fused_quant", match="gate: 4x7168|gate: 4x8192") == 4


@pytest.mark.parametrize(
    ("options", "tile"),
    [
        ({"group_size": 128}, "7*1024/4w/v8/r96/late"),
        ({"gate": True}, "7*1024/4w/v8"),
        ({"bias": True}, "7*1024/4w/v8"),
        ({"residual": True}, "7*1024/4w/v8"),
        ({"return_norm": True}, "7*1024/4w/v8"),
    ],
)
def test_gamma_is_late_only_where_that_was_faster(options: dict[str, Any], tile: str) -> None:
    """Rows whose mean is subtracted, in a batch that no cache holds."""
    x = torch.empty(4, 7168, dtype=torch.bfloat16)
    tensors = {"gate": x, "bias": x[0], "residual": x}
    given = {name: tensors.get(name, value) for name, value in options.items()}
    assert _tile("streaming", statistic="layer", **given) == tile


def _tile(regime: Regime, **options: Any) -> str:
    """The end of a configuration's name: the tile of rows of 7168 columns."""
    x, gamma = torch.empty(4, 7168, dtype=torch.bfloat16), torch.empty(7168, dtype=torch.bfloat16)
    with assuming(regime):
        (build,) = records.builds_of(lambda: onepass.rms_norm_fused_quant(x, gamma, **options), records.H200)
    return build.name.split()[-1]


@pytest.mark.parametrize("group", QUANT_FORMATS["e5m2"].groups)
@pytest.mark.parametrize("name", ["e4m3fn", "e4m3fnuz", "e5m2"])
def test_fp8_is_the_same_kernel(name: Any, group: int | None) -> None:
    """So what ran for one op ran for the other."""
    x, gamma = torch.empty(4, 7168, dtype=torch.bfloat16), torch.empty(7168, dtype=torch.bfloat16)
    out = QUANT_FORMATS[name].codes.dtype
    (ours,) = records.builds_of(
        lambda: onepass.rms_norm_fused_fp8(x, gamma, out_dtype=out, group_size=group), records.H200
    )
    (other,) = records.builds_of(
        lambda: onepass.rms_norm_fused_quant(x, gamma, format=name, group_size=group), records.H200
    )
    assert ours == other


def test_factors_of_groups_are_the_quotients_of_ieee() -> None:
    """The shortcut of a GPU's divisions knows neither 0 nor infinity, which a global scale may be or lead to."""
    *wrong, tried = interpret("tests/rms_norm/factor_worker.py").splitlines()
    assert not wrong
    assert tried == "1600 tried"


@pytest.mark.sampled(3)  # each compiles a kernel
@pytest.mark.parametrize(
    ("options", "stores"),
    [({"format": "nvfp4"}, "st.global.b32"), ({"format": "mxfp4"}, "st.global.b32"), ({"format": "mxfp8"}, "st.global.v2.b32")],
)  # fmt: skip
def test_codes_of_a_thread_are_one_store(options: dict[str, Any], stores: str) -> None:
    """A thread holds eight adjacent columns of a chunk: their codes are packed and stored together, once per chunk."""
    x, gamma = torch.empty(4096, 7168, dtype=torch.bfloat16), torch.empty(7168, dtype=torch.bfloat16)
    (build,) = records.builds_of(lambda: onepass.rms_norm_fused_quant(x, gamma, **options), records.H200)
    assert "7*1024/4w/v8" in build.name
    ptx = records.lowered(build, records.H200, "ptx")
    assert len(re.findall(rf"{re.escape(stores)} ", ptx)) == 7
