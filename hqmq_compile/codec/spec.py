"""What an op must know of one packed cache tensor, as a hashable value with a string form.

Custom ops take plain tensors and scalars only, so the description of a packed cache travels through
the graph as one string argument (`str(spec)`); `CacheSpec.parse` caches the way back.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math

import torch

CHUNK = 4  # elements of one quaternion


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """Codec and layout of one cache tensor (the keys, or the values, of one attention).

    All lengths are in tokens (slots); `pool` is a fraction of the chunks of a block.
    The derived properties are the only place where sizes of packed buffers are computed.
    """

    role: str  # "key" or "value"
    head_dim: int
    dtype: str = "bfloat16"  # of the user's cache tensor, and of the window and the sinks
    secondary: int = 170  # S: secondary codewords; 24 S codewords in all
    radius_bits: int = 4
    codebook: str = "universal"  # or "haar": S random quaternions per (seed, layer, head, role)
    seed: int = 0
    layer: int = 0
    first_head: int = 0  # number of the first KV head in the model; heads may be spread over ranks
    scale: str = "log8"  # 8-bit log per 64 elements; or "float16": one per token
    least_squares: bool = True  # radius <x, c>/<c, c>; False: the norm, as in the paper
    zero_level: bool = False  # True: levels 0..2^b-1 of scale, as in the paper
    med3x: float = 0.0  # outlier threshold in medians; 0 switches Med3x off
    med3x_scope: str = "token"  # median per token, or "batch": over the whole write (paper)
    outliers: str = "int8x4"  # or "16bit"
    outlier_flag: str = "escape"  # radius level 0 marks an outlier; or "bit": one flag bit a chunk
    pool: float = 0.125  # outlier slots of a block, as a fraction of its chunks
    center: str = "none"  # "block": mean of each block; "first": of the first write; "none"
    rotate: bool = False  # signed Hadamard before quantization
    sink_tokens: int = 0  # first slots kept as they came
    window: int = 0  # newest slots kept as they came (at least this many); 0: quantize on write
    block: int = 64  # slots packed together

    def __str__(self) -> str:
        default = {f.name: f.default for f in dataclasses.fields(self)}
        return json.dumps(
            {k: v for k, v in dataclasses.asdict(self).items() if v != default[k]}, sort_keys=True
        )

    @staticmethod
    @functools.lru_cache(maxsize=4096)
    def parse(text: str) -> CacheSpec:
        return CacheSpec(**json.loads(text))

    def replace(self, **changes) -> CacheSpec:
        return dataclasses.replace(self, **changes)

    # -- derived sizes ---------------------------------------------------------------------------
    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def chunks(self) -> int:
        """Quaternions per token."""
        return self.head_dim // CHUNK

    @property
    def index_bits(self) -> int:
        """Bits of the codeword index; the top one is the sign (-1 is in the Hurwitz group)."""
        return math.ceil(math.log2(24 * self.secondary))

    @property
    def word_bits(self) -> int:
        """Bits of one chunk: [flag] [index] [radius level]."""
        return self.index_bits + self.radius_bits + self.has_flag_bit

    @property
    def has_flag_bit(self) -> bool:
        return bool(self.med3x) and self.outlier_flag == "bit"

    @property
    def has_escape(self) -> bool:
        return bool(self.med3x) and self.outlier_flag == "escape"

    @property
    def level_offset(self) -> int:
        """Added to the stored radius code to get the level (1 when code 0 is an ordinary level)."""
        return 0 if (self.has_escape or self.zero_level) else 1

    @property
    def top_level(self) -> int:
        """The level whose radius equals the scale."""
        return 2**self.radius_bits - 1 + self.level_offset

    @property
    def planes(self) -> tuple[int, ...]:
        """Widths of the bit planes of a word, low bits first: powers of two that sum to word_bits."""
        return tuple(w for w in (16, 8, 4, 2, 1) if self.word_bits & w)

    @property
    def row_bytes(self) -> int:
        """Packed bytes of one token: every plane rounded up to whole bytes."""
        return sum((self.chunks * w + 7) // 8 for w in self.planes)

    @property
    def scale_groups(self) -> int:
        return 1 if self.scale == "float16" else math.ceil(self.head_dim / 64)

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.float16 if self.scale == "float16" else torch.uint8

    @property
    def pool_slots(self) -> int:
        """Outlier slots of one block and head."""
        if not self.med3x:
            return 0
        slots = max(1, round(self.pool * self.block * self.chunks))
        return min(slots, self.block * self.chunks, 2 ** (self.index_bits))

    @property
    def pool_dtype(self) -> torch.dtype:
        if self.outliers == "int8x4":
            return torch.int8
        return self.torch_dtype if self.torch_dtype.itemsize == 2 else torch.float16

    @property
    def tiles(self) -> int:
        """32-slot tiles of a block: one power-of-two scale for the int8 outliers of each."""
        return math.ceil(self.block / 32) if self.med3x and self.outliers == "int8x4" else 0

    @property
    def ring_slots(self) -> int:
        """Slots of the 16-bit ring: a window plus one block, in whole blocks."""
        return math.ceil((self.window + self.block) / self.block) * self.block if self.window else 0
