"""MLA's cache write in one launch: rotate q, norm and rotate kv, find each token's place in the cache and write it there.

The first programs take rows of kv, which have the longest way to go: offsets, then a page of the table, then the entry. The
others take tiles of q, some heads of one token or all heads of several. A token's request is found by comparing it with
a whole block of offsets at once, loaded together with the lengths, so that its position is one load away. Whatever
belongs to one token is a scalar, and a program's tokens are unrolled: first every load, then the arithmetic.

A program that has fewer tokens left does the last one again: the same threads read the same elements before any of them is
written, and write the same bytes. So q may be rotated in place. The order of the sum is that of `_tree`.
"""

import triton
import triton.language as tl

from ..formats import FLOAT32_MAX
from .device.mla_rope import FN_MAX, FNUZ_MAX, angles, encode, read_rope, turn, write_rope
from .device.numbers import make_scale, quotient
from .device.pdl import launch_dependents, wait
from .device.row import magnitude, normalize, reciprocal_root
from .device.tree import sum_columns

LARGEST = tl.constexpr(FLOAT32_MAX)


@triton.jit
def _nothing():
    """What a tuple of loads begins as."""
    return ()


# --- which request a token belongs to, and its place in the cache ----------------------------------------------------------


@triton.jit
def _ask(offsets, lengths, token, requests, WIDTH: tl.constexpr, LEVELS: tl.constexpr):
    """Load WIDTH requests, the token's among them: their numbers, where they begin and end, their lengths.

    Of more than WIDTH requests, every ``WIDTH**level``-th is looked at first.
    """
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
def _answer(asked, token, WIDTH: tl.constexpr, EXACT: tl.constexpr):
    """The token's request, or -1, and its place in that request's sequence, or 0."""
    request, begin, end, length = asked
    begin = begin.to(tl.int64)
    owns = (begin <= token) & (token < end.to(tl.int64))
    number = tl.where(owns, request + 1, 0)
    shift = tl.where(owns, length.to(tl.int64) - begin, 0)
    if WIDTH > 1:
        if EXACT:
            number, shift = tl.reduce((number, shift), 0, _add_both)
        else:  # the interpreter walks a joint reduction element by element
            number = tl.sum(number, axis=0)
            shift = tl.sum(shift, axis=0)
    return number - 1, tl.where(number > 0, token + shift, 0)


@triton.jit
def _split(place, page_size, page_shift, PAGE_POWER: tl.constexpr):
    """Page and entry of a place, which is not negative (or not used)."""
    if PAGE_POWER:
        page = place >> page_shift
        return page, place - (page << page_shift)
    else:
        page = tl.maximum(place, 0) // page_size
        return page, place - page * page_size


# --- the two kinds of program -------------------------------------------------------------------------------------------


@triton.jit
def _q_tile(
    tile, q, q_out, freqs, offsets, lengths, positions, tokens, heads, requests, limit,
    q_token, q_head, out_token, out_head, freqs_row,
    N: tl.constexpr, HEADS: tl.constexpr, PIECES: tl.constexpr, GUARD: tl.constexpr, WIDTH: tl.constexpr, LEVELS: tl.constexpr,
    ROPE: tl.constexpr, TURNED: tl.constexpr, HALF: tl.constexpr, REFERENCE: tl.constexpr, FP8: tl.constexpr,
    HARDWARE: tl.constexpr, EXACT: tl.constexpr, PACKED: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """HEADS heads of N tokens."""
    head = (tile % PIECES) * HEADS + tl.arange(0, HEADS)
    present = head < heads
    head = head.to(tl.int64)
    known = _nothing()
    rows = _nothing()
    for i in tl.static_range(N):
        token = tl.minimum((tile // PIECES) * N + i, tokens - 1).to(tl.int64)
        if TURNED == 0:
            known = known + (0,)
        elif positions is not None:
            known = known + (tl.load(positions + token),)
        elif i == 0 or LEVELS > 1:
            known = known + (_ask(offsets, lengths, token, requests, WIDTH, LEVELS),)
        else:
            known = known + (known[0],)
        rows = rows + (read_rope(q, token * q_token + head * q_head, present, 0, ROPE, TURNED, HALF, GUARD),)
    launch_dependents(PDL)
    for i in tl.static_range(N):
        token = tl.minimum((tile // PIECES) * N + i, tokens - 1).to(tl.int64)
        a, b, rest = rows[i]
        cosine = 0.0
        sine = 0.0
        if TURNED > 0:
            if positions is None:
                _, position = _answer(known[i], token, WIDTH, EXACT)
            else:
                position = known[i].to(tl.int64)
            cosine, sine = angles(freqs, freqs_row, position, limit, ROPE, TURNED, HALF, PACKED, SPLIT)
        a, b, rest = turn(
            a, b, rest, cosine, sine, q.dtype.element_ty, HEADS, ROPE, TURNED, HALF, REFERENCE, EXACT
        )  # fmt: skip
        at = token * out_token + head * out_head
        write_rope(q_out, at, present, 0, a, b, rest, ROPE, TURNED, HALF, GUARD, FP8, HARDWARE, EXACT)


@triton.jit
def _scale_of(y, a, b, rest, ROPE: tl.constexpr, HALF: tl.constexpr, FP8: tl.constexpr, EXACT: tl.constexpr):
    """The scale [1] of an entry: its largest magnitude becomes the largest code."""
    peak = tl.max(magnitude(y), axis=1)
    if ROPE > 0:
        peak = tl.maximum(peak, tl.max(magnitude(a), axis=1))
        if HALF:
            peak = tl.maximum(peak, tl.max(magnitude(b), axis=1))
            peak = tl.maximum(peak, tl.max(magnitude(rest), axis=1))
    MAX: tl.constexpr = FN_MAX if FP8 == "e4m3fn" else FNUZ_MAX
    amax = peak.to(tl.float32, bitcast=True)
    return make_scale(amax, float("inf"), MAX, tl.float32, LARGEST, False, EXACT)


@triton.jit
def _kv_tile(
    tile, kv, gamma, freqs, offsets, lengths, table, slots, positions, kv_scale, blocks, token_scale,
    tokens, latent, normed, requests, table_width, pages, page_size, page_shift, limit,
    kv_token, freqs_row, table_row, block_page, block_entry, scale_page, scale_entry, eps, weight_offset,
    N: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr, PART: tl.constexpr, WIDTH: tl.constexpr, LEVELS: tl.constexpr,
    PAGE_POWER: tl.constexpr, ROPE: tl.constexpr, TURNED: tl.constexpr, HALF: tl.constexpr, REFERENCE: tl.constexpr, SCALE: tl.constexpr,
    FP8: tl.constexpr, HARDWARE: tl.constexpr, EXACT: tl.constexpr, PACKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The entries of N tokens. PART: the norm is of the first ``normed`` columns; those behind them are stored as they are."""
    SEARCHES: tl.constexpr = slots is None or (TURNED > 0 and positions is None)
    columns = tl.arange(0, BLOCK)[None, :]
    only = tl.zeros((1,), tl.int64)
    there = only == 0
    known = _nothing()
    slot = _nothing()
    angle = _nothing()
    latents = _nothing()
    rows = _nothing()
    for i in tl.static_range(N):
        token = tl.minimum(tile * N + i, tokens - 1).to(tl.int64)
        if not SEARCHES:
            known = known + (0,)
        elif i == 0 or LEVELS > 1:
            known = known + (_ask(offsets, lengths, token, requests, WIDTH, LEVELS),)
        else:
            known = known + (known[0],)
        slot = slot + ((0 if slots is None else tl.load(slots + token)),)
        angle = angle + ((tl.load(positions + token) if TURNED > 0 and positions is not None else 0),)
        row = kv + token * kv_token
        if FULL:
            latents = latents + (tl.load(row + columns),)
            n = BLOCK
        else:
            latents = latents + (tl.load(row + columns, mask=columns < latent, other=0.0),)
            n = latent
        if ROPE > 0:
            rows = rows + (read_rope(row, only, there, n, ROPE, TURNED, HALF, False),)
    if PART:
        weight = tl.load(gamma + columns, mask=columns < normed, other=0.0)
    elif FULL:
        weight = tl.load(gamma + columns)
    else:
        weight = tl.load(gamma + columns, mask=columns < latent, other=0.0)
    if SCALE == "tensor":
        given = tl.load(kv_scale + tl.arange(0, 1))
    launch_dependents(PDL)
    for i in tl.static_range(N):
        token = tl.minimum(tile * N + i, tokens - 1).to(tl.int64)
        if SEARCHES:
            request, position = _answer(known[i], token, WIDTH, EXACT)
        if slots is None:
            page, entry = _split(position, page_size, page_shift, PAGE_POWER)
            valid = (request >= 0) & (position >= 0) & (page < table_width)
            if WIDTH > 1:
                row = tl.minimum(tl.maximum(request, 0), requests - 1).to(tl.int64) * table_row
            else:
                row = 0
            page = tl.load(table + row + page, mask=valid, other=0).to(tl.int64)
        else:
            page, entry = _split(slot[i].to(tl.int64), page_size, page_shift, PAGE_POWER)
            valid = slot[i] >= 0
        valid = valid & (page >= 0) & (page < pages)
        if ROPE > 0:
            a, b, rest = rows[i]
            cosine = 0.0
            sine = 0.0
            if TURNED > 0:
                if positions is None:
                    cosine, sine = angles(freqs, freqs_row, position, limit, ROPE, TURNED, HALF, PACKED, False)
                else:
                    cosine, sine = angles(
                        freqs, freqs_row, angle[i].to(tl.int64), limit, ROPE, TURNED, HALF, PACKED, False
                    )
            a, b, rest = turn(
                a, b, rest, cosine, sine, kv.dtype.element_ty, 1, ROPE, TURNED, HALF, REFERENCE, EXACT
            )  # fmt: skip
        h = latents[i].to(tl.float32)
        if PART:
            total = sum_columns(tl.where(columns < normed, h * h, 0.0), 1, BLOCK)
            rs = reciprocal_root(tl.div_rn(total, tl.full(total.shape, normed, tl.float32)) + eps)
        elif FULL:
            total = sum_columns(h * h, 1, BLOCK)
            rs = reciprocal_root(total * (1.0 / BLOCK) + eps)
        else:
            total = sum_columns(h * h, 1, BLOCK)
            rs = reciprocal_root(tl.div_rn(total, tl.full(total.shape, latent, tl.float32)) + eps)
        g = weight.to(tl.float32) + weight_offset
        y = normalize(h, rs, g, kv.dtype.element_ty, REFERENCE, EXACT)
        if PART:
            y = tl.where(columns < normed, y, h)
        if SCALE == "token":
            if ROPE > 0:
                given = _scale_of(y, a, b, rest, ROPE, HALF, FP8, EXACT)
            else:
                given = _scale_of(y, y, y, y, ROPE, HALF, FP8, EXACT)
            tl.store(token_scale + page * scale_page + entry * scale_entry + tl.arange(0, 1), given, mask=valid)
        if SCALE != "none":
            y = quotient(y, given[:, None])
            if ROPE > 0:
                a = quotient(a, given[:, None])
                b = quotient(b, given[:, None])
                rest = quotient(rest, given[:, None])
        place = blocks + page * block_page + entry * block_entry
        if FULL:
            mask = valid & (columns >= 0)
        else:
            mask = valid & (columns < latent)
        tl.store(place + columns, encode(y, blocks, FP8, HARDWARE, EXACT), mask=mask)
        if ROPE > 0:
            write_rope(place, only, there & valid, n, a, b, rest, ROPE, TURNED, HALF, True, FP8, HARDWARE, EXACT)


@triton.jit
def _mla_rope_norm_kernel(
    q, kv, gamma, freqs, offsets, lengths, table, slots, positions, kv_scale, q_out, blocks, token_scale,
    tokens, heads, latent, rope, turned, requests, table_width, pages, page_size, limit, normed,
    q_token, q_head, out_token, out_head, kv_token, freqs_row, table_row, block_page, block_entry, scale_page, scale_entry,
    kv_programs, page_shift, early, eps, weight_offset,
    ROPE: tl.constexpr, TURNED: tl.constexpr, HALF: tl.constexpr, REFERENCE: tl.constexpr, SCALE: tl.constexpr,
    FP8: tl.constexpr, FP8_Q: tl.constexpr, HARDWARE: tl.constexpr, EXACT: tl.constexpr, PAGE_POWER: tl.constexpr,
    WIDTH: tl.constexpr, LEVELS: tl.constexpr, KV_TOKENS: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr, PART: tl.constexpr,
    Q_TOKENS: tl.constexpr, HEADS: tl.constexpr, PIECES: tl.constexpr, GUARD: tl.constexpr, PDL: tl.constexpr,
    PACKED: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Programs up to ``kv_programs`` write entries, those after it rotate q. Of up to ``early`` the next kernel may start at once."""
    if tl.num_programs(0) <= early:
        launch_dependents(PDL)
    wait(PDL)
    program = tl.program_id(0)
    if program < kv_programs:
        _kv_tile(
            program, kv, gamma, freqs, offsets, lengths, table, slots, positions, kv_scale, blocks, token_scale,
            tokens, latent, normed, requests, table_width, pages, page_size, page_shift, limit,
            kv_token, freqs_row, table_row, block_page, block_entry, scale_page, scale_entry, eps, weight_offset,
            KV_TOKENS, BLOCK, FULL, PART, WIDTH, LEVELS, PAGE_POWER, ROPE, TURNED, HALF, REFERENCE, SCALE, FP8, HARDWARE, EXACT, PACKED,
            PDL,
        )  # fmt: skip
    elif ROPE > 0:
        _q_tile(
            program - kv_programs, q, q_out, freqs, offsets, lengths, positions, tokens, heads, requests, limit,
            q_token, q_head, out_token, out_head, freqs_row, Q_TOKENS, HEADS, PIECES, GUARD, WIDTH, LEVELS,
            ROPE, TURNED, HALF, REFERENCE, FP8_Q, HARDWARE, EXACT, PACKED, SPLIT, PDL,
        )  # fmt: skip
