"""MLA's cache write in one launch: rotate q, norm and rotate kv, find each token's entry in the
cache and write it there.

The first programs process rows of kv, which have the longest chain of loads: offsets, then a page
of the table, then the entry. The others process tiles of q, some heads of one token or all heads of
several. A token's request is found by comparing it with a whole block of offsets at once, loaded
together with the lengths, so that its position is one load away. Per-token values are scalars, and
a program's tokens are unrolled: first every load, then the arithmetic.

A program with fewer tokens left repeats the last one: the same threads read the same elements
before any of them is written, and write the same bytes. So q may be rotated in place. The order of
the sum is that of `gpu.lib.reduce`. Tensors, rows, numbers and constants are the named tuples of
`mla_cache`.
"""

import triton
import triton.language as tl

from ...gpu.lib.numbers import make_scale, quotient
from ...gpu.lib.pdl import launch_dependents, wait
from ...gpu.lib.reduce import sum_columns
from ...gpu.lib.rope import angles, encode, read_rope, turn, write_rope
from ...gpu.lib.row import magnitude, normalize, reciprocal_root


@triton.jit
def _nothing():
    """An empty tuple of loads."""
    return ()


# --- which request a token belongs to, and its entry in the cache -------------------------------


@triton.jit
def _find(tensors, token, requests, WIDTH: tl.constexpr, LEVELS: tl.constexpr):
    """Load WIDTH requests, including the token's: their numbers, starts, ends and lengths.

    Of more than WIDTH requests, every ``WIDTH**level``-th is examined first.
    """
    offsets, lengths = tensors.offsets, tensors.lengths
    if WIDTH == 1:
        return 0, tl.load(offsets), tl.load(offsets + 1), tl.load(lengths)
    else:
        lane = tl.arange(0, WIDTH)
        first = requests * 0
        for level in tl.static_range(LEVELS - 1, 0, -1):
            sample = first + lane * WIDTH**level
            begin = tl.load(offsets + sample, mask=sample < requests, other=0).to(tl.int64)
            before = tl.sum(((sample < requests) & (begin <= token)).to(tl.int32), axis=0)
            first += tl.maximum(before - 1, 0) * WIDTH**level
        request = first + lane
        inside = request < requests
        begin = tl.load(offsets + request, mask=inside, other=0)
        end = tl.load(offsets + 1 + request, mask=inside, other=0)
        return request, begin, end, tl.load(lengths + request, mask=inside, other=0)


@triton.jit
def _add_both(a, b, c, d):
    return a + c, b + d


@triton.jit
def _position(found, token, WIDTH: tl.constexpr, HW_ROUNDING: tl.constexpr):
    """The token's request, or -1, and its position in that request's sequence, or 0."""
    request, begin, end, length = found
    begin = begin.to(tl.int64)
    owns = (begin <= token) & (token < end.to(tl.int64))
    number = tl.where(owns, request + 1, 0)
    shift = tl.where(owns, length.to(tl.int64) - begin, 0)
    if WIDTH > 1:
        if HW_ROUNDING:
            number, shift = tl.reduce((number, shift), 0, _add_both)
        else:  # the interpreter walks a joint reduction element by element
            number = tl.sum(number, axis=0)
            shift = tl.sum(shift, axis=0)
    return number - 1, tl.where(number > 0, token + shift, 0)


@triton.jit
def _split(position, page_size, page_shift, PAGE_POWER: tl.constexpr):
    """Page and entry of a position, which is not negative (or not used)."""
    if PAGE_POWER:
        page = position >> page_shift
        return page, position - (page << page_shift)
    else:
        page = tl.maximum(position, 0) // page_size
        return page, position - page * page_size


# --- the two kinds of program -------------------------------------------------------------------


@triton.jit
def _q_tile(tile, tensors, rows, TILE: tl.constexpr, MATH: tl.constexpr, Q_OUT: tl.constexpr):
    """``heads`` heads of ``q_tokens`` tokens."""
    q, positions = tensors.q, tensors.positions
    N: tl.constexpr = TILE.q_tokens
    head = (tile % TILE.pieces) * TILE.heads + tl.arange(0, TILE.heads)
    present = head < rows.heads
    head = head.to(tl.int64)
    known = _nothing()
    parts = _nothing()
    for i in tl.static_range(N):
        token = tl.minimum((tile // TILE.pieces) * N + i, rows.tokens - 1).to(tl.int64)
        if MATH.turned == 0:
            known = known + (0,)
        elif positions is not None:
            known = known + (tl.load(positions + token),)
        elif i == 0 or TILE.levels > 1:
            known = known + (_find(tensors, token, rows.requests, TILE.width, TILE.levels),)
        else:
            known = known + (known[0],)
        parts = parts + (read_rope(q, token * rows.q_token + head * rows.q_head, present, 0, TILE.guard, MATH),)
    launch_dependents(MATH.pdl)
    for i in tl.static_range(N):
        token = tl.minimum((tile // TILE.pieces) * N + i, rows.tokens - 1).to(tl.int64)
        a, b, rest = parts[i]
        cosine = 0.0
        sine = 0.0
        if MATH.turned > 0:
            if positions is None:
                _, position = _position(known[i], token, TILE.width, MATH.hw_rounding)
            else:
                position = known[i].to(tl.int64)
            cosine, sine = angles(tensors.freqs, rows.freqs_row, position, rows.limit, MATH.split, MATH)
        a, b, rest = turn(a, b, rest, cosine, sine, q.dtype.element_ty, TILE.heads, MATH)
        at = token * rows.out_token + head * rows.out_head
        write_rope(tensors.q_out, at, present, 0, a, b, rest, TILE.guard, Q_OUT, MATH)


@triton.jit
def _scale_of(y, a, b, rest, MATH: tl.constexpr, CACHE: tl.constexpr):
    """The scale [1] of an entry: its largest magnitude becomes the largest code."""
    peak = tl.max(magnitude(y), axis=1)
    if MATH.rope > 0:
        peak = tl.maximum(peak, tl.max(magnitude(a), axis=1))
        if MATH.half:
            peak = tl.maximum(peak, tl.max(magnitude(b), axis=1))
            peak = tl.maximum(peak, tl.max(magnitude(rest), axis=1))
    amax = peak.to(tl.float32, bitcast=True)
    return make_scale(amax, float("inf"), None, CACHE, tl.float32, MATH.hw_rounding)


@triton.jit
def _tile_scales(y, GROUP: tl.constexpr, BLOCK: tl.constexpr, CACHE: tl.constexpr, HW_ROUNDING: tl.constexpr):
    """The scale of each GROUP columns of a latent, and the latent divided by them. Scales are at
    least 2**-126.
    """
    tiles = tl.reshape(y, (BLOCK // GROUP, GROUP))
    amax = tl.max(magnitude(tiles), axis=1).to(tl.float32, bitcast=True)
    scale = make_scale(amax, float("inf"), 1.1754943508222875e-38, CACHE, tl.float32, HW_ROUNDING)
    return scale, tl.reshape(quotient(tiles, scale[:, None]), (1, BLOCK))


@triton.jit
def _kv_tile(
    tile, tensors, rows, numbers,
    TILE: tl.constexpr, MATH: tl.constexpr, CACHE: tl.constexpr, K_OUT: tl.constexpr,
):  # fmt: skip
    """The entries of ``kv_tokens`` tokens. ``part``: the first ``normed`` columns are normed, the
    others stored unchanged. Scale "tile": an entry is codes, scales, and columns encoded as K_OUT.
    """
    kv, gamma, slots, positions = tensors.kv, tensors.gamma, tensors.slots, tensors.positions
    latent, normed, eps = rows.latent, rows.normed, numbers.eps
    N: tl.constexpr = TILE.kv_tokens
    BLOCK: tl.constexpr = TILE.block
    ROPE: tl.constexpr = MATH.rope
    TURNED: tl.constexpr = MATH.turned
    DTYPE: tl.constexpr = kv.dtype.element_ty
    HW: tl.constexpr = MATH.hw_rounding
    SEARCHES: tl.constexpr = slots is None or (TURNED > 0 and positions is None)
    columns = tl.arange(0, BLOCK)[None, :]
    only = tl.zeros((1,), tl.int64)
    there = only == 0
    known = _nothing()
    slot = _nothing()
    angle = _nothing()
    latents = _nothing()
    parts = _nothing()
    for i in tl.static_range(N):
        token = tl.minimum(tile * N + i, rows.tokens - 1).to(tl.int64)
        if not SEARCHES:
            known = known + (0,)
        elif i == 0 or TILE.levels > 1:
            known = known + (_find(tensors, token, rows.requests, TILE.width, TILE.levels),)
        else:
            known = known + (known[0],)
        slot = slot + ((0 if slots is None else tl.load(slots + token)),)
        angle = angle + ((tl.load(positions + token) if TURNED > 0 and positions is not None else 0),)
        row = kv + token * rows.kv_token
        if MATH.full:
            latents = latents + (tl.load(row + columns),)
            n = BLOCK
        else:
            latents = latents + (tl.load(row + columns, mask=columns < latent, other=0.0),)
            n = latent
        if ROPE > 0:
            parts = parts + (read_rope(row, only, there, n, False, MATH),)
    if MATH.part:
        weight = tl.load(gamma + columns, mask=columns < normed, other=0.0)
    elif MATH.full:
        weight = tl.load(gamma + columns)
    else:
        weight = tl.load(gamma + columns, mask=columns < latent, other=0.0)
    if MATH.scale == "tensor":
        given = tl.load(tensors.kv_scale + tl.arange(0, 1))
    launch_dependents(MATH.pdl)
    for i in tl.static_range(N):
        token = tl.minimum(tile * N + i, rows.tokens - 1).to(tl.int64)
        if SEARCHES:
            request, position = _position(known[i], token, TILE.width, HW)
        if slots is None:
            page, entry = _split(position, rows.page_size, numbers.page_shift, MATH.paged)
            valid = (request >= 0) & (position >= 0) & (page < rows.table_width)
            if TILE.width > 1:
                row = tl.minimum(tl.maximum(request, 0), rows.requests - 1).to(tl.int64) * rows.table_row
            else:
                row = 0
            page = tl.load(tensors.table + row + page, mask=valid, other=0).to(tl.int64)
        else:
            page, entry = _split(slot[i].to(tl.int64), rows.page_size, numbers.page_shift, MATH.paged)
            valid = slot[i] >= 0
        valid = valid & (page >= 0) & (page < rows.pages)
        if ROPE > 0:
            a, b, rest = parts[i]
            cosine = 0.0
            sine = 0.0
            if TURNED > 0:
                if positions is not None:
                    position = angle[i].to(tl.int64)
                cosine, sine = angles(tensors.freqs, rows.freqs_row, position, rows.limit, False, MATH)
            a, b, rest = turn(a, b, rest, cosine, sine, DTYPE, 1, MATH)
        h = latents[i].to(tl.float32)
        if MATH.part:
            total = sum_columns(tl.where(columns < normed, h * h, 0.0), 1, BLOCK)
            rs = reciprocal_root(tl.div_rn(total, tl.full(total.shape, normed, tl.float32)) + eps)
        elif MATH.full:
            total = sum_columns(h * h, 1, BLOCK)
            rs = reciprocal_root(total * (1.0 / BLOCK) + eps)
        else:
            total = sum_columns(h * h, 1, BLOCK)
            rs = reciprocal_root(tl.div_rn(total, tl.full(total.shape, latent, tl.float32)) + eps)
        g = weight.to(tl.float32) + numbers.weight_offset
        y = normalize(h, rs, g, DTYPE, MATH.reference, HW)
        if MATH.part:
            y = tl.where(columns < normed, y, h)
        if MATH.scale == "token":
            if ROPE > 0:
                given = _scale_of(y, a, b, rest, MATH, CACHE)
            else:
                given = _scale_of(y, y, y, y, MATH, CACHE)
            at = tensors.token_scale + page * rows.scale_page + entry * rows.scale_entry
            tl.store(at + tl.arange(0, 1), given, mask=valid)
        if MATH.scale == "tile":
            given, y = _tile_scales(y, MATH.group, BLOCK, CACHE, HW)
        elif MATH.scale != "none":
            y = quotient(y, given[:, None])
            if ROPE > 0:
                a = quotient(a, given[:, None])
                b = quotient(b, given[:, None])
                rest = quotient(rest, given[:, None])
        out = tensors.blocks + page * rows.block_page + entry * rows.block_entry
        if MATH.full:
            mask = valid & (columns >= 0)
        else:
            mask = valid & (columns < latent)
        tl.store(out + columns, encode(y, tensors.blocks, CACHE, HW), mask=mask)
        if MATH.scale == "tile":
            COUNT: tl.constexpr = BLOCK // MATH.group
            scales = (out + BLOCK).to(tl.pointer_type(tl.float32))
            tl.store(scales + tl.arange(0, COUNT), given, mask=valid & (tl.arange(0, COUNT) >= 0))
            after = (out + BLOCK + 4 * COUNT).to(tl.pointer_type(tl.bfloat16))
            write_rope(after, only, there & valid, 0, a, b, rest, True, K_OUT, MATH)
        elif ROPE > 0:
            write_rope(out, only, there & valid, n, a, b, rest, True, CACHE, MATH)


@triton.jit
def _mla_rope_norm_kernel(
    tensors, rows, numbers,
    TILE: tl.constexpr, MATH: tl.constexpr, CACHE: tl.constexpr, K_OUT: tl.constexpr, Q_OUT: tl.constexpr,
):  # fmt: skip
    """The first ``kv_programs`` programs write entries, the others rotate q. With up to ``early``
    programs the next kernel may start at once.
    """
    if tl.num_programs(0) <= numbers.early:
        launch_dependents(MATH.pdl)
    wait(MATH.pdl)
    program = tl.program_id(0)
    if program < numbers.kv_programs:
        _kv_tile(program, tensors, rows, numbers, TILE, MATH, CACHE, K_OUT)
    elif MATH.rope > 0:
        _q_tile(program - numbers.kv_programs, tensors, rows, TILE, MATH, Q_OUT)
