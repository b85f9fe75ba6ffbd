"""The forms of norms, decoder layers, attentions and MLPs that `onepass.patch` can replace, and `register`.

A form states what a forward computes. It is looked up by the forward's fingerprint (`code.py`), so a row
describes code, not a model: all classes with this code are replaced, in any model and release. If
a form cannot express a difference, add a field, never a per-model function.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final, Literal, NamedTuple

from torch import nn

from ...core.contract import describe
from ...errors import ContractError
from ...formats import Rounding
from ...nn.norm import check_options
from ...ops.rms_norm.launch import GATE_ORDERS, STATISTICS, Statistic
from ...rope import RopeStyle
from ..forwards.angles import Angles
from .code import Code, NotComparable, code_of, fingerprint_of

OTHER_CODE: Final = "its code is not one of the supported forms (onepass.models.register adds one)"
_ATTEND: Final = frozenset({"ALL_ATTENTION_FUNCTIONS", "eager_attention_forward"})


@dataclass(frozen=True, kw_only=True)
class Form:
    """What a forward computes. Attributes that its fields name do not have to exist before `patch`."""

    called: ClassVar[frozenset[str]] = frozenset()
    """What counts by name only in the code, because the module's own functions and methods of these names are called."""

    def __post_init__(self) -> None:
        """Reject fields of a wrong type."""
        for field in fields(self):
            value = getattr(self, field.name)
            expected = {"str": str, "bool": bool}.get(str(field.type))
            if expected is not None and type(value) is not expected:
                raise ContractError(
                    f"{type(self).__name__}: `{field.name}` must be a {expected.__name__}, got {describe(value)}"
                )


@dataclass(frozen=True, kw_only=True)
class Norm(Form):
    """An RMSNorm: ``round(round(x * rs) * w)`` with "hf", ``round((x * rs) * (w + weight_offset))`` with "once".

    Args:
        rounding: "hf" or "once".
        weight_offset: Added to the weight in float32.
        eps: The attribute that holds the epsilon.
        flag: If set, the form applies only to norms whose attribute of this name is True.
    """

    rounding: Rounding
    weight_offset: float = 0.0
    eps: str = "eps"
    flag: str = ""

    def __post_init__(self) -> None:
        check_options(type(self), rounding=self.rounding, weight_offset=self.weight_offset)
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class OtherNorm(Form):
    """A norm that is not fused with an addition or an attention: gated, in groups, without a weight, or LayerNorm.

    A gate is applied after the norm or before it::

        y = norm(x) * act(gate)         gate="after"
        y = norm(x * act(gate))         gate="before"

    Fields that are "" do not apply.

    Args:
        rounding: "once" or "hf".
        statistic: "rms" or "layer".
        weighted: Whether there is a weight. Without groups it may be [H, N]: heads x [..., H, N] then have a weight each.
        gate: What the activated second argument multiplies: the norm ("after"), x ("before"), or nothing ("").
        gates_norm: The attribute that decides between the two: True means "after".
        activation: The attribute that names the activation, "silu" or "sigmoid"; "" means silu.
        groups: The attribute that holds the number of groups of columns that are normed separately.
        group_size: The attribute that holds the number of columns per group. If its value is None, there are no groups.
        squeezes: Whether a batch of single tokens [B, 1, N] is returned as [B, N].
        weight_offset: Added to the weight in float32.
        same_dtype: Whether the model's own forward runs where the dtypes of x and weight differ.
        eps: The attribute that holds the epsilon.
    """

    rounding: Rounding = "once"
    statistic: Statistic = "rms"
    weighted: bool = True
    gate: Literal["", "after", "before"] = ""
    gates_norm: str = ""
    activation: str = ""
    groups: str = ""
    group_size: str = ""
    squeezes: bool = False
    weight_offset: float = 0.0
    same_dtype: bool = False
    eps: str = "eps"

    def __post_init__(self) -> None:
        check_options(type(self), rounding=self.rounding, weight_offset=self.weight_offset)
        for name, value, allowed in (
            ("statistic", self.statistic, STATISTICS),
            ("gate", self.gate, ("", *GATE_ORDERS)),
        ):
            if value not in allowed:
                raise ContractError(
                    f"OtherNorm: `{name}` must be {' or '.join(map(repr, allowed))}, got {describe(value)}"
                )
        grouped = bool(self.groups or self.group_size)
        if self.statistic == "layer" and (self.gate or grouped or self.rounding != "once"):
            raise ContractError(
                "OtherNorm: `statistic` must be 'rms' with a gate, groups or rounding='hf', got 'layer'"
            )
        if grouped and not self.weighted:
            raise ContractError("OtherNorm: `weighted` must be True with groups, got False")
        if self.weight_offset and (not self.weighted or self.statistic == "layer"):
            raise ContractError("OtherNorm: `weight_offset` must be 0 without a weight and for LayerNorm")
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class Layer(Form):
    """A decoder layer in which a norm follows the addition after the attention::

        residual = h + multiplier * after_attention(self_attn(before(h)))
        return residual + multiplier * after_mlp(mlp(norm(residual)))

    All fields are names of attributes. The layer passes all its arguments to the attention by name.

    Args:
        norm: The norm; "" if none follows an addition, so that there is nothing to fuse.
        before: The norm before the attention.
        mlp: The MLP.
        after_attention: A module such as a norm or a dropout; "" if there is none.
        after_mlp: The same after the MLP.
        multiplier: Factor of both additions; "" if there is none.
    """

    norm: str = "post_attention_layernorm"
    before: str = "input_layernorm"
    mlp: str = "mlp"
    after_attention: str = ""
    after_mlp: str = ""
    multiplier: str = ""


@dataclass(frozen=True, kw_only=True)
class Attention(Form):
    """An attention that computes ``rope(q_norm(q_proj(x)))``, and the same for k.

    Args:
        per_head: Whether the norms see heads or whole projections.
        window: Whether ``sliding_window`` is passed to the attention function.
        cache_position: Whether cos, sin and cache_position are passed to the cache, as in transformers 4.57.
        gated: Whether each query head's projection is followed by a gate's, whose sigmoid multiplies the head's output.
        flag: If set, the form applies only to attentions whose attribute of this name is True.
    """

    called: ClassVar[frozenset[str]] = _ATTEND | {"apply_rotary_pos_emb"}
    per_head: bool
    window: bool = False
    cache_position: bool = False
    gated: bool = False
    flag: str = ""


@dataclass(frozen=True, kw_only=True)
class PlainAttention(Form):
    """An attention that computes ``rope(q_proj(x))`` without a norm, and the same for k.

    Only ``decode=True`` replaces it, and not in training. Fields that are "" do not apply.

    Args:
        window: The attribute that is passed to the attention function as ``sliding_window``; "config.sliding_window" is the
            configuration's.
        softcap: The attribute that is passed as ``softcap``.
        packed: The projection of q, k and v in this order; "" means ``q_proj``, ``k_proj`` and ``v_proj``.
        rotates: If set, heads are rotated only where this attribute is true.
        cache_position: As in `Attention`.
    """

    called: ClassVar[frozenset[str]] = _ATTEND | {"apply_rotary_pos_emb"}
    window: str = ""
    softcap: str = ""
    packed: str = ""
    rotates: str = ""
    cache_position: bool = False


@dataclass(frozen=True, kw_only=True)
class Mlp(Form):
    """A gated MLP, ``down(act(gate(x)) * up(x))``. Only ``decode=True`` replaces it, and not in training.

    All fields are names of attributes.

    Args:
        gate: Projection of the gate.
        up: Projection that is multiplied with the gate.
        down: Projection of the product.
        act: The activation.
        packed: The projection of gate and up in this order; "" means ``gate`` and ``up``.
    """

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    act: str = "act_fn"
    packed: str = ""


@dataclass(frozen=True, kw_only=True)
class Mla(Form):
    """A multi-head latent attention: two down projections with norms over their first columns.

    Its rotation is part of the form, because the fused cache write computes it.
    """

    called: ClassVar[frozenset[str]] = _ATTEND | {"expand_kv"}


HF: Final = Norm(rounding="hf", eps="variance_epsilon")
ONCE: Final = Norm(rounding="once", eps="variance_epsilon")
OFFSET: Final = Norm(rounding="once", weight_offset=1.0)
TORCH: Final = Norm(rounding="once")
"""torch.nn.RMSNorm; an epsilon of None is allowed there."""
GATED_NORM: Final = OtherNorm(rounding="hf", gate="after", activation="activation", eps="variance_epsilon")
GATED_ONCE: Final = OtherNorm(rounding="once", gate="after", activation="activation", eps="variance_epsilon")
PRE_NORM: Final = Layer()
DROPOUT: Final = Layer(after_attention="resid_attn_dropout", after_mlp="resid_mlp_dropout")
SANDWICH: Final = Layer(
    norm="pre_feedforward_layernorm",
    after_attention="post_attention_layernorm",
    after_mlp="post_feedforward_layernorm",
)
GLM_SANDWICH: Final = Layer(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")
POST_NORM: Final = Layer(
    norm="", before="", after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm"
)
HEADS: Final = Attention(per_head=True)
HEADS_WINDOW: Final = Attention(per_head=True, window=True)
WHOLE: Final = Attention(per_head=False)
PLAIN: Final = PlainAttention()
PLAIN_WINDOW: Final = PlainAttention(window="sliding_window")
LATENT: Final = Mla()
GATED: Final = Mlp()
GATED_PACKED: Final = Mlp(packed="gate_up_proj", act="activation_fn")

# fmt: off
FORMS: Final[tuple[tuple[str, Form], ...]] = (
    # norms
    ("eabce2cafc0b", HF),  # Llama, and most others
    ("df74e8ad73cd", Norm(rounding="hf")),  # Llama 4
    ("56ce46e19bc5", ONCE),  # OLMo-2, gpt-oss
    ("7b4c953159fb", ONCE),  # Helium
    ("facdcf2c34ee", Norm(rounding="once")),  # Moshi
    ("f18841b7e57a", OFFSET),  # Gemma
    ("d79fb167f4dc", Norm(rounding="once", flag="with_scale")),  # Gemma 3n, Gemma 4: pow(mean, -0.5) in float32
    # gated norms, norms without a weight, and LayerNorm
    ("c8c7f0b07e8f", GATED_NORM),  # Qwen3-Next
    ("6f2ba1d60abb", GATED_NORM),  # Qwen3.5
    ("a068e849c495", GATED_NORM),  # Qwen3.5-MoE
    ("4b1f8d99011b", GATED_NORM),  # Qwen4
    ("a1ae42c933cd", GATED_NORM),  # OLMo-Hybrid
    ("cd3aac5eecab", GATED_ONCE),  # Kimi Linear
    ("021c46eceb10", GATED_ONCE),  # GLM-5-Next
    ("18da5002b970", OtherNorm(rounding="hf", gate="before", eps="variance_epsilon")),  # Mamba-2, Bamba, GraniteMoeHybrid
    ("0b0360675a79", OtherNorm(rounding="hf", gate="before", eps="variance_epsilon",
                               group_size="group_size")),  # Zamba2, Nemotron-H
    ("dbe728557b1d", OtherNorm(gate="before", gates_norm="norm_before_gate", groups="n_groups", squeezes=True,
                               eps="variance_epsilon")),  # Falcon-H1
    ("e0b55569827f", OtherNorm(gate="before", gates_norm="norm_before_gate", groups="n_groups",
                               eps="variance_epsilon")),  # Falcon-H1, transformers 5.23
    ("152a1127d2ab", OtherNorm(weight_offset=1.0, group_size="group_size")),  # Qwen4
    ("80711b98fb9f", OtherNorm(rounding="hf", same_dtype=True, eps="variance_epsilon")),  # T5, Idefics
    ("1cfc54d9bd4a", OtherNorm(weighted=False)),  # FalconMamba, Llama 4, nanochat
    ("13eba5c8f517", OtherNorm(statistic="layer", eps="variance_epsilon")),  # Cohere
    # decoder layers
    ("eb0ee7e37d7b", PRE_NORM),  # Llama, and most others
    ("bb3842315df8", PRE_NORM),  # the same in transformers 4.57, which passes cache_position
    ("7e4bc97f330a", PRE_NORM),  # Mixtral
    ("bfca195cf6f4", PRE_NORM),  # Qwen3-MoE, transformers 4.57
    ("1d95e69c4e47", PRE_NORM),  # Qwen3-VL
    ("d8607c6c40a9", PRE_NORM),  # Qwen3-VL, transformers 4.57
    ("e552ce142994", PRE_NORM),  # gpt-oss
    ("a165cd7858d4", PRE_NORM),  # gpt-oss, transformers 4.57
    ("9fc3e242c13c", Layer(mlp="block_sparse_moe")),  # Mixtral, transformers 4.57
    ("25fac184cc81", Layer(norm="pre_ff_layernorm", mlp="feed_forward")),  # Jamba
    ("b3d8de0c312a", Layer(norm="feedforward_layernorm", before="attention_layernorm")),  # Apertus
    ("679ab5639e43", Layer(norm="feedforward_layernorm", before="attention_layernorm")),  # Apertus, transformers 4.57
    ("caa7a7f58c91", Layer(norm="pre_feedforward_layernorm")),  # VaultGemma
    ("505e8a71da96", Layer(multiplier="residual_multiplier")),  # Granite
    ("f68e69a59490", Layer(multiplier="residual_multiplier", mlp="block_sparse_moe")),  # GraniteMoe
    ("cdc44c12e84c", Layer(multiplier="residual_scale")),  # MiniCPM3
    ("2cd107747f6c", DROPOUT),  # Phi-3
    ("cd5f38ddd51a", DROPOUT),  # Phi-3, transformers 4.57
    ("dd80ce4c75b7", Layer(after_attention="dropout", after_mlp="dropout")),  # Emu3
    ("8f189359f943", SANDWICH),  # Gemma 2, Gemma 3
    ("edab62a4aac0", Layer(norm="pre_mlp_layernorm", after_attention="post_attention_layernorm",
                           after_mlp="post_mlp_layernorm")),  # AFMoE
    ("2178d1222389", GLM_SANDWICH),  # GLM-4
    ("34e9d562d3f1", GLM_SANDWICH),  # GLM-4, transformers 4.57
    ("328f4e587d58", GLM_SANDWICH),  # GLM-4V
    ("aa4e50886855", Layer(after_attention="post_norm1", after_mlp="post_norm2",
                           multiplier="residual_multiplier")),  # HyperCLOVA X
    ("f317064730f2", POST_NORM),  # OLMo-2, EXAONE 4
    ("4aa41ca22899", POST_NORM),  # the same in transformers 4.57
    ("ecd5a058ac28", POST_NORM),  # FlexOlmo
    # attentions
    ("eea86af35e9e", HEADS_WINDOW),  # Qwen3
    ("c6e44f8ace5f", HEADS_WINDOW),  # Gemma 3
    ("aa00dabc5073", HEADS),  # Qwen3-VL
    ("9ec9ee313f52", HEADS),  # Apertus
    ("4631fb0baa38", Attention(per_head=True, flag="use_qk_norm")),  # GLM-4-MoE
    ("3995af2d93ee", Attention(per_head=True, gated=True)),  # Qwen3-Next, Qwen3.5
    ("13d95b4e16be", WHOLE),  # OLMo-2, MiniMax-M2
    ("98b88fbd3c19", Attention(per_head=False, window=True)),  # OLMo-3
    # the same in transformers 4.57
    ("77696cfebdb4", Attention(per_head=True, window=True, cache_position=True)),  # Qwen3
    ("12558cab2314", Attention(per_head=True, window=True, cache_position=True)),  # Gemma 3
    ("b807a943f710", Attention(per_head=True, cache_position=True)),  # Qwen3-VL
    ("eaa0ffcdab9d", Attention(per_head=True, cache_position=True)),  # Apertus
    ("b93fd2880146", Attention(per_head=True, cache_position=True, flag="use_qk_norm")),  # GLM-4-MoE
    ("60f87d138760", Attention(per_head=True, gated=True, cache_position=True)),  # Qwen3-Next
    ("f9b58822822b", Attention(per_head=False, cache_position=True)),  # OLMo-2
    ("63edb047aee0", Attention(per_head=False, window=True, cache_position=True)),  # OLMo-3
    # attentions without norms of q and k
    ("1a198f44f686", PLAIN),  # Llama, GLM-4, and most others
    ("f1e5366947d6", PLAIN_WINDOW),  # Qwen2
    ("7ca9edc75d6f", PlainAttention(window="config.sliding_window")),  # Mistral, Mixtral
    ("fd2f54ad47ee", PlainAttention(window="config.sliding_window", packed="qkv_proj")),  # Phi-3
    ("4f8fa3577f15", PlainAttention(window="sliding_window", softcap="attn_logit_softcapping")),  # Gemma 2
    ("d7063512355b", PLAIN),  # Seed-OSS, with a dropout for training
    ("57859d3f3173", PlainAttention(window="sliding_window", rotates="use_rope")),  # SmolLM3
    # the same in transformers 4.57
    ("0d0ed7951ea4", PlainAttention(cache_position=True)),  # Llama, GLM-4, and most others
    ("bcc721618c26", PlainAttention(window="sliding_window", cache_position=True)),  # Qwen2
    ("ee92b5fcc51a", PlainAttention(window="config.sliding_window", cache_position=True)),  # Mistral, Mixtral
    ("65dc1e452e97", PlainAttention(window="config.sliding_window", packed="qkv_proj", cache_position=True)),  # Phi-3
    ("a0d948dbc7e7", PlainAttention(window="sliding_window", softcap="attn_logit_softcapping",
                                    cache_position=True)),  # Gemma 2
    ("851afb91f0aa", PlainAttention(window="sliding_window", rotates="use_rope", cache_position=True)),  # SmolLM3
    # latent attentions
    ("7950afb51ebc", LATENT),  # DeepSeek-V3
    ("8fd490193c3b", LATENT),  # A.X K1, transformers 5.22
    # MLPs
    ("83086cd3f24b", GATED),  # Llama, and most others
    ("5e12bac77364", GATED),  # Seed-OSS, with a dropout for training
    ("06cb54b8875d", GATED_PACKED),  # Phi-3, GLM-4
)
# fmt: on
"""Fingerprint -> form; a comment names models that have this code, in transformers 5.17 unless stated."""


class Rotation(NamedTuple):
    """A rotation of queries and keys by cosines and sines: which columns form a pair, and how it rounds.

    ``wide`` computes in float32 and rounds once, given cosines in float32. Otherwise every product is rounded.
    """

    style: RopeStyle
    wide: bool = False


ROTATIONS: Final = {
    "3b29858bdce3": Rotation("half"),  # Llama, and most others
    "1f8505550fc1": Rotation("half"),  # GLM-4-MoE, MiniMax-M2: may rotate only the first columns
    "fb6121735f00": Rotation("half"),  # Phi-3: the same
    "9c04339a09dd": Rotation("interleaved"),  # GLM-4
    "b0e8eb9e1827": Rotation("half", wide=True),  # OLMo-2
    "27ebeabc7ece": Rotation("interleaved", wide=True),  # ERNIE 4.5
    # the same in transformers 4.57
    "794f0c43c0d8": Rotation("half"),
    "58d853b23e82": Rotation("half"),
    "386e1d53f7e3": Rotation("half"),
    "3aa676a3df31": Rotation("interleaved"),
    "1443c6ec9f0e": Rotation("half", wide=True),
    "5d77221fa8d1": Rotation("interleaved", wide=True),
}
"""Fingerprint of ``apply_rotary_pos_emb`` -> what `qk_norm_rope_cache` does instead in a decode step."""

_AROUND: Final = {"torch.utils._contextlib", "transformers.modeling_rope_utils"}
"""Modules whose decorators change nothing here: `torch.no_grad`, and the update of rotations that are not `_FIXED`."""
OTHER_ANGLES: Final = "its code is not one of the supported rotary embeddings"
_FIXED: Final = ("default", "linear", "llama3", "yarn", "proportional")
"""Rotations whose frequencies do not depend on the length of a sequence."""


ANGLES: Final = {
    "2da0f96d1313": Angles(),  # Llama, and most others
    "7de828183bf3": Angles(),  # Gemma 2
    "e765f0ce0a0a": Angles(by_layer=True),  # Gemma 3
    "81c896e5b9a7": Angles(wide=True),  # OLMo-2, ERNIE 4.5
    "d6a13f54655e": Angles(wide=True, by_layer=True),  # OLMo-3
    # the same since transformers 5.22, which multiplies without matrices
    "fc02ce14f4d1": Angles(),  # Llama, Gemma 2, and most others
    "df5df0269190": Angles(by_layer=True),
    "b4221af660e7": Angles(wide=True),
    "c812b4a5f78c": Angles(wide=True, by_layer=True),
    # the same in transformers 4.57
    "f12680bccbb7": Angles(),  # Llama, and most others
    "8016b4cf435f": Angles(wide=True),  # OLMo-2
    "b521da35bada": Angles(wide=True),  # ERNIE 4.5
}
"""Fingerprint of a rotary embedding's forward -> what it returns; in transformers 5.17 unless stated."""

EXPERTS: Final = frozenset({"6df36ae0cf2a", "bf656b4e18a4"})
"""Fingerprints of the eager forward of experts, in transformers 5.17 and since 5.22: Mixtral, Qwen3-MoE, DeepSeek-V3 and more."""
ROUTERS: Final = frozenset(
    {
        "4bd30f91076f",  # DeepSeek-V3, GLM-4-MoE
        "1cd0bafd6cb1",  # Qwen3-MoE, Qwen2-MoE, OLMoE
        "d68682dee3ad",  # Qwen3.5-MoE, Qwen3-VL-MoE
        "59d5153c51e3",  # Mixtral, MiniMax
        "c55cea5261c5",  # MiniMax-M2
    }
)
"""Fingerprints of the forward of routers that choose experts for each token by itself."""
_CHOICE: Final = "transformers.integrations.moe"
"""The module of the decorator that chooses how experts are computed."""

_registered: Final[dict[tuple[type, str], Form]] = {(type(form), fingerprint): form for fingerprint, form in FORMS}
_lock: Final = threading.Lock()


class Match(NamedTuple):
    """The form of a class and its code, or why there is none."""

    form: Form | None
    code: Code | None = None
    why: str = ""


def match(cls: type[nn.Module], kind: type[Form]) -> Match:
    """The form of this kind that a class has."""
    if kind is Norm and cls.forward is nn.RMSNorm.forward:
        return Match(TORCH)
    try:
        code = code_of(cls, kind.called)
    except NotComparable as error:
        return Match(None, why=f"its code cannot be compared: {error}")
    form = _registered.get((kind, code.fingerprint))
    return Match(form, code, "" if form else OTHER_CODE)


def rotation_of(module: object) -> Rotation | None:
    """The rotation of a Python module's ``apply_rotary_pos_emb``; None if it is unknown."""
    try:
        return ROTATIONS.get(fingerprint_of(getattr(module, "apply_rotary_pos_emb", None)))
    except NotComparable:
        return None


def own_forward(cls: type[nn.Module]) -> str:
    """The fingerprint of a class's forward, without the choice of how experts are computed; "" if it cannot be read."""
    forward: Any = cls.forward
    if hasattr(forward, "__wrapped__") and forward.__globals__.get("__name__") == _CHOICE:
        forward = forward.__wrapped__
    try:
        return fingerprint_of(forward)
    except NotComparable:
        return ""


def angles_of(module: nn.Module) -> Angles | str | None:
    """What a rotary embedding computes, or why it cannot be replaced; None for other modules."""
    if not any(name.endswith("inv_freq") for name in module._buffers):
        return None
    types = getattr(module, "rope_type", None)
    kinds = types.values() if isinstance(types, dict) else [types]
    other = [kind for kind in kinds if kind not in _FIXED]
    if other:
        return f"its rope_type is {other[0]!r}"
    forward: Any = type(module).forward
    while hasattr(forward, "__wrapped__"):
        wrapper = forward.__globals__.get("__name__")
        if wrapper not in _AROUND:
            return f"its forward is wrapped by code of {wrapper}"
        forward = forward.__wrapped__
    try:
        return ANGLES.get(fingerprint_of(forward), OTHER_ANGLES)
    except NotComparable as error:
        return f"its code cannot be compared: {error}"


def register(cls: type[nn.Module], form: Form) -> None:
    """Let `onepass.patch` replace a class, and all other classes whose forward does the same.

    `patch` cannot check that this is true, so compare the outputs once.

    Args:
        cls: The class of the module.
        form: What its forward computes: a `Norm` or `OtherNorm`, a decoder `Layer`, an `Attention`, and for ``decode=True``
            also a `PlainAttention`, an `Mla` or an `Mlp`.

    Raises:
        ContractError: If the same code is registered with a different form. The same form again does nothing.

    >>> import torch, onepass
    >>> from onepass.models import Norm, register
    >>> class ScaleNorm(torch.nn.Module):
    ...     def __init__(self, size):
    ...         super().__init__()
    ...         self.scale_eps, self.weight = 1e-6, torch.nn.Parameter(torch.zeros(size))
    ...     def forward(self, x):
    ...         y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.scale_eps)
    ...         return (y * (1 + self.weight.float())).to(x.dtype)
    >>> register(ScaleNorm, Norm(rounding="once", weight_offset=1.0, eps="scale_eps"))
    >>> onepass.patch(torch.nn.Sequential(ScaleNorm(8)))
    Sequential: 1 replaced, 0 left
      replaced 1 x ScaleNorm norm: rms_norm, rounding once
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ContractError(f"register: `cls` must be a subclass of torch.nn.Module, got {describe(cls)}")
    if not isinstance(form, Form):
        kinds = "Norm, OtherNorm, Layer, Attention, PlainAttention, Mla or Mlp"
        raise ContractError(f"register: `form` must be a {kinds}, got {describe(form)}")
    try:
        key = type(form), code_of(cls, form.called).fingerprint
    except NotComparable as error:
        raise ContractError(
            f"register: `cls` must have a forward whose code can be read; {cls.__name__}: {error}"
        ) from None
    with _lock:
        registered = _registered.setdefault(key, form)
    if registered != form:
        raise ContractError(
            f"register: `form` must be the one that {cls.__name__}'s code already has, {registered}, got {form}"
        )
