"""The model families that `onepass.patch` supports, with all their differences as data.

A row names classes of ``transformers.models.<module>.modeling_<module>``, each with the fingerprint
of the forward that the row was written for (transformers 5.17). A class whose code differs in
another release is not patched, and the report lists it. If `Family` cannot express a difference,
add a field, never a per-model function.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import textwrap
import tokenize
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from ..formats import Rounding

_LAYOUT: Final = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@dataclass(frozen=True)
class Part:
    """A class of a model, and the fingerprint of its forward."""

    cls: str
    fingerprint: str


@dataclass(frozen=True)
class Layer(Part):
    """A decoder layer in which a norm follows an addition, ``residual + attention``.

    ``norm`` is the attribute of that norm, "" if there is none. ``after_attention`` and
    ``after_mlp`` name modules (norms, dropouts) that are applied to the results before they are
    added to the residual, if any.
    """

    norm: str = "post_attention_layernorm"
    after_attention: str = ""
    after_mlp: str = ""


@dataclass(frozen=True)
class Attention(Part):
    """An attention that norms queries and keys, ``per_head`` or over whole projections."""

    per_head: bool
    window: bool = False
    """Whether it passes ``sliding_window`` to the attention function."""


@dataclass(frozen=True)
class Mla(Part):
    """A multi-head latent attention: two down projections with norms over their first columns."""


@dataclass(frozen=True)
class Family:
    """One row: the norm's class, its epsilon's name, the offset of its weight, its rounding.

    ``rounding`` is "hf", ``round(round(x * rs) * w)``, or "once", ``round((x * rs) * (w + offset))``.
    """

    name: str
    module: str
    norm: str
    fingerprint: str
    eps: str
    weight_offset: float
    rounding: Rounding
    layer: Layer | None = None
    attention: Attention | None = None
    mla: Mla | None = None

    @property
    def path(self) -> str:
        """The Python module that defines the classes."""
        return self.module if "." in self.module else f"transformers.models.{self.module}.modeling_{self.module}"


# fmt: off
FAMILIES: Final = (
    #       name           module         norm                 forward     epsilon            offset rounding
    Family("torch.nn",    "torch.nn.modules.normalization", "RMSNorm", "", "eps",        0.0, "once"),
    Family("Llama",       "llama",       "LlamaRMSNorm",      "43166e7d", "variance_epsilon",   0.0, "hf",
           Layer("LlamaDecoderLayer", "0fa2ba01")),
    Family("Mistral",     "mistral",     "MistralRMSNorm",    "43166e7d", "variance_epsilon",   0.0, "hf",
           Layer("MistralDecoderLayer", "0fa2ba01")),
    Family("Qwen2",       "qwen2",       "Qwen2RMSNorm",      "43166e7d", "variance_epsilon",   0.0, "hf",
           Layer("Qwen2DecoderLayer", "0fa2ba01")),
    Family("Qwen3",       "qwen3",       "Qwen3RMSNorm",      "43166e7d", "variance_epsilon",   0.0, "hf",
           Layer("Qwen3DecoderLayer", "0fa2ba01"),
           Attention("Qwen3Attention", "aa2aaae3", per_head=True, window=True)),
    Family("Gemma 2",     "gemma2",      "Gemma2RMSNorm",     "87bafa09", "eps",                1.0, "once",
           Layer("Gemma2DecoderLayer", "8a3eb29f", "pre_feedforward_layernorm",
                 "post_attention_layernorm", "post_feedforward_layernorm")),
    Family("Gemma 3",     "gemma3",      "Gemma3RMSNorm",     "87bafa09", "eps",                1.0, "once",
           Layer("Gemma3DecoderLayer", "d3619338", "pre_feedforward_layernorm",
                 "post_attention_layernorm", "post_feedforward_layernorm"),
           Attention("Gemma3Attention", "8dd871ba", per_head=True, window=True)),
    Family("OLMo-2",      "olmo2",       "Olmo2RMSNorm",      "ed842e24", "variance_epsilon",   0.0, "once",
           Layer("Olmo2DecoderLayer", "", norm=""),
           Attention("Olmo2Attention", "240a00f2", per_head=False)),
    Family("Phi-3",       "phi3",        "Phi3RMSNorm",       "43166e7d", "variance_epsilon",   0.0, "hf",
           Layer("Phi3DecoderLayer", "b9f7f168", "post_attention_layernorm", "resid_attn_dropout", "resid_mlp_dropout")),
    Family("DeepSeek-V3", "deepseek_v3", "DeepseekV3RMSNorm", "43166e7d", "variance_epsilon",   0.0, "hf",
           Layer("DeepseekV3DecoderLayer", "0fa2ba01"), mla=Mla("DeepseekV3Attention", "e48d29de")),
    Family("MiniMax-M2",  "minimax_m2",  "MiniMaxM2RMSNorm",  "43166e7d", "variance_epsilon",   0.0, "hf",
           Layer("MiniMaxM2DecoderLayer", "18d2f81e"),
           Attention("MiniMaxM2Attention", "240a00f2", per_head=False)),
    Family("GLM-4",       "glm4",        "Glm4RMSNorm",       "43166e7d", "variance_epsilon",   0.0, "hf",
           Layer("Glm4DecoderLayer", "74588e07", "post_attention_layernorm",
                 "post_self_attn_layernorm", "post_mlp_layernorm")),
    Family("gpt-oss",     "gpt_oss",     "GptOssRMSNorm",     "ed842e24", "variance_epsilon",   0.0, "once",
           Layer("GptOssDecoderLayer", "5a0aa7d6")),
)
# fmt: on


@cache
def classes() -> dict[tuple[str, str], tuple[Family, Part | None]]:
    """(Python module, class name) -> the row, and its part for the class; None: the norm."""
    found: dict[tuple[str, str], tuple[Family, Part | None]] = {}
    for family in FAMILIES:
        found[family.path, family.norm] = (family, None)
        parts = filter(None, (family.layer, family.attention, family.mla))
        found |= {(family.path, part.cls): (family, part) for part in parts}
    return found


@cache
def fingerprint(function: Callable[..., Any]) -> str:
    """A short hash of a function's source without comments and layout; "" if there is no source."""
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        return ""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    words = " ".join(token.string for token in tokens if token.type not in _LAYOUT)
    return hashlib.sha256(words.encode()).hexdigest()[:8]
