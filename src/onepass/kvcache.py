"""One layer's paged cache of MLA entries: its layout, bookkeeping for a decode loop, and reading entries back.

A *slot* identifies an entry by one number, as `PagedKVCache` defines it. A negative slot means no entry.

The columns of an entry have one dtype ("plain"), or they are packed into 656 bytes ("fp8_ds_mla", what vLLM and FlashMLA
store for DeepSeek-V3.2)::

    512 float8_e4m3fn codes of the latent | 4 float32 scales, one per 128 codes | 64 bfloat16 columns of k
"""

from __future__ import annotations

from functools import partial
from typing import Final, Literal, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from .core.contract import describe, short
from .errors import ContractError
from .formats import FLOATS, FP8_FORMATS

CACHE_DTYPES: Final = (*FP8_FORMATS, *FLOATS)
INDEX_DTYPES: Final = (torch.uint32, torch.int32, torch.int64)

EntryFormat = Literal["plain", "fp8_ds_mla"]
ENTRY_FORMATS: Final[tuple[EntryFormat, ...]] = ("plain", "fp8_ds_mla")
DS_MLA: Final[EntryFormat] = "fp8_ds_mla"
DS_MLA_COLUMNS: Final = (512, 64)
"""Columns of the latent, and columns after it."""
DS_MLA_TILE: Final = 128
"""Columns of the latent that share a scale."""
DS_MLA_BYTES: Final = 656


class PagedKVCache:
    """A paged cache: ``blocks`` [pages, page_size, columns], and each request's length and pages.

    Token p of request b has the entry::

        page  = lookup_table[b, p // page_size]
        entry = p % page_size
        slot  = page * page_size + entry

    Tensors are not copied: update them in place, even between replays of a captured CUDA graph. Creating a cache reads both
    tables on the host to validate them (not while compiling or capturing), which waits for the device, so create it once,
    outside the decode loop. Kernels never write outside the blocks, whatever the tables contain later.

    Args:
        blocks: fp8, bfloat16, float16 or float32 with contiguous columns. Pages and entries may have any stride, so it can be
            one layer's view of a larger cache. uint8 with ``blocks_dtype`` or ``entry_format="fp8_ds_mla"``.
        cache_lengths: [requests], each request's number of tokens: uint32, int32 or int64. Without this and the table, every
            call needs ``slot_mapping``.
        lookup_table: [requests, max pages], each request's pages in order: uint32, int32 or int64. Entries that no token
            needs yet may have any value.
        page_size: Must be that of blocks, if passed.
        blocks_dtype: Dtype of the columns of uint8 blocks, for engines that allocate bytes. The cache has a view of that
            dtype.
        entry_format: "plain", or "fp8_ds_mla" for uint8 blocks with 656 bytes per entry, as vLLM and FlashMLA store
            DeepSeek-V3.2's: 512 float8_e4m3fn codes of the latent, 4 float32 scales, 64 bfloat16 columns of k.

    >>> import torch, onepass
    >>> table = torch.tensor([[2, 0], [1, 3]])
    >>> cache = onepass.PagedKVCache(torch.zeros(4, 2, 576), torch.tensor([3, 0]), table, page_size=2)
    >>> offsets = torch.tensor([0, 1, 3])  # a token for the first request, two for the second
    >>> cache.slot_mapping(offsets)
    tensor([1, 2, 3])
    >>> cache.append(input_row_offsets=offsets)
    >>> cache.cache_lengths
    tensor([4, 2])
    >>> cache.check(new_tokens=1)
    Traceback (most recent call last):
    onepass.errors.ContractError: PagedKVCache: `lookup_table` must have pages for every token, got 2 pages of 2 for request 0's 5 tokens
    """

    def __init__(
        self,
        blocks: Tensor,
        cache_lengths: Tensor | None = None,
        lookup_table: Tensor | None = None,
        *,
        page_size: int | None = None,
        blocks_dtype: torch.dtype | None = None,
        entry_format: EntryFormat = "plain",
    ) -> None:
        blocks = _entries(blocks, blocks_dtype, entry_format)
        if blocks.shape[1] < 1:
            _fail("blocks", "have at least one entry per page", str(list(blocks.shape)))
        if page_size is not None and (not isinstance(page_size, int) or page_size != blocks.shape[1]):
            _fail("page_size", f"be the page size of blocks, {blocks.shape[1]}", describe(page_size))
        self.blocks = blocks
        self.entry_format = entry_format
        self.cache_lengths = cache_lengths
        self.lookup_table = lookup_table
        self.page_size: int = blocks.shape[1]
        if cache_lengths is None or lookup_table is None:
            if cache_lengths is not None or lookup_table is not None:
                name = "lookup_table" if lookup_table is None else "cache_lengths"
                _fail(name, "be given with the other table", "None")
            return
        _check_tensor("cache_lengths", cache_lengths, "[requests]", 1, INDEX_DTYPES)
        _check_tensor("lookup_table", lookup_table, "[requests, pages]", 2, INDEX_DTYPES)
        if cache_lengths.shape[0] != lookup_table.shape[0]:
            requests = cache_lengths.shape[0]
            _fail("lookup_table", f"have a row for each of {requests} requests", str(lookup_table.shape[0]))
        for name, tensor in (("cache_lengths", cache_lengths), ("lookup_table", lookup_table)):
            if tensor.device != blocks.device:
                _fail(name, f"be on {blocks.device}", str(tensor.device))
        if _readable(blocks, cache_lengths, lookup_table):
            self.check()

    @classmethod
    def from_slots(
        cls,
        blocks: Tensor,
        slots: Tensor,
        input_row_offsets: Tensor,
        *,
        table_width: int | None = None,
        dtype: torch.dtype = torch.int32,
        blocks_dtype: torch.dtype | None = None,
        entry_format: EntryFormat = "plain",
    ) -> PagedKVCache:
        """Create a cache from the slots of all its tokens, one request after another: the inverse of `slot_mapping`.

        It reads on the host.

        Args:
            blocks: As in `PagedKVCache`.
            slots: [tokens], int32 or int64.
            input_row_offsets: [requests + 1]. Tokens ``input_row_offsets[b]`` up to ``input_row_offsets[b + 1]`` are those of
                request b, in order.
            table_width: Columns of the table, which has -1 where a request has no page. None: what the longest request needs.
            dtype: Dtype of the tables.
            blocks_dtype: As in `PagedKVCache`.
            entry_format: As in `PagedKVCache`.

        Returns:
            The cache.

        >>> import torch, onepass
        >>> slots, offsets = torch.tensor([4, 5, 0, 2, 3]), torch.tensor([0, 3, 5])
        >>> cache = onepass.PagedKVCache.from_slots(torch.zeros(4, 2, 576), slots, offsets)
        >>> cache.lookup_table, cache.cache_lengths
        (tensor([[ 2,  0],
                 [ 1, -1]], dtype=torch.int32), tensor([3, 2], dtype=torch.int32))
        """
        blocks = _entries(blocks, blocks_dtype, entry_format)
        _check_tensor("slots", slots, "[tokens]", 1, (torch.int32, torch.int64))
        _check_tensor("input_row_offsets", input_row_offsets, "[requests + 1]", 1, INDEX_DTYPES)
        if not isinstance(dtype, torch.dtype) or dtype not in INDEX_DTYPES:
            _fail("dtype", "be uint32, int32 or int64", describe(dtype))
        size = blocks.shape[1]
        offsets, slot_of = input_row_offsets.long().cpu(), slots.long().cpu()
        counts = offsets.diff()
        if not offsets.numel() or offsets[0] != 0 or offsets[-1] != slot_of.shape[0] or (counts < 0).any():
            _fail("input_row_offsets", f"rise from 0 to the number of slots, {slot_of.shape[0]}", str(offsets.tolist()))
        request = torch.repeat_interleave(torch.arange(counts.shape[0]), counts)
        index = torch.arange(slot_of.shape[0]) - offsets[request]
        within = index % size
        first = slot_of[torch.arange(slot_of.shape[0]) - within]
        wrong = (first % size != 0) | (slot_of != first + within) | (slot_of < 0) | (slot_of >= blocks.shape[0] * size)
        if wrong.any():
            at = int(wrong.nonzero()[0])
            got = f"{int(slot_of[at])} for token {int(index[at])} of request {int(request[at])}"
            _fail("slots", f"lie in the blocks and be consecutive within pages of {size}", got)
        needed = -(-int(counts.max()) // size) if counts.numel() else 0
        width = max(needed, 1) if table_width is None else table_width
        if not _counts_something(width) or width < needed:
            _fail("table_width", f"be an int of at least {needed}", describe(width))
        table = torch.full((counts.shape[0], width), -1)
        begins = within == 0
        table[request[begins], index[begins] // size] = slot_of[begins] // size
        tables = (t.to(dtype).to(blocks.device) for t in (counts, table))
        return cls(blocks, *tables, entry_format=entry_format)

    def slot_mapping(self, input_row_offsets: Tensor, tokens: int | None = None) -> Tensor:
        """The slots of the tokens that follow those in the cache.

        Args:
            input_row_offsets: [requests + 1]. Tokens ``input_row_offsets[b]`` up to ``input_row_offsets[b + 1]`` belong to
                request b.
            tokens: Their number. None reads it from the last offset, on the host.

        Returns:
            [tokens] int64, -1 for a token without a slot.
        """
        lengths, table = self._tables("slot_mapping")
        _check_tensor("input_row_offsets", input_row_offsets, "[requests + 1]", 1, INDEX_DTYPES)
        requests, width = table.shape
        if input_row_offsets.shape[0] != requests + 1:
            _fail("input_row_offsets", f"have {requests + 1} elements", str(input_row_offsets.shape[0]))
        if tokens is not None and not _counts_something(tokens):
            _fail("tokens", "be an int of at least 0", describe(tokens))
        offsets = input_row_offsets.long()
        count = int(offsets[-1]) if tokens is None else tokens
        token = torch.arange(count, device=offsets.device)
        if not requests or not width:
            return torch.full_like(token, -1)
        request = torch.searchsorted(offsets[1:].contiguous(), token, right=True)
        owned = (request < requests) & (token >= offsets[0])
        request = request.clamp(max=requests - 1)
        place = lengths.long()[request] + (token - offsets[request])
        column = place.div(self.page_size, rounding_mode="floor")
        page = table.long()[request, column.clamp(0, width - 1)]
        inside = owned & (column >= 0) & (column < width) & (page >= 0) & (page < self.blocks.shape[0])
        return torch.where(inside, page * self.page_size + place % self.page_size, -1)

    def append(self, new_tokens: int | Tensor = 1, *, input_row_offsets: Tensor | None = None) -> None:
        """Count the tokens of a written step: ``cache_lengths += new_tokens``, in place.

        It reads nothing on the host, so a CUDA graph can capture it.

        Args:
            new_tokens: One number for all requests, or [requests].
            input_row_offsets: [requests + 1], in place of ``new_tokens``.
        """
        lengths, table = self._tables("append")
        if input_row_offsets is not None:
            _check_tensor("input_row_offsets", input_row_offsets, "[requests + 1]", 1, INDEX_DTYPES)
            offsets = input_row_offsets.long()
            new_tokens = offsets[1:] - offsets[:-1]
        new_tokens = _counts(new_tokens, table.shape[0])
        # torch cannot add uint32, but the bits of the sum are those of int32's
        (lengths.view(torch.int32) if lengths.dtype == torch.uint32 else lengths).add_(new_tokens)

    def check(self, new_tokens: int | Tensor = 0) -> None:
        """Check that every request's pages exist and have room. Reads the tables on the host, which waits for the device.

        Args:
            new_tokens: Further tokens: one number for all requests, or [requests].

        Raises:
            ContractError: If a token has no page.
        """
        lengths, table = self._tables("check")
        fault = table_fault(self.blocks, lengths, table, _counts(new_tokens, table.shape[0]))
        if fault is not None:
            _fail(*fault)

    def _tables(self, what: str) -> tuple[Tensor, Tensor]:
        if self.cache_lengths is None or self.lookup_table is None:
            _fail("cache_lengths", f"be given for {what}", "None")
        return self.cache_lengths, self.lookup_table

    def __repr__(self) -> str:
        requests = "no table" if self.cache_lengths is None else f"{self.cache_lengths.shape[0]} requests"
        return f"PagedKVCache({list(self.blocks.shape)} {short(self.blocks.dtype)} on {self.blocks.device}, {requests})"


def _entries(blocks: Tensor, dtype: torch.dtype | None, entry_format: EntryFormat) -> Tensor:
    """The blocks in the dtype of their columns; packed entries stay bytes."""
    if entry_format not in ENTRY_FORMATS:
        _fail("entry_format", f"be {' or '.join(map(repr, ENTRY_FORMATS))}", describe(entry_format))
    packed = entry_format == DS_MLA
    if dtype is not None and (packed or dtype not in CACHE_DTYPES):
        allowed = "None with fp8_ds_mla" if packed else " or ".join(short(d) for d in CACHE_DTYPES)
        _fail("blocks_dtype", f"be {allowed}", describe(dtype))
    allowed_dtypes = (torch.uint8,) if packed else CACHE_DTYPES if dtype is None else (torch.uint8, dtype)
    _check_tensor("blocks", blocks, "[pages, page_size, columns]", 3, allowed_dtypes)
    if blocks.stride(2) != 1 and blocks.shape[2] != 1:
        _fail("blocks", "have a contiguous last dimension", f"strides {blocks.stride()}")
    if packed and blocks.shape[2] != DS_MLA_BYTES:
        _fail("blocks", f"have {DS_MLA_BYTES} bytes per entry", str(blocks.shape[2]))
    if dtype is None or blocks.dtype == dtype:
        return blocks
    bytes_of = (blocks.shape[2], blocks.storage_offset(), *blocks.stride()[:2])
    if any(number % dtype.itemsize for number in bytes_of):
        _fail("blocks", f"have entries of whole, aligned columns of {dtype.itemsize} bytes", describe(blocks))
    return blocks.view(dtype)


def gather_mla(
    cache: PagedKVCache,
    request: int,
    dtype: torch.dtype,
    *,
    kv_scale: Tensor | None = None,
    per_token_scale: Tensor | None = None,
) -> Tensor:
    """A request's entries in order, as `fused_rope_rmsnorm_quantization` wrote them: ``round(entry * scale)``.

    Args:
        cache: The cache.
        request: Number of the request. Its length is read on the host.
        dtype: Dtype of the result.
        kv_scale: That of the write. Entries of the format "fp8_ds_mla" contain their scales.
        per_token_scale: That of the write.

    Returns:
        [length, columns], on the cache's device.

    Rounding:
        The product is computed in float32 and rounded once.

    >>> import torch, onepass
    >>> blocks = torch.arange(8.0).view(4, 2, 1)
    >>> cache = onepass.PagedKVCache(blocks, torch.tensor([3]), torch.tensor([[3, 1]]))
    >>> onepass.gather_mla(cache, 0, torch.float32).flatten()
    tensor([6., 7., 2.])
    """
    fail = partial(_fail, of="gather_mla")
    if not isinstance(cache, PagedKVCache):
        fail("cache", "be a PagedKVCache", describe(cache))
    lengths, table = cache._tables("gather_mla")
    if not _counts_something(request) or request >= lengths.shape[0]:
        fail("request", f"be an int from 0 to {lengths.shape[0] - 1}", describe(request))
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        fail("dtype", "be a floating dtype", describe(dtype))
    for name, scale in (("kv_scale", kv_scale), ("per_token_scale", per_token_scale)):
        plain = isinstance(scale, Tensor) and scale.layout is torch.strided and scale.dtype is torch.float32
        if scale is not None and not plain:
            fail(name, "be a strided float32 tensor", describe(scale))
    if kv_scale is not None and per_token_scale is not None:
        fail("kv_scale", "be None with per_token_scale", describe(kv_scale))
    if kv_scale is not None and kv_scale.numel() != 1:
        fail("kv_scale", "have one element", describe(kv_scale))
    if per_token_scale is not None and per_token_scale.shape != cache.blocks.shape[:2]:
        fail("per_token_scale", "have shape [pages, page_size]", describe(per_token_scale))
    fault = table_fault(cache.blocks, lengths[request : request + 1], table[request : request + 1], 0)
    if fault is not None:
        fail(*fault)
    length = int(lengths[request])
    pages = table[request].long()[: -(-length // cache.page_size)]
    dtype_of_blocks = cache.blocks.dtype
    if cache.entry_format == DS_MLA:
        if kv_scale is not None or per_token_scale is not None:
            fail("kv_scale" if per_token_scale is None else "per_token_scale", "be None with fp8_ds_mla", "a tensor")
        return _unpacked(cache.blocks[pages].flatten(0, 1)[:length]).to(dtype)
    indexable = cache.blocks.view(torch.uint8) if dtype_of_blocks in FP8_FORMATS else cache.blocks
    entries = indexable[pages].flatten(0, 1)[:length].view(dtype_of_blocks).float()
    if per_token_scale is not None:
        entries = entries * per_token_scale[pages].flatten()[:length, None]
    elif kv_scale is not None:
        entries = entries * kv_scale.reshape(())
    return entries.to(dtype)


def _unpacked(entries: Tensor) -> Tensor:
    """The columns of packed entries [tokens, 656], in float32."""
    latent, rope = DS_MLA_COLUMNS
    codes, scales, rest = entries.split((latent, latent // DS_MLA_TILE * 4, 2 * rope), -1)
    tiles = codes.contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (-1, DS_MLA_TILE))
    values = tiles * scales.contiguous().view(torch.float32).unsqueeze(-1)
    return torch.cat((values.flatten(-2), rest.contiguous().view(torch.bfloat16).float()), -1)


def table_fault(
    blocks: Tensor, lengths: Tensor, table: Tensor, new_tokens: int | Tensor
) -> tuple[str, str, str] | None:
    """The wrong argument, its requirement and its value; None if every token has a page. Reads on the host."""
    pages, size, _ = blocks.shape
    begin = lengths.long().cpu()
    end = begin + (new_tokens.long().cpu() if isinstance(new_tokens, Tensor) else new_tokens)
    if (begin < 0).any():
        request = int((begin < 0).nonzero()[0])
        return "cache_lengths", "be at least 0", f"{int(begin[request])} for request {request}"
    width = table.shape[1]
    short_of = end > width * size
    if short_of.any():
        request = int(short_of.nonzero()[0])
        got = f"{width} pages of {size} for request {request}'s {int(end[request])} tokens"
        return "lookup_table", "have pages for every token", got
    numbers = table.long().cpu()
    needed = torch.arange(width) < (end.div(size, rounding_mode="floor") + (end % size != 0)).unsqueeze(1)
    outside = needed & ((numbers < 0) | (numbers >= pages))
    if outside.any():
        request, column = outside.nonzero()[0].tolist()
        got = f"{int(numbers[request, column])} for page {column} of request {request}"
        return "lookup_table", f"hold pages from 0 to {pages - 1}", got
    return None


def _counts(new_tokens: int | Tensor, requests: int) -> int | Tensor:
    if isinstance(new_tokens, Tensor):
        if new_tokens.shape != (requests,) or new_tokens.dtype not in INDEX_DTYPES:
            _fail("new_tokens", f"be an int or {requests} integers", describe(new_tokens))
        return new_tokens.view(torch.int32) if new_tokens.dtype == torch.uint32 else new_tokens
    if not isinstance(new_tokens, int) or isinstance(new_tokens, bool):
        _fail("new_tokens", f"be an int or {requests} integers", describe(new_tokens))
    return new_tokens


def _counts_something(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _check_tensor(name: str, value: object, shape: str, dims: int, dtypes: tuple[torch.dtype, ...]) -> None:
    if not isinstance(value, Tensor):
        _fail(name, "be a tensor", describe(value))
    if value.layout is not torch.strided:
        _fail(name, "be strided", str(value.layout))
    if value.dim() != dims:
        _fail(name, f"have shape {shape}", str(list(value.shape)))
    if value.dtype not in dtypes:
        _fail(name, f"have dtype {' or '.join(short(d) for d in dtypes)}", short(value.dtype))


def _readable(*tensors: Tensor) -> bool:
    """Whether values can be read: not while compiling, for fake tensors, or while a CUDA graph is captured."""
    if torch.compiler.is_compiling() or any(type(t) not in (Tensor, Parameter) or t.is_meta for t in tensors):
        return False
    return not tensors[0].is_cuda or not torch.cuda.is_current_stream_capturing()


def _fail(argument: str, expects: str, got: str, of: str = "PagedKVCache") -> NoReturn:
    raise ContractError(f"{of}: `{argument}` must {expects}, got {got}")
