"""The model families that are tested in detail, each as a row of forms.

`onepass.patch` finds forms by code (`onepass.models.patching.forms`), in these families and in all others. The evidence
from GPUs, the tests and docs/models.md are about these rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from onepass.models.patching.forms import (
    DROPOUT,
    GLM_SANDWICH,
    HEADS_WINDOW,
    HF,
    LATENT,
    OFFSET,
    ONCE,
    POST_NORM,
    PRE_NORM,
    SANDWICH,
    TORCH,
    WHOLE,
    Attention,
    Layer,
    Mla,
    Norm,
)


@dataclass(frozen=True)
class Family:
    """A model family that is tested in detail.

    Args:
        name: Name of the family.
        module: Python module of its classes: the name of a transformers model, or a path.
        norm: Class of its RMSNorm.
        form: What the norm computes.
        layer: What a decoder layer computes.
        attention: What an attention computes, if it norms queries and keys.
        mla: What a latent attention computes.
    """

    name: str
    module: str
    norm: str
    form: Norm
    layer: Layer | None = None
    attention: Attention | None = None
    mla: Mla | None = None

    @property
    def path(self) -> str:
        """The Python module that defines the classes."""
        return self.module if "." in self.module else f"transformers.models.{self.module}.modeling_{self.module}"


# fmt: off
FAMILIES: Final = (
    #       name           module         norm                 form    layer         attention
    Family("torch.nn",    "torch.nn.modules.normalization", "RMSNorm", TORCH),
    Family("Llama",       "llama",       "LlamaRMSNorm",      HF,     PRE_NORM),
    Family("Mistral",     "mistral",     "MistralRMSNorm",    HF,     PRE_NORM),
    Family("Qwen2",       "qwen2",       "Qwen2RMSNorm",      HF,     PRE_NORM),
    Family("Qwen3",       "qwen3",       "Qwen3RMSNorm",      HF,     PRE_NORM,     HEADS_WINDOW),
    Family("Gemma 2",     "gemma2",      "Gemma2RMSNorm",     OFFSET, SANDWICH),
    Family("Gemma 3",     "gemma3",      "Gemma3RMSNorm",     OFFSET, SANDWICH,     HEADS_WINDOW),
    Family("OLMo-2",      "olmo2",       "Olmo2RMSNorm",      ONCE,   POST_NORM,    WHOLE),
    Family("Phi-3",       "phi3",        "Phi3RMSNorm",       HF,     DROPOUT),
    Family("DeepSeek-V3", "deepseek_v3", "DeepseekV3RMSNorm", HF,     PRE_NORM,     mla=LATENT),
    Family("MiniMax-M2",  "minimax_m2",  "MiniMaxM2RMSNorm",  HF,     PRE_NORM,     WHOLE),
    Family("GLM-4",       "glm4",        "Glm4RMSNorm",       HF,     GLM_SANDWICH),
    Family("gpt-oss",     "gpt_oss",     "GptOssRMSNorm",     ONCE,   PRE_NORM),
)
# fmt: on
