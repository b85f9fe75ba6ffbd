"""docs/reference.md maps every name of the reference: each row is checked, and no name is missing.

The checks are in `tests.all_ops.reference_checks` and `reference_norm_checks`. They restate the
reference's formulas in float64, without onepass' own oracle.
"""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.all_ops import reference_norm_checks

ROOT = Path(__file__).resolve().parents[2]
CHECKS = reference_norm_checks.CHECKS

NAMES = {
    "gemv_partial_norm": """gemv_and_partial_norm gemv_and_partial_norm_with_scratch gemv_and_partial_norm_unfused_with_scratch
        gemv_partial_norm_kernel GEMV_TRACE_EVENTS_PER_BLOCK TraceBuf store GmemTrace ptr NullTrace x W transpose_b gamma eps N_normed
        normed_output unnormed finish_counter y_scratch""",
    "fused_rope_rmsnorm_quantization_kernel": """fused_rope_rmsnorm_quantization_kernel dtype freq_dtype gamma_dtype
        QRopeOutputLayoutType QRopeLayoutType KVLayoutType InputRowOffsetsLayoutType FreqsCisLayoutType GammaLayoutType cache_t
        block_size n_rope_blocks n_rms_blocks q_rope_output q_rope kv input_row_offsets freqs_cis gamma k_cache epsilon kv_norm_dim
        cache_head_dim""",
    "apply_qk_rms_norm": """apply_qk_rms_norm in_dtype out_dtype target q_out k_out gamma_q gamma_k qk_var q k epsilon rows q_cols
        k_cols ctx""",
    "rms_norm_fused_fp8": """rms_norm_fused_fp8 in_dtype out_dtype scales_dtype rank input_fn target shape output gamma epsilon
        weight_offset ctx scale_ub scale_output""",
}
"""The names on the reference's pages, by page, without constraints."""


class Row(NamedTuple):
    """One row of a table."""

    page: str
    name: str
    places: str
    why: str
    checks: tuple[str, ...]


def rows() -> list[Row]:
    found = []
    for section in (ROOT / "docs/reference.md").read_text().split("\n## ")[1:]:
        page, *lines = section.splitlines()
        for line in lines:
            if line.startswith("|") and not line.startswith(("| reference", "|---")):
                name, places, why, checks = (cell.strip() for cell in line.strip("|").split("|"))
                found.append(Row(page, name, places, why, tuple(re.findall("`([^`]+)`", checks))))
    return found


ROWS = rows()


def missing(place: str) -> str | None:
    """None, or why something like ``onepass.f(parameter)`` does not exist."""
    path, _, parameter = place.removesuffix(")").partition("(")
    module, *names = path.split(".")
    found: Any = import_module(module)
    for i, name in enumerate(names):
        if not hasattr(found, name):
            try:
                import_module(".".join((module, *names[: i + 1])))
            except ImportError:
                return f"{path} does not exist"
        found = getattr(found, name)
    if parameter and parameter not in inspect.signature(found).parameters:
        return f"{path} has no parameter {parameter}"
    return None


# --- the document ---------------------------------------------------------------------------------------------------


def test_every_name_of_the_reference_has_a_row() -> None:
    for page, names in NAMES.items():
        named = [row.name[1:-1] for row in ROWS if row.page == page and re.fullmatch("`[A-Za-z_0-9]+`", row.name)]
        assert sorted(named) == sorted(names.split()), page
    assert {row.page for row in ROWS} == set(NAMES)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.page}-{row.name.strip('`')}")
def test_names_exist_as_documented(row: Row) -> None:
    if "triton" in row.places:
        pytest.importorskip("triton")
    places = re.findall("(not )?`([^`]+)`", row.places)
    assert places and row.why.endswith(".") and row.checks, row
    for absent, place in places:
        fault = missing(place)
        assert ("no parameter" in (fault or "")) if absent else fault is None, f"{place}: {fault}"


def test_missing_names_are_detected() -> None:
    assert missing("onepass.rms_norm") is None and missing("onepass.rms_norm(eps)") is None
    assert missing("onepass.dist.qk_rms_norm(group)") is None
    assert missing("onepass.no_norm") == "onepass.no_norm does not exist"
    assert missing("onepass.TraceBuf.load") == "onepass.TraceBuf.load does not exist"
    assert missing("onepass.rms_norm(epsilon)") == "onepass.rms_norm has no parameter epsilon"


@pytest.mark.sampled(4)  # some rows of docs/reference.md stay
@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, marks=[pytest.mark.full] if check == "mla_dtypes" else [])  # three seconds
        for check in sorted({check for row in ROWS for check in row.checks})
    ],
)
def test_check(check: str) -> None:
    """Run a check of this file; a test elsewhere must exist, and runs there."""
    path, _, name = check.partition("::")
    if name:
        assert re.search(rf"^(    )?def {name}\(", (ROOT / path).read_text(), re.M), check
    else:
        torch.manual_seed(0)
        CHECKS[check]()


def test_every_check_belongs_to_a_row() -> None:
    assert set(CHECKS) == {check for row in ROWS for check in row.checks if "::" not in check}
