"""What a call of `generate` asks for, checked: anything that the recorded step cannot do raises an error that names it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers.cache_utils import DynamicCache, StaticCache
from transformers.generation.configuration_utils import GenerationConfig, GenerationMode
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from ...core.contract import describe
from ...errors import ContractError
from ..forwards.cache import Cache
from .state import FULL, LAYERS, PATTERNS, SLIDING, Model, Shape, State

ROUND_TO: Final = 64
"""Lengths of caches are multiples of this, so that prompts of similar lengths share a step."""
_FLAGS: Final = (
    "return_dict_in_generate",
    "output_scores",
    "output_logits",
    "output_attentions",
    "output_hidden_states",
    "penalty_alpha",
    "dola_layers",
    "prompt_lookup_num_tokens",
    "assistant_early_exit",
    "use_mtp",
    "constraints",
    "force_words_ids",
    "prefill_chunk_size",
    "compile_config",
    "is_assistant",
)
_WARPERS: Final[dict[type, tuple[str, ...]]] = {
    TemperatureLogitsWarper: ("temperature",),
    TopKLogitsWarper: ("top_k", "filter_value"),
    TopPLogitsWarper: ("top_p", "filter_value", "min_tokens_to_keep"),
}
_MODEL_ARGUMENTS: Final = ("attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep")
_ROPES: Final = ("dynamic", "longrope")
"""Rotations whose frequencies the host changes when a sequence gets long."""


class Request(NamedTuple):
    """A call of `generate` that can be recorded."""

    cache: Cache
    keeps_cache: bool
    """Whether the caller passed the cache, and gets it back with all tokens."""
    fresh: int | None
    """How many of the prompt's tokens are not in the cache, or None for all."""
    mask: Tensor
    positions: Tensor
    """The positions of the prompt's last tokens, [batch, 1]."""
    new_tokens: int
    eos: tuple[int, ...]
    pad: int
    warpers: Sequence[Any]
    sampling: bool
    length: int
    key: tuple[object, ...]
    """Calls with equal keys can use the same step."""


def refuse(name: str, value: object) -> None:
    """Raise if an argument that cannot be recorded was given."""
    if value:
        _fail(f"`{name}` is not supported, got {describe(value)}")


def _fail(what: str) -> NoReturn:
    raise ContractError(f"generate: {what}; without `custom_generate` transformers' own loop supports it")


def read_request(
    model: Model,
    input_ids: Tensor,
    processors: Sequence[object],
    criteria: Sequence[object],
    config: GenerationConfig,
    arguments: dict[str, Any],
) -> Request:
    """Check a call and collect what it asks for."""
    _check_model(model, input_ids.device)
    _check_config(config)
    for name, value in arguments.items():
        if name not in _MODEL_ARGUMENTS and value is not None:
            _fail(f"the model argument `{name}` is not supported")
    for processor in processors:
        if type(processor) not in _WARPERS:
            _fail(f"the logits processor {type(processor).__name__} is not supported")
    limit, eos = _ends(criteria)
    pad = getattr(config, "_pad_token_tensor", None)
    if eos and pad is None:
        _fail("`pad_token_id` must be set where sequences end")
    if limit is None:
        _fail("`max_new_tokens` or `max_length` must be set")
    cache = check_cache(arguments.get("past_key_values"))
    mask, positions = _prompt(input_ids, arguments)
    given_all = mask.shape[1] == input_ids.shape[1]
    new_tokens = limit - input_ids.shape[1]
    longest = max(mask.shape[1] + new_tokens, getattr(config, "max_cache_len", None) or 0)
    length = -(-longest // ROUND_TO) * ROUND_TO
    sampling = bool(config.do_sample)
    warpers = tuple((type(p), *(getattr(p, name) for name in _WARPERS[type(p)])) for p in processors)
    autocast = torch.is_autocast_enabled(mask.device.type) and torch.get_autocast_dtype(mask.device.type)
    settings = (model.config._attn_implementation, model.dtype, mask.device, autocast)
    return Request(
        cache=cache,
        keeps_cache=getattr(cache, "_is_user_defined", False),
        fresh=input_ids.shape[1] - int(cache.get_seq_length()) if given_all else None,
        mask=mask,
        positions=positions,
        new_tokens=new_tokens,
        eos=eos,
        pad=int(pad) if eos and pad is not None else 0,
        warpers=tuple(processors),
        sampling=sampling,
        length=length,
        key=(len(mask), length, len(eos), sampling, warpers, settings),
    )


def _check_model(model: Model, device: torch.device) -> None:
    if model.config.is_encoder_decoder:
        _fail(f"a model with an encoder, {type(model).__name__}, is not supported")
    devices = {parameter.device for parameter in model.parameters()}
    if devices != {device}:
        names = sorted(map(str, devices))
        _fail(f"the model and `input_ids` must be on one device, got {', '.join(names)} and {device}")
    text = model.config.get_text_config()
    implementation = text._attn_implementation
    if implementation not in ("sdpa", "eager"):
        _fail(f"the attention implementation {implementation!r} is not supported")
    for kind in _rope_types(getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)):
        if kind in _ROPES:
            _fail(f"`rope_type` {kind!r} is not supported")
    if device.type == "cuda":
        _check_hooks(model)


def _check_hooks(model: nn.Module) -> None:
    """Raise if a module has a hook, which replays would not call."""
    hooked = [name or "the model" for name, m in model.named_modules() if m._forward_hooks or m._forward_pre_hooks]
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        hooked.append("all modules")
    if hooked:
        _fail(f"a forward hook is not supported, got one on {hooked[0]}: replays would not call it")


def _rope_types(parameters: object) -> Iterator[object]:
    """The rope types in a configuration, which has one for all layers or one per kind of layer."""
    if isinstance(parameters, dict):
        yield parameters.get("rope_type")
        for value in parameters.values():
            yield from _rope_types(value)


def _check_config(config: GenerationConfig) -> None:
    for name in _FLAGS:
        refuse(name, getattr(config, name, None))
    if (getattr(config, "num_beams", None) or 1) > 1:
        refuse("num_beams", config.num_beams)
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        _fail(f"{mode.name.lower().replace('_', ' ')} is not supported")
    if config.use_cache is False:
        _fail("`use_cache=False` is not supported")


def _ends(criteria: Sequence[object]) -> tuple[int | None, tuple[int, ...]]:
    """The length at which sequences end, and the ids that end them."""
    lengths, eos = [], []
    for criterion in criteria:
        if type(criterion) is MaxLengthCriteria:
            lengths.append(int(criterion.max_length))
        elif type(criterion) is EosTokenCriteria:
            eos += criterion.eos_token_id.tolist()
        else:
            _fail(f"the stopping criterion {type(criterion).__name__} is not supported")
    return min(lengths, default=None), tuple(eos)


def check_cache(cache: object) -> Cache:
    """The cache; raises unless a step can start from its entries."""
    if not isinstance(cache, DynamicCache | StaticCache) or type(cache) not in (DynamicCache, StaticCache):
        _fail(f"a cache of class {type(cache).__name__} is not supported")
    if getattr(cache, "offloading", False):
        _fail(f"an offloaded {type(cache).__name__} is not supported")
    for layer in cache.layers:
        if type(layer) not in LAYERS:
            _fail(f"a cache layer of class {type(layer).__name__} is not supported")
    return cast(Cache, cache)


def _prompt(input_ids: Tensor, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The mask of the prompt, [batch, tokens], and the positions of its last tokens, [batch, 1]."""
    mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
    if mask is None:
        mask = torch.ones_like(input_ids)
    if positions is None or positions.dim() != 2:
        _fail("a model that does not take `position_ids` of shape [batch, tokens] is not supported")
    return mask, positions[:, -1:].expand(len(mask), 1)


def step_shape(model: Model, request: Request) -> Shape:
    """What the tensors of the step depend on, from the model's configuration."""
    check_cache(request.cache)
    text = model.config.get_text_config()
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        kinds = [FULL if window is None else SLIDING]
    for kind in kinds:
        if kind not in PATTERNS:
            _fail(f"a layer of type {kind!r} is not supported")
    eager = text._attn_implementation == "eager"
    dtype = model.dtype if eager else request.cache.layers[0].keys.dtype
    return Shape(
        batch=len(request.mask),
        length=request.length,
        eos=len(request.eos),
        patterns=tuple(sorted(set(kinds))),
        by_pattern=getattr(text, "layer_types", None) is not None,
        window=window or 0,
        mask_dtype=dtype,
        blocked=torch.finfo(dtype).min if eager else -torch.inf,
    )


def check_inputs(model: Model, request: Request, state: State) -> None:
    """Compare the inputs of a new step with those that transformers prepares for it; raise if they differ."""
    mask = torch.cat([request.mask, request.mask.new_ones(len(request.mask), 1)], dim=1)
    ours = state.inputs()
    theirs = model.prepare_inputs_for_generation(
        state.tokens,
        next_sequence_length=1,
        attention_mask=mask,
        position_ids=state.positions,
        past_key_values=state.cache,
        use_cache=True,
    )
    theirs.pop("logits_to_keep", None)  # there is one token
    for name, value in theirs.items():
        if value is not None and not _same(ours.get(name), value):
            _fail(f"{type(model).__name__} prepares `{name}` in a way that is not supported")


def _same(ours: object, theirs: object) -> bool:
    if isinstance(theirs, dict):
        return isinstance(ours, dict) and all(_same(ours.get(name), value) for name, value in theirs.items())
    if isinstance(theirs, Tensor):
        if theirs.dtype is torch.bool and isinstance(ours, Tensor):  # as torch's attention reads it
            theirs = torch.zeros_like(theirs, dtype=ours.dtype).masked_fill_(~theirs, -torch.inf)
        return isinstance(ours, Tensor) and ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    return bool(ours is theirs)
