"""`onepass.patch` on tiny models of every architecture of transformers that has an RMSNorm."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import onepass
from onepass.models.forwards import norm
from onepass.models.patching.forms import Norm, match

pytest.importorskip("transformers")

import transformers

from onepass.models import MlaCache
from tools.architectures import classes
from tools.architectures import compare as compared
from tools.architectures.compare import (
    TOLERANCE,
    Agreement,
    Coverage,
    compare,
    coverage,
    generated,
    patched,
    why_not_run,
)
from tools.architectures.small import ARCHITECTURES, build, logits, tokens
from tools.docs.architectures_page import DATA, FOLDER

RECORDS: dict[str, Any] = {
    found["transformers"]: found for found in (json.loads((FOLDER / name).read_text()) for name in DATA)
}
RECORDED: dict[str, Any] | None = RECORDS.get(transformers.__version__)
MLA = ("axk1", "deepseek_v3", "glm4_moe_lite", "youtu")


def test_the_record_is_about_these_architectures() -> None:
    """Those of the extra's releases have all of them."""
    assert len(ARCHITECTURES) > 100
    for release, found in RECORDS.items():
        assert sorted((*found["models"], *found["not_run"])) == sorted(ARCHITECTURES)
        assert not found["not_run"] or release == "4.57.6"


def test_what_a_release_cannot_run_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not_run("no_such_model") == "this release does not have it"
    assert why_not_run("llama") == ""
    monkeypatch.setattr(compared, "build", lambda name: nn.Linear(2, 2))
    assert why_not_run("llama").startswith(f"{compared.OWN_CODE}: AttributeError: ")


@pytest.mark.sampled(9)  # some architectures stay
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_patched_models_agree(architecture: str) -> None:
    """Logits in float32 and bfloat16, and greedily generated tokens. The report says what it said when it was recorded."""
    found, agreement = compare(architecture)
    assert agreement.objection() == ""
    if RECORDED is not None:
        recorded = RECORDED["models"][architecture]
        assert {name: recorded[name] for name in vars(found)} == vars(found)
    assert found.norms > 0


def test_wrong_norms_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros, another rounding and a small error all fail the comparison."""
    own = onepass.rms_norm

    def objection(wrong: Any) -> str:
        monkeypatch.setattr(norm, "rms_norm", wrong)
        return compare("qwen3_next")[1].objection()

    def once(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **{**kwargs, "rounding": "hf" if kwargs["rounding"] == "once" else "once"})

    assert "float32 logits differ by" in objection(lambda *args, **kwargs: torch.zeros_like(args[0]))
    assert "float32 logits differ by" in objection(lambda *args, **kwargs: own(*args, **kwargs) * (1 + 2e-4))
    assert objection(once) == "no prompt has the same bfloat16 logits"
    assert objection(own) == ""


def test_differences_are_objections() -> None:
    """Each limit of `Agreement`. Not a number is never within one."""
    good: dict[str, Any] = {"error": 1e-7, "limit": TOLERANCE, "bytes_equal": False, "tokens_equal": True}
    good |= {"equal": 3, "apart": 0.0}
    assert Agreement(**good).objection() == ""
    for name, bad in {"error": float("nan"), "tokens_equal": False, "equal": 0, "apart": 1.5}.items():
        assert Agreement(**{**good, name: bad}).objection(), name


@pytest.mark.parametrize("architecture", MLA)
def test_latent_attentions_with_their_cache(architecture: str) -> None:
    """rounding="once" fuses down projections, norms, rotations and cache writes of all models with this code."""
    model = build(architecture)
    ids = tokens(2, 5)
    expected, expected_tokens = logits(model, ids), generated(model, ids)
    with onepass.patch(model, rounding="once") as handle:
        what = [change.what for change in handle.replaced]
        assert (
            what.count("down projections and their norms")
            == what.count("norm of the latent, rotation and cache write")
            == 2
        )
        got = logits(model, ids)
        cache = MlaCache(model.config.num_hidden_layers, 16)
        assert torch.equal(generated(model, ids, past_key_values=cache), expected_tokens)
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE * float(expected.abs().max()))


@pytest.mark.parametrize("architecture", ["granite", "olmo3", "glm4_moe", "qwen3_5_text"])
def test_rounding_once_generates_the_same_tokens(architecture: str) -> None:
    """In float32 there is nothing to round."""
    model = build(architecture)
    ids = tokens(2, 5)
    expected, expected_tokens = logits(model, ids), generated(model, ids)
    with patched(model, rounding="once"):
        got, got_tokens = logits(model, ids), generated(model, ids)
    assert torch.equal(got_tokens, expected_tokens)
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE * float(expected.abs().max()))


def test_coverage_counts_what_was_replaced_and_left() -> None:
    def covered(name: str) -> Coverage:
        with patched(build(name)) as handle, patched(build(name), decode=True) as decoding:
            return coverage(handle, decoding)

    assert covered("glm4_moe") == Coverage("Glm4MoeForCausalLM", 9, 2, 2, {}, 2, 1)
    found = covered("exaone4")
    assert list(found.left) == ["2 x Exaone4DecoderLayer additions", "2 x Exaone4Attention norms of q and k"]


@pytest.mark.full  # imports every model of transformers
def test_every_class_has_the_form_that_was_recorded() -> None:
    """All RMSNorm classes of transformers."""
    if RECORDED is None:
        pytest.skip("there is no record of this release")
    found = {cls.__name__: classes.describe(cls) for cls in classes.rms_norms()}
    assert found == RECORDED["classes"]
    assert len(found) > 180 and sum(map(bool, found.values())) > 0.95 * len(found)


def test_a_class_in_words() -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

    known = (LlamaRMSNorm, Gemma3RMSNorm, Qwen3NextRMSNormGated, torch.nn.GroupNorm)
    assert [classes.describe(cls) for cls in known] == ["twice", "once, offset 1", "twice, gated", ""]
    assert match(Qwen3NextRMSNormGated, Norm).form is None
