"""Decode attention over packed blocks on Hopper, in Gluon: split-KV, one partial result per warp.

Serves one query token, keys of 12 + 4 bits with block means and int8x4 outliers, values of 10 + 3
bits. Every warp takes whole blocks of 64 slots, without a barrier in the loop. Codewords lie in shared
memory, several copies of them against bank conflicts; the outliers of a block are copied beside
them, so that they go through the same lookup. Decoded values are exact but for one rounding to
float16; they go to the tensor cores straight from registers.
`attend.py` launches it and serves whatever is not in a packed block.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from .gluon_pieces import (
    ADDED_MASK,
    ARRIVED_ASM,
    BLOCK,
    BOOL_MASK,
    COPY_ASM,
    GRID_WAIT_ASM,
    KEY_ENTRIES,
    NO_MASK,
    OPAQUE_ASM,
    POWER_ASM,
    VALUE_ENTRIES,
    VALUE_UNIT,
    WARP_SYNC_ASM,
    exp2,
    key_asm,
    key_layout,
    lane_layout,
    load_table,
    mean_layout,
    out_layout,
    packed_region,
    scale4,
    scale_asm,
    stored_at,
    thread_barrier,
    value_asm,
    value_layout,
    warp_sync,
    weight_layout,
)


@gluon.jit(do_not_specialize=["first", "length", "mask_batch", "mask_column"])
def packed_kernel(
    query, query_batch, query_head, key_codes, key_scales, key_pool, key_exponents, key_means,
    key_state, key_table, key_blocks, value_codes, value_codes16, value_scales, value_state,
    value_table, value_blocks, origin, mask, mask_batch, mask_column, part_acc, part_top, part_sum,
    heads, rows, first, length, scale,
    G: gl.constexpr, NW: gl.constexpr, KR: gl.constexpr, VR: gl.constexpr, SINKS: gl.constexpr,
    MASK: gl.constexpr, HAAR: gl.constexpr, HAAR_V: gl.constexpr,
):  # fmt: skip
    """Grid (splits, B * H). key_codes, key_means, value_codes: int32 views; value_codes16: int16;
    scales: int64; pool: int32. Partial results go to [splits * NW, B * Hq, ...]."""
    split = gl.program_id(0)
    bh = gl.program_id(1)
    b = bh // heads
    WIDE: gl.constexpr = G > 4
    N: gl.constexpr = 8
    NV: gl.constexpr = 16 if WIDE else 8
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [NW, 1, 1], [1, 16, 8])
    DA: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    DB: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    KL: gl.constexpr = key_layout(NW)
    VL: gl.constexpr = value_layout(NW)
    PL: gl.constexpr = weight_layout(NW)
    ML: gl.constexpr = mean_layout(NW)
    LL: gl.constexpr = lane_layout(NW)
    ROW: gl.constexpr = gl.SliceLayout(2, MMA)
    K4: gl.constexpr = gl.SliceLayout(4, KL)  # [NW, i, g, t]
    KGT: gl.constexpr = gl.SliceLayout(1, K4)  # [NW, g, t]
    KG: gl.constexpr = gl.SliceLayout(2, KGT)  # [NW, g]
    KTR: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, KL))  # [NW, t, word]
    VTG: gl.constexpr = gl.SliceLayout(1, VL)  # [NW, t, g]
    VT: gl.constexpr = gl.SliceLayout(2, VTG)  # [NW, t]
    KSC: gl.constexpr = scale_asm(-1.8955938)  # log2(2^9 / (127 * 15))
    VSC: gl.constexpr = scale_asm(3.0113153)  # log2(16 * 2^9 / (127 * 8))
    POOL: gl.constexpr = KEY_ENTRIES * KR * 4 + VALUE_ENTRIES * VR * 4
    KA: gl.constexpr = key_asm(KR)
    VA: gl.constexpr = value_asm(VR, KEY_ENTRIES * KR * 4)

    ktab = gl.allocate_shared_memory(
        gl.int32, [KEY_ENTRIES, KR], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    vtab = gl.allocate_shared_memory(
        gl.int32, [VALUE_ENTRIES, VR], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    pool = gl.allocate_shared_memory(
        gl.int32, [2, NW, 256], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    )
    if HAAR:
        key_table += (bh % heads) * KEY_ENTRIES
    if HAAR_V:
        value_table += (bh % heads) * VALUE_ENTRIES

    # The query, in the order in which the lanes hold a key.
    pq = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(2, DB)))
    nq = gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(1, DB)))
    wq = gl.arange(0, NW, gl.SliceLayout(1, gl.SliceLayout(2, DB)))
    d = (8 * ((pq // 2) % 4) + pq // 16) * 4 + 2 * ((pq // 8) % 2) + pq % 2
    hq = nq if WIDE else nq // 2
    q_at = (wq * 0)[:, None, None] + d[None, :, None] + (hq * query_head)[None, None, :]
    q_in = ((wq * 0)[:, None, None] + (pq * 0)[None, :, None] + hq[None, None, :]) < G
    query += b.to(gl.int64) * query_batch + (bh % heads).to(gl.int64) * (G * query_head)
    q = gl.load(query + q_at, mask=q_in, other=0.0).to(gl.float16)

    base, block0, blocks = packed_region(key_state, value_state, origin, first, length, SINKS)
    per = (blocks + gl.num_programs(0) * NW - 1) // (gl.num_programs(0) * NW)
    begin = split * per * NW
    steps = gl.minimum(per, (blocks - begin + NW - 1) // NW)
    k_first = (block0 % key_blocks).to(gl.int32)
    v_first = (block0 % value_blocks).to(gl.int32)
    last = gl.maximum(blocks - 1, 0)

    bh64 = bh.to(gl.int64)
    key_codes += bh64 * key_blocks * (BLOCK * 16)
    key_scales += bh64 * key_blocks * (BLOCK // 4)
    key_pool += bh64 * key_blocks * 256
    key_exponents += bh64 * key_blocks * 2
    key_means += bh64 * key_blocks * 64
    value_codes += bh64 * value_blocks * (BLOCK * 13)
    value_codes16 += bh64 * value_blocks * (BLOCK * 26)
    value_scales += bh64 * value_blocks * (BLOCK // 4)

    KIG: gl.constexpr = gl.SliceLayout(3, K4)
    ig_i = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, KIG)))
    i_shift = (ig_i * 16)[None, :, None].to(gl.int64)
    kw = gl.arange(0, NW, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, K4))))
    ki = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, K4))))
    kg = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, K4))))
    kt = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, K4))))
    kr = gl.arange(
        0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, KL))))
    )
    # Offsets of a lane, and of a register: constants that become part of the instruction.
    k_lane = (kg * 64)[None, None, :, None, None] + (kt * 4)[None, None, None, :, None]
    k_reg = (ki * 16)[None, :, None, None, None] + kr[None, None, None, None, :]
    k_copy = (kg * 0)[None, None, :, None] + kt[None, None, None, :]
    if KR > 4:
        k_copy = k_copy + (kg % (KR // 4) * 4)[None, None, :, None]
    k_copy = gl.inline_asm_elementwise(
        OPAQUE_ASM, "=r,r", [(k_copy % KR) * 4], dtype=gl.int32, is_pure=True, pack=1
    )
    kzero = gl.full([NW, 4, 8, 4, 4], 0, gl.int32, KL)
    gt_t = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, KGT)))
    gt_g = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, KGT)))
    gt_w = gl.arange(0, NW, gl.SliceLayout(1, gl.SliceLayout(2, KGT)))
    k_shift = (gt_w * 0)[:, None, None] + (gt_g * 0)[None, :, None] + (gt_t // 2 * 8)[None, None, :]
    kg_w = gl.arange(0, NW, gl.SliceLayout(1, KG))
    kg_g = gl.arange(0, 8, gl.SliceLayout(0, KG))

    vw = gl.arange(0, NW, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, VL))))
    vi = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, VL))))
    vt = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, VL))))
    vg = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, VL))))
    vzero = gl.full([NW, 8, 4, 8], 0, gl.int32, VL)
    v_t, v_g = vt[None, None, :, None], vg[None, None, None, :]
    v_i = vi[None, :, None, None]
    v_copy = v_t + v_g * 0
    if VR > 4:
        v_copy = v_copy + v_g % (VR // 4) * 4
    v_copy = gl.inline_asm_elementwise(
        OPAQUE_ASM, "=r,r", [(v_copy % VR) * 4], dtype=gl.int32, is_pure=True, pack=1
    )
    tg_w = gl.arange(0, NW, gl.SliceLayout(1, gl.SliceLayout(2, VTG)))
    tg_t = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, VTG)))
    tg_g = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, VTG)))
    v_shift = (tg_w * 0)[:, None, None] + (tg_t * 0)[None, :, None] + (tg_g // 4 * 8)[None, None, :]
    vt_t = gl.arange(0, 4, gl.SliceLayout(0, VT))

    mw = gl.arange(0, NW, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, ML))))
    mt = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, ML))))
    mr = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, ML))))
    mp = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, ML))))
    m_at = (
        (mw * 0)[:, None, None, None]
        + (mt * 16)[None, :, None, None]
        + (mr * 4)[None, None, :, None]
    )
    m_at = m_at + mp[None, None, None, :]
    lane = gl.arange(0, 32, gl.SliceLayout(0, LL))[None, :]
    lw = gl.arange(0, NW, gl.SliceLayout(1, LL))
    xw = gl.arange(0, NW, gl.SliceLayout(1, ROW))
    row = gl.arange(0, 32, gl.SliceLayout(0, ROW))
    slot_of_row = row % 8 * 4 + row // 8

    at = stored_at(begin + kw, last, k_first, key_blocks)
    words = gl.load((key_codes + (at[:, None, None, None, None] * (BLOCK * 16) + k_lane)) + k_reg)
    at_g = stored_at(begin + kg_w, last, k_first, key_blocks)
    codes = gl.load(key_scales + (at_g[:, None] * 16 + kg_g[None, :]))
    exponent = gl.load(key_exponents + at_g * 2).to(gl.int32)
    at_m = stored_at(begin + mw, last, k_first, key_blocks)
    mean = gl.load(key_means + (at_m[:, None, None, None] * 64 + m_at))
    at_l = stored_at(begin + lw, last, k_first, key_blocks)
    source = (key_pool + (at_l[:, None] * 256 + lane * 4)).to(gl.int64, bitcast=True)
    gl.inline_asm_elementwise(
        COPY_ASM, "=r,r,l", [POOL + lw[:, None] * 1024 + lane * 16, source],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    load_table(key_table, ktab, KEY_ENTRIES, KR, NW)
    load_table(value_table, vtab, VALUE_ENTRIES, VR, NW)
    thread_barrier()

    acc = gl.full([NW, 64, NV], 0.0, gl.float32, MMA)
    zero = gl.full([NW, 32, N], 0.0, gl.float32, MMA)
    top = gl.full([NW, N], -1e30, gl.float32, gl.SliceLayout(1, MMA))
    total = gl.sum(zero.reshape([NW, 4, 8, N]), axis=1)
    npc = gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(1, PL)))
    even = (npc % 2 == 0)[None, None, :]
    nothing = gl.full([NW, 32, N], 0.0, gl.float16, PL)
    one = lw[:, None] + lane
    mask += b.to(gl.int64) * mask_batch
    mask_start = (block0 * BLOCK - base).to(gl.int32)

    for tile in range(2 * steps):
        half = tile & 1
        step = tile >> 1
        block = begin + step * NW
        nxt = stored_at(block + half * NW + kw, last, k_first, key_blocks)
        nxt_g = gl.convert_layout(nxt, gl.SliceLayout(1, KG))
        v_cur = stored_at(block + vw, last, v_first, value_blocks)
        v_cur_t = gl.convert_layout(v_cur, gl.SliceLayout(1, VT))
        # The outliers of this block have arrived; fetch those of the next.
        if half == 0:
            warp_sync(one, ARRIVED_ASM)
            at_l = stored_at(block + NW + lw, last, k_first, key_blocks)
            source = (key_pool + (at_l[:, None] * 256 + lane * 4)).to(gl.int64, bitcast=True)
            gl.inline_asm_elementwise(
                COPY_ASM, "=r,r,l",
                [POOL + ((step + 1) & 1) * (NW * 1024) + lw[:, None] * 1024 + lane * 16, source],
                dtype=gl.int32, is_pure=False, pack=1,
            )  # fmt: skip
        pool_at = (POOL + (step & 1) * (NW * 1024) + kw * 1024)[:, None, None, None, None] + kzero
        ma, mb = gl.split(mean.reshape([NW, 4, 4, 2, 2]))  # by c1, then by b
        m00, m10 = gl.split(ma)
        m01, m11 = gl.split(mb)
        m00 = gl.convert_layout(m00, KTR)[:, None, None, :, :] + kzero
        m01 = gl.convert_layout(m01, KTR)[:, None, None, :, :] + kzero
        m10 = gl.convert_layout(m10, KTR)[:, None, None, :, :] + kzero
        m11 = gl.convert_layout(m11, KTR)[:, None, None, :, :] + kzero
        v_base = v_cur[:, None, None, None]
        low_at = value_codes + (v_base * (BLOCK * 13) + half * (32 * 13) + (v_t * (8 * 13) + v_g))
        middle_at = value_codes16 + (
            v_base * (BLOCK * 26) + half * (32 * 26) + (v_t * (8 * 26) + v_g + 16)
        )
        sign_at = value_codes + (
            v_base * (BLOCK * 13) + half * (32 * 13) + (v_t * (8 * 13) + v_g * 0 + 12)
        )
        vs_ptr = value_scales + ((v_cur_t * 16 + half * 8)[:, None] + (vt_t * 2)[None, :])
        low = gl.load(low_at + v_i * 13)
        middle = gl.load(middle_at + v_i * 26).to(gl.int32)
        signs = gl.load(sign_at + v_i * 13)

        v_codes0 = gl.load(vs_ptr)
        v_codes1 = gl.load(vs_ptr + 1)
        if MASK != NO_MASK:
            inside = (block + xw < blocks)[:, None] & (slot_of_row >= 0)[None, :]
            offset = (mask_start + half * 32 + (block + xw) * BLOCK)[:, None] + (row % 8 * 4)[
                None, :
            ]
            offset = offset * mask_column + (row // 8)[None, :] * mask_column
            added = gl.load(mask + offset, mask=inside, other=0)
        warp_sync(one, WARP_SYNC_ASM)
        # Keys
        codes_t = codes[:, :, None] + (k_shift * 0).to(gl.int64)
        s4 = scale4(codes_t, k_shift, KSC).permute([0, 3, 4, 1, 2])
        s4 = gl.convert_layout(s4.reshape([NW, 4, 8, 4]), K4)
        power = gl.inline_asm_elementwise(
            POWER_ASM, "=r,r", [exponent], dtype=gl.int32, is_pure=True, pack=1
        )
        power = gl.convert_layout(
            power, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, K4)))
        )
        h0, h1, h2, h3, h4, h5, h6, h7 = gl.inline_asm_elementwise(
            KA, "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r,r,r,r,r,r",
            [words, k_copy[:, :, :, :, None] + kzero, s4[:, :, :, :, None] + kzero,
             power[:, None, None, None, None] + kzero, pool_at, m00, m01, m10, m11],
            dtype=(gl.float16,) * 8, is_pure=False, pack=1,
        )  # fmt: skip
        j = gl.join(
            gl.join(gl.join(h0, h1), gl.join(h2, h3)), gl.join(gl.join(h4, h5), gl.join(h6, h7))
        )
        # [NW, i, g, t, word, c0, c1, b] -> rows (i, g), columns (word, b, c1, t, c0)
        j = j.permute([0, 1, 2, 4, 7, 6, 3, 5]).reshape([NW, 32, 128])
        s = mma_v2(gl.convert_layout(j, DA, assert_trivial=True), q, zero)
        # Scale code 0: an empty slot, which reads as zero.
        kcodes = gl.convert_layout(codes, gl.SliceLayout(1, KIG))[:, None, :] >> i_shift
        filled = (kcodes & 0xFF) != 0
        filled = gl.convert_layout(filled.reshape([NW, 32]), ROW)
        s = gl.where(filled[:, :, None], s * scale, 0.0)
        ahead = 1 - half
        words = gl.load(
            (key_codes + (nxt[:, None, None, None, None] * (BLOCK * 16) + (k_lane + ahead * 512)))
            + k_reg
        )
        codes = gl.load(key_scales + ((nxt_g * 16 + ahead * 8)[:, None] + kg_g[None, :]))
        exponent = gl.load(key_exponents + (nxt_g * 2 + ahead)).to(gl.int32)
        if half == 1:
            nxt_m = gl.convert_layout(
                nxt, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, ML)))
            )
            mean = gl.load(key_means + (nxt_m[:, None, None, None] * 64 + m_at))
        warp_sync(one, WARP_SYNC_ASM)
        visible = (block + xw < blocks)[:, None] & (slot_of_row >= 0)[None, :]
        if MASK == BOOL_MASK:
            visible = visible & (added != 0)
        if MASK == ADDED_MASK:
            s = s + (added.to(gl.float32) * 1.4426950408889634)[:, :, None]
        s = gl.where(visible[:, :, None], s, float("-inf"))
        higher = gl.maximum(top, gl.max(s, axis=1))
        shrink = exp2(top - higher)
        p = exp2(s - higher[:, None, :])
        top = higher
        total = total * gl.convert_layout(shrink, gl.SliceLayout(1, total.type.layout))[:, None, :]
        total = total + gl.sum(p.reshape([NW, 4, 8, N]), axis=1)
        # Rows (i, g), slots 4 g + i -> slots 8 t + i -> the order (i, t) of the values
        pp = p.to(gl.float16).reshape([NW, 4, 8, N]).permute([0, 2, 1, 3]).reshape([NW, 4, 8, N])
        pp = gl.convert_layout(pp.permute([0, 2, 1, 3]).reshape([NW, 32, N]), PL)
        if WIDE:
            pj = gl.join(gl.join(pp, nothing), gl.join(nothing, pp))
            pj = pj.permute([0, 1, 3, 4, 2]).reshape([NW, 64, NV])
            both = gl.join(shrink, shrink).permute([0, 2, 1]).reshape([NW, NV])
            both = gl.convert_layout(both, gl.SliceLayout(1, MMA))
            acc = acc * both[:, None, :]
        else:
            pj = gl.join(gl.where(even, pp, nothing), gl.where(even, nothing, pp))
            pj = pj.permute([0, 1, 3, 2]).reshape([NW, 64, N])
            acc = acc * shrink[:, None, :]
        # Values
        a0 = scale4(v_codes0[:, :, None] + (v_shift * 0).to(gl.int64), v_shift, VSC)
        a1 = scale4(v_codes1[:, :, None] + (v_shift * 0).to(gl.int64), v_shift, VSC)
        # [NW, t, g, bit 1, bit 0, bit 2] of i
        s8 = gl.join(a0, a1).permute([0, 5, 3, 4, 1, 2])
        s8 = gl.convert_layout(s8.reshape([NW, 8, 4, 8]), VL)
        x = gl.inline_asm_elementwise(
            VA, "=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r,r,r",
            [low, middle, signs, v_g * 4 + vzero, v_copy + vzero, s8],
            dtype=(gl.float16,) * 16, is_pure=False, pack=1,
        )  # fmt: skip
        ja = gl.join(
            gl.join(gl.join(x[0], x[1]), gl.join(x[2], x[3])),
            gl.join(gl.join(x[4], x[5]), gl.join(x[6], x[7])),
        )
        jb = gl.join(
            gl.join(gl.join(x[8], x[9]), gl.join(x[10], x[11])),
            gl.join(gl.join(x[12], x[13]), gl.join(x[14], x[15])),
        )
        # [NW, i, t, g, c0, c1, b, a] -> rows (a, b, c1, g), columns (i, t, c0)
        j = gl.join(ja, jb).permute([0, 7, 6, 5, 3, 1, 2, 4]).reshape([NW, 64, 64])
        pb = gl.convert_layout(pj, DB, assert_trivial=True)
        acc = mma_v2(gl.convert_layout(j, DA, assert_trivial=True), pb, acc)
    warp_sync(one, ARRIVED_ASM)
    warp_sync(one, GRID_WAIT_ASM)  # the remainder, launched before, is done when this is
    thread_barrier()  # the compiler does not see the loads of the inline code
    ktab._keep_alive()
    vtab._keep_alive()
    pool._keep_alive()

    HP: gl.constexpr = 8 if WIDE else 4
    OL: gl.constexpr = out_layout(NW, HP, WIDE)
    if WIDE:
        ot = (
            acc.reshape([NW, 2, 2, 2, 8, 2, 8])
            .permute([0, 6, 4, 1, 2, 3, 5])
            .reshape([NW, HP, 128])
        )
    else:
        ot = (
            acc.reshape([NW, 2, 2, 2, 8, HP, 2])
            .permute([0, 5, 4, 1, 2, 3, 6])
            .reshape([NW, HP, 128])
        )
    ot = gl.convert_layout(ot, OL) * (1.0 / VALUE_UNIT)
    ow = gl.arange(0, NW, gl.SliceLayout(1, gl.SliceLayout(2, OL)))
    oh = gl.arange(0, HP, gl.SliceLayout(0, gl.SliceLayout(2, OL)))
    od = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(1, OL)))
    part = (split * NW + ow) * rows + bh * G
    in_group = ((ow * 0)[:, None, None] + oh[None, :, None] + (od * 0)[None, None, :]) < G
    gl.store(
        part_acc + (part[:, None, None] + oh[None, :, None]) * 128 + od[None, None, :],
        ot,
        mask=in_group,
    )
    TL: gl.constexpr = gl.SliceLayout(1, MMA)
    total = gl.convert_layout(gl.sum(total, axis=1), TL)
    tw = gl.arange(0, NW, gl.SliceLayout(1, TL))
    tn = gl.arange(0, N, gl.SliceLayout(0, TL))
    th = tn if WIDE else tn // 2
    part = ((split * NW + tw) * rows + bh * G)[:, None] + th[None, :]
    in_group = ((tw * 0)[:, None] + th[None, :]) < G
    if not WIDE:
        in_group = in_group & (((tw * 0)[:, None] + (tn % 2)[None, :]) == 0)
    gl.store(part_top + part, top * 0.6931471805599453, mask=in_group)
    gl.store(part_sum + part, total, mask=in_group)
