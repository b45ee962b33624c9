"""Inline PTX and register layouts of `gluon_attend.py`.

A warp decodes 32 slots at a time, straight into the operand registers of the tensor cores. Lane
(g, t) of a warp, g = 0..7 and t = 0..3, is lane 4 g + t of the mma instructions.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

try:
    thread_barrier = gl.thread_barrier
except AttributeError:  # its name from Triton 3.7 on
    thread_barrier = gl.barrier

BLOCK = gl.constexpr(64)
KEY_ENTRIES = gl.constexpr(2048)
VALUE_ENTRIES = gl.constexpr(512)
# Values are decoded as 16 x, so that small ones stay normal in float16.
VALUE_UNIT = gl.constexpr(16.0)
NO_MASK, BOOL_MASK, ADDED_MASK = (gl.constexpr(i) for i in range(3))
START, PACKED = gl.constexpr(0), gl.constexpr(1)  # of the state vector


# -- inline PTX --------------------------------------------------------------------------------
# A table entry is four biased bytes b = x + 128. PRMT with 0x64 makes the float16 1024 + b of each.
_UNPACK = """
prmt.b32 h0, t0, 0x64646464, 0x4140; prmt.b32 h1, t0, 0x64646464, 0x4342;
prmt.b32 h2, t1, 0x64646464, 0x4140; prmt.b32 h3, t1, 0x64646464, 0x4342;
mov.b32 N, 0xE480E480;
add.rn.f16x2 h0, h0, N; add.rn.f16x2 h1, h1, N; add.rn.f16x2 h2, h2, N; add.rn.f16x2 h3, h3, N;
"""
_SPLIT_LEVELS = """
mov.b32 {x0,x1}, L; mov.b32 la, {x0,x0}; mov.b32 lb, {x1,x1};
"""


@constexpr_function
def key_asm(copies):
    """Two chunks of one 32-bit load.

    Inputs: $8 word, $9 4 * copy, $10 scale (f16x2), $11 scale of outliers (f16x2), $12 offset of
    this warp's outliers, $13.. four f16x2 of the mean.
    """
    step = {1: 2, 2: 3, 4: 4, 8: 5}[copies]  # log2 of the bytes of an entry
    shift = step - 4
    mask = 0x7FF << step
    text = "{\n.reg .b32 a0,a1,t0,t1,L,la,lb,h0,h1,h2,h3,base,u,N; .reg .b16 x0,x1; .reg .pred p0,p1;\n"
    text += "and.b32 L, $8, 0x800f800f; mov.b32 u, 0; setp.eq.f16x2 p0|p1, L, u;\n"
    if shift > 0:
        text += f"shl.b32 a0, $8, {shift};\n"
    elif shift < 0:
        text += f"shr.u32 a0, $8, {-shift};\n"
    else:
        text += "mov.b32 a0, $8;\n"
    text += f"and.b32 a0, a0, {mask}; or.b32 a0, a0, $9;\n"
    text += f"shr.u32 a1, $8, {16 - shift}; and.b32 a1, a1, {mask}; or.b32 a1, a1, $9;\n"
    text += "@p0 shr.u32 a0, $8, 2; @p0 lop3.b32 a0, a0, 0x3fc, $12, 0xEA;\n"
    text += "@p1 shr.u32 a1, $8, 18; @p1 lop3.b32 a1, a1, 0x3fc, $12, 0xEA;\n"
    text += "mov.u32 base, global_smem; add.u32 a0, a0, base; add.u32 a1, a1, base;\n"
    text += "ld.shared.b32 t0, [a0]; ld.shared.b32 t1, [a1];\n"
    text += "@p0 xor.b32 t0, t0, 0x80808080; @p1 xor.b32 t1, t1, 0x80808080;\n"
    # sign and level as float16 subnormals, times 2^15: level * 2^-9
    text += "mov.b32 N, 0x78007800; mul.rn.f16x2 L, L, N;\n"
    text += "mul.rn.f16x2 L, L, $10;\n"
    text += "@p0 prmt.b32 L, L, $11, 0x3254; @p1 prmt.b32 L, L, $11, 0x5410;\n"
    text += _SPLIT_LEVELS + _UNPACK
    text += "fma.rn.f16x2 h0, h0, la, $13; fma.rn.f16x2 h1, h1, la, $14;\n"
    text += "fma.rn.f16x2 h2, h2, lb, $15; fma.rn.f16x2 h3, h3, lb, $16;\n"
    return (
        text
        + "mov.b32 {$0,$1}, h0; mov.b32 {$2,$3}, h1; mov.b32 {$4,$5}, h2; mov.b32 {$6,$7}, h3;\n}\n"
    )


@constexpr_function
def value_asm(copies, table):
    """Four chunks. Inputs: $16 their low bytes, $17 middle nibbles, $18 signs of the row, $19 4 * lane
    row, $20 4 * copy, $21 scale (f16x2). table: byte offset of the codewords."""
    step = {1: 2, 2: 3, 4: 4, 8: 5, 16: 6}[copies]
    text = "{\n.reg .b32 a0,a1,m,t0,t1,L,la,lb,h0,h1,h2,h3,base,N,n,s; .reg .b16 x0,x1;\n"
    text += "mov.u32 base, global_smem; shr.u32 n, $18, $19; and.b32 n, n, 15;\n"

    for pair in range(2):
        # Two chunks side by side in 16 bits each: middle nibble, low byte.
        keep, spread = ((255, 0x100100), (0xFF00, 0x1001))[pair]
        text += f"and.b32 m, $17, {keep}; mul.lo.u32 m, m, {spread};\n"
        text += f"prmt.b32 L, $16, 0, {('0x4140', '0x4342')[pair]};\n"
        text += "lop3.b32 m, m, 0x0f000f00, L, 0xEA;\n"
        text += f"and.b32 a0, m, 0xff8; mad.lo.u32 a0, a0, {1 << (step - 3)}, $20;\n"
        text += f"shr.u32 a1, m, {19 - step}; lop3.b32 a1, a1, {0x1FF << step}, $20, 0xEA;\n"
        text += "add.u32 a0, a0, base; add.u32 a1, a1, base;\n"
        text += f"ld.shared.b32 t0, [a0+{table}]; ld.shared.b32 t1, [a1+{table}];\n"
        text += "and.b32 L, L, 0x00070007; mov.b32 N, 0x78007800; mov.b32 s, 0x18001800;\n"
        text += "fma.rn.f16x2 L, L, N, s;\n"
        text += f"mul.lo.u32 s, n, {(0x40008000, 0x10002000)[pair]}; and.b32 s, s, 0x80008000;\n"
        text += "xor.b32 L, L, s; mul.rn.f16x2 L, L, $21;\n" + _SPLIT_LEVELS + _UNPACK
        text += "mul.rn.f16x2 h0, h0, la; mul.rn.f16x2 h1, h1, la;\n"
        text += "mul.rn.f16x2 h2, h2, lb; mul.rn.f16x2 h3, h3, lb;\n"
        for i in range(4):
            at = 8 * pair + 2 * i
            text += f"mov.b32 {{${at},${at + 1}}}, h{i};\n"
    return text + "}\n"


@constexpr_function
def scale_asm(offset):
    """Four scale codes, two bytes apart, to f16x2. $4 codes (64 bits), $5 8 * scale group.
    The result is 2^((code - 128) / 8 + offset)."""
    import struct

    half = lambda x: "0f" + struct.pack(">f", x).hex().upper()  # noqa: E731
    text = "{\n.reg .b64 w; .reg .b32 l,h,c; .reg .f32 f;\nshr.u64 w, $4, $5; mov.b64 {l,h}, w;\n"
    for i in range(4):
        word, place = "lh"[i // 2], i % 2 * 16
        text += f"bfe.u32 c, {word}, {place}, 8; cvt.rn.f32.u32 f, c;\n"
        text += f"fma.rn.f32 f, f, {half(0.125)}, {half(offset - 16.0)}; ex2.approx.ftz.f32 f, f;\n"
        text += f"cvt.rn.f16x2.f32 ${i}, f, f;\n"
    return text + "}\n"


POWER_ASM = gl.constexpr(
    "{.reg .f32 f; cvt.rn.f32.s32 f, $1; ex2.approx.ftz.f32 f, f; cvt.rn.f16x2.f32 $0, f, f;}"
)
# A copy of a lane-dependent number that the assembler cannot see through, else it recomputes it.
OPAQUE_ASM = gl.constexpr(
    "{.reg .b32 l; mov.u32 l, %laneid; shfl.sync.idx.b32 $0, $1, l, 0x1f, 0xffffffff;}"
)
WARP_SYNC_ASM = gl.constexpr("bar.warp.sync 0xffffffff; mov.u32 $0, $1;")
ARRIVED_ASM = gl.constexpr("cp.async.wait_group 0; bar.warp.sync 0xffffffff; mov.u32 $0, $1;")
GRID_WAIT_ASM = gl.constexpr("griddepcontrol.wait; mov.u32 $0, $1;")
COPY_ASM = gl.constexpr(
    "{.reg .b32 a; mov.u32 a, global_smem; add.u32 a, a, $1;"
    "cp.async.cg.shared.global [a], [$2], 16; cp.async.cg.shared.global [a+512], [$2+512], 16;"
    "cp.async.commit_group; mov.u32 $0, 0;}"
)


# -- layouts -----------------------------------------------------------------------------------
@constexpr_function
def key_layout(NW):
    """[NW, 4 i, 8 g, 4 t, 4 words]: lane (g, t); slot 4 g + i of a tile of 32."""
    regs = [[0, 0, 0, 0, 1], [0, 0, 0, 0, 2], [0, 1, 0, 0, 0], [0, 2, 0, 0, 0]]
    lanes = [[0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [0, 0, 1, 0, 0], [0, 0, 2, 0, 0], [0, 0, 4, 0, 0]]
    warps = [[1 << i, 0, 0, 0, 0] for i in range(NW.bit_length() - 1)]
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [NW, 4, 8, 4, 4])


@constexpr_function
def value_layout(NW):
    """[NW, 8 i, 4 t, 8 g]: lane (g, t); slot 8 t + i of a tile of 32."""
    regs = [[0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
    lanes = [[0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4]]
    warps = [[1 << i, 0, 0, 0] for i in range(NW.bit_length() - 1)]
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [NW, 8, 4, 8])


@constexpr_function
def weight_layout(NW):
    """[NW, 32, 8] as the B operand of the second product wants it."""
    regs = [[0, 4, 0], [0, 8, 0], [0, 16, 0]]
    lanes = [[0, 1, 0], [0, 2, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]]
    warps = [[1 << i, 0, 0] for i in range(NW.bit_length() - 1)]
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [NW, 32, 8])


@constexpr_function
def mean_layout(NW):
    """[NW, 4 t, 4 words, 4 pairs], the same in all g."""
    regs = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 1, 0], [0, 0, 2, 0]]
    lanes = [[0, 1, 0, 0], [0, 2, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    warps = [[1 << i, 0, 0, 0] for i in range(NW.bit_length() - 1)]
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [NW, 4, 4, 4])


@constexpr_function
def lane_layout(NW):
    warps = [[1 << i, 0] for i in range(NW.bit_length() - 1)]
    lanes = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16]]
    return gl.DistributedLinearLayout([], lanes, warps, [], [NW, 32])


@constexpr_function
def out_layout(NW, HP, WIDE):
    regs = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8]]
    if WIDE:
        regs, heads = regs + [[0, 1, 0]], [[0, 2, 0], [0, 4, 0]]
    else:
        heads = [[0, 1, 0], [0, 2, 0]]
    warps = [[1 << i, 0, 0] for i in range(NW.bit_length() - 1)]
    lanes = heads + [[0, 0, 16], [0, 0, 32], [0, 0, 64]]
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [NW, HP, 128])


# -- pieces ------------------------------------------------------------------------------------
@gluon.jit
def packed_region(key_state, value_state, origin, first, length, SINKS: gl.constexpr):
    """(first block, number of blocks): blocks of which every slot is read, and read from codes."""
    base = gl.load(origin + START) + first
    packed = gl.minimum(gl.load(key_state + PACKED), gl.load(value_state + PACKED))
    begin = (gl.maximum(base, SINKS) + (BLOCK - 1)) // BLOCK
    end = gl.minimum(packed, base + length) // BLOCK
    return base, begin, gl.maximum(end - begin, 0).to(gl.int32)


@gluon.jit
def stored_at(block, last, first, capacity):
    """Where block number `block` of the region (at most `last`) is stored; `first`: where number 0 is."""
    at = gl.minimum(block, last) + first
    return gl.where(at >= capacity, at - capacity, at)


@gluon.jit
def load_table(table, smem, ENTRIES: gl.constexpr, R: gl.constexpr, NW: gl.constexpr):
    V: gl.constexpr = R if R < 4 else 4
    L: gl.constexpr = gl.BlockedLayout([1, V], [32 * V // R, R // V], [NW, 1], [1, 0])
    entry = gl.load(table + gl.arange(0, ENTRIES, gl.SliceLayout(1, L))) ^ -2139062144  # 0x80808080
    smem.store(entry[:, None] + gl.arange(0, R, gl.SliceLayout(0, L))[None, :] * 0)


@gluon.jit
def scale4(codes, shift, ASM: gl.constexpr):
    """Four scales of slots 0..3, last dimension (bit 1, bit 0) of the slot."""
    s0, s1, s2, s3 = gl.inline_asm_elementwise(
        ASM, "=r,=r,=r,=r,l,r", [codes, shift], dtype=(gl.int32,) * 4, is_pure=True, pack=1
    )
    return gl.join(gl.join(s0, s2), gl.join(s1, s3))


@gluon.jit
def exp2(x):
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def warp_sync(x, ASM: gl.constexpr):
    gl.inline_asm_elementwise(ASM, "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)
