// Products of float32 rows with the packed tokens of a KV cache, and weighted sums of them.
// Plain C++17 with GCC/Clang vectors; called through ctypes (kernels/cpu.py), which checks all shapes.
// Reference: hqmq_compile/cache/read.py. Layouts: cache/buffers.py, codec/packing.py.
//
// A packed token is scale * unit(word): four integers from a table times a level. Means, rotation,
// window and sinks are the caller's business.
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

// Two chunks at a time; an odd last one is paired with zeros.
typedef float float32x8 __attribute__((vector_size(32)));
typedef int16_t int16x8 __attribute__((vector_size(16)));
typedef uint32_t uint32x8 __attribute__((vector_size(32)));
typedef int64_t int64x2 __attribute__((vector_size(16)));

constexpr int MAX_CHUNKS = 128, MAX_PAIRS = 64;  // head_dim up to 512
constexpr int MAX_ROWS = 8;      // rows that share one pass over the cache
constexpr int PADDING = 64;      // bytes behind a row that may be read

template <typename T>
inline T load(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

}  // namespace

extern "C" {

// Filled by ctypes: keep in step with `Cache` in kernels/cpu.py.
struct Cache {
  const uint8_t* codes;      // [BH, capacity, row_bytes]
  const void* scales;        // [BH, capacity, groups], uint8 or float16
  const void* pool;          // [BH, blocks, pool_slots, 4], int8, float16 or bfloat16
  const int8_t* exponents;   // [BH, blocks, tiles]
  const int64_t* table;      // [heads or 1, 2^index_bits]: four int16, a codeword x 127
  const float* scale_table;  // [256]: values of uint8 scales
  int64_t heads, table_heads, capacity, first, count;  // absolute slots first..first+count-1
  int32_t row_bytes, groups, group_chunks, chunks, word_bits, index_bits, radius_bits;
  int32_t level_offset, escape, flag_bit, block, pool_slots, tiles, tile, half_scales, pool_kind;
  float unit;  // a level times a codeword x 127, of scale 1
};
}

namespace {

inline float half_to_float(uint16_t h) {
  const uint32_t sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023u;
  if (exponent == 0) {
    const float value = std::ldexp(static_cast<float>(mantissa), -24);
    return sign ? -value : value;
  }
  const uint32_t bits =
      exponent == 31 ? sign | 0x7f800000u | mantissa << 13 : sign | (exponent + 112) << 23 | mantissa << 13;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline float bfloat16_to_float(uint16_t b) {
  const uint32_t bits = static_cast<uint32_t>(b) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Words of the eight chunks from `first` (a multiple of 8) on. Widths of planes are powers of two,
// low bits of the word first, so in every plane the eight fields begin with a byte.
inline uint32x8 unpack(const uint8_t* row, int chunks, int word_bits, int first) {
  uint32x8 words = {};
  int shift = 0;
  for (int width = 16; width >= 1; width >>= 1) {
    if (!(word_bits & width)) continue;
    const uint8_t* const fields = row + first * width / 8;
    if (width == 16) {
      typedef uint16_t uint16x8 __attribute__((vector_size(16)));
      words = __builtin_convertvector(load<uint16x8>(fields), uint32x8);
    } else if (width == 8) {
      typedef uint8_t uint8x8 __attribute__((vector_size(8)));
      words |= __builtin_convertvector(load<uint8x8>(fields), uint32x8) << shift;
    } else {
      const uint32_t some = width == 4 ? load<uint32_t>(fields) : width == 2 ? load<uint16_t>(fields) : *fields;
      const uint32x8 place = uint32x8{0, 1, 2, 3, 4, 5, 6, 7} * width;
      words |= (uint32x8{} + some >> place & (1u << width) - 1) << shift;
    }
    row += (chunks * width + 7) / 8;
    shift += width;
  }
  return words;
}

// One token at a time, decoded without its scale.
struct Reader {
  const Cache& c;
  const int64_t bh;
  const int64_t* const table;
  const int pairs;
  float scale[MAX_CHUNKS];  // of each group, times the unit
  float32x8 value[MAX_PAIRS + 4];
  uint8_t padded[4 * MAX_CHUNKS + PADDING] = {};

  Reader(const Cache& cache, int64_t bh)
      : c(cache), bh(bh),
        table(cache.table + (cache.table_heads > 1 ? bh % cache.heads : 0) * (1ll << cache.index_bits)),
        pairs((cache.chunks + 1) / 2) {}

  int end_of_group(int g) const {  // in pairs
    const int stop = (g + 1) * c.group_chunks / 2;
    return g + 1 == c.groups || stop > pairs ? pairs : stop;
  }

  // False if the token in this physical row is empty: it reads as zeros.
  bool read(int64_t row) {
    const int64_t place = bh * c.capacity + row;
    for (int g = 0; g < c.groups; g++) {
      const int64_t at = place * c.groups + g;
      const float s = c.half_scales ? half_to_float(static_cast<const uint16_t*>(c.scales)[at])
                                    : c.scale_table[static_cast<const uint8_t*>(c.scales)[at]];
      if (g == 0 && s == 0.0f) return false;
      scale[g] = s * c.unit;
    }
    const int chunks = c.chunks, radius_bits = c.radius_bits, flag = radius_bits + c.index_bits;
    const uint32_t level_mask = (1u << radius_bits) - 1, index_mask = (1u << c.index_bits) - 1;
    const uint8_t* codes = c.codes + place * c.row_bytes;
    if (chunks % 8) codes = static_cast<const uint8_t*>(std::memcpy(padded, codes, c.row_bytes));
    uint32x8 flagged = {};
    for (int first = 0; first < chunks; first += 8) {  // outliers, too: without a branch this is fast
      const uint32x8 words = unpack(codes, chunks, c.word_bits, first);
      const uint32x8 level = words & level_mask, index = words >> radius_bits & index_mask;
      const float32x8 factor = __builtin_convertvector(level + static_cast<uint32_t>(c.level_offset), float32x8);
      if (c.escape) flagged |= (uint32x8)(level == 0);
      if (c.flag_bit) flagged |= words >> flag;
      for (int i = 0; i < 8; i += 2) {
        const int64x2 codewords = {table[index[i]], table[index[i + 1]]};
        const float x = factor[i], y = factor[i + 1];
        value[(first + i) / 2] =
            __builtin_convertvector((int16x8)codewords, float32x8) * float32x8{x, x, x, x, y, y, y, y};
      }
    }
    const int64x2* const any = reinterpret_cast<const int64x2*>(&flagged);
    if ((any[0] | any[1])[0] | (any[0] | any[1])[1]) outliers(codes, row);
    if (chunks & 1)
      for (int j = 4; j < 8; j++) value[pairs - 1][j] = 0.0f;
    return true;
  }

  void outliers(const uint8_t* codes, int64_t row) {
    const uint32_t level_mask = (1u << c.radius_bits) - 1, index_mask = (1u << c.index_bits) - 1;
    for (int first = 0; first < c.chunks; first += 8) {
      const uint32x8 words = unpack(codes, c.chunks, c.word_bits, first);
      for (int i = 0; i < 8 && first + i < c.chunks; i++)
        if (c.escape ? (words[i] & level_mask) == 0 : words[i] >> (c.radius_bits + c.index_bits))
          outlier(row, words[i] >> c.radius_bits & index_mask, scale[(first + i) / c.group_chunks],
                  reinterpret_cast<float*>(value) + 4 * (first + i));
    }
  }

  void outlier(int64_t row, uint32_t index, float over, float* out) const {
    const int64_t block = bh * (c.capacity / c.block) + row / c.block;
    const int64_t at = (block * c.pool_slots + index) * 4;
    if (c.pool_kind == 0) {
      const float power = std::ldexp(1.0f, c.exponents[block * c.tiles + row % c.block / c.tile]);
      for (int j = 0; j < 4; j++) out[j] = static_cast<const int8_t*>(c.pool)[at + j] * power / over;
    } else {
      for (int j = 0; j < 4; j++) {
        const uint16_t bits = static_cast<const uint16_t*>(c.pool)[at + j];
        out[j] = (c.pool_kind == 1 ? half_to_float(bits) : bfloat16_to_float(bits)) / over;
      }
    }
  }
};

inline float total(float32x8 v) {
  return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

template <int R>
void scores_of(const Cache& c, int64_t bh, int64_t begin, int64_t end, const float* rows, float* out) {
  Reader reader(c, bh);
  const int dim = 4 * c.chunks;
  float32x8 query[R][MAX_PAIRS];
  std::memset(query, 0, sizeof(query));
  for (int r = 0; r < R; r++) std::memcpy(query[r], rows + r * dim, 4 * dim);
  int64_t row = (c.first + begin) % c.capacity;
  for (int64_t t = begin; t < end; t++) {
    float sum[R] = {};
    if (reader.read(row)) {
      for (int g = 0, i = 0; g < c.groups; g++) {
        float32x8 acc[R] = {};
        for (const int stop = reader.end_of_group(g); i < stop; i++)
          for (int r = 0; r < R; r++) acc[r] += query[r][i] * reader.value[i];
        for (int r = 0; r < R; r++) sum[r] += total(acc[r]) * reader.scale[g];
      }
    }
    for (int r = 0; r < R; r++) out[r * c.count + t] = sum[r];
    if (++row == c.capacity) row = 0;
  }
}

template <int R>
void weighted_of(const Cache& c, int64_t bh, int64_t begin, int64_t end, const float* weights, float* out) {
  Reader reader(c, bh);
  const int dim = 4 * c.chunks;
  float32x8 acc[R][MAX_PAIRS];
  std::memset(acc, 0, sizeof(acc));
  int64_t row = (c.first + begin) % c.capacity;
  for (int64_t t = begin; t < end; t++) {
    bool any = false;
    for (int r = 0; r < R; r++) any |= weights[r * c.count + t] != 0.0f;  // NaN counts
    if (any && reader.read(row)) {
      for (int g = 0, i = 0; g < c.groups; g++) {
        float weight[R];
        for (int r = 0; r < R; r++) weight[r] = weights[r * c.count + t] * reader.scale[g];
        for (const int stop = reader.end_of_group(g); i < stop; i++)
          for (int r = 0; r < R; r++) acc[r][i] += weight[r] * reader.value[i];
      }
    }
    if (++row == c.capacity) row = 0;
  }
  for (int r = 0; r < R; r++) std::memcpy(out + r * dim, acc[r], 4 * dim);
}

typedef void (*Pass)(const Cache&, int64_t, int64_t, int64_t, const float*, float*);
constexpr Pass SCORES[MAX_ROWS] = {scores_of<1>, scores_of<2>, scores_of<3>, scores_of<4>,
                                   scores_of<5>, scores_of<6>, scores_of<7>, scores_of<8>};
constexpr Pass WEIGHTED[MAX_ROWS] = {weighted_of<1>, weighted_of<2>, weighted_of<3>, weighted_of<4>,
                                     weighted_of<5>, weighted_of<6>, weighted_of<7>, weighted_of<8>};

}  // namespace

extern "C" {

// rows [BH, R, D] -> out [BH, R, count].
void hqmq_scores(const Cache* c, int64_t bh, int64_t rows, int64_t splits, int threads, const float* in,
                 float* out) {
  const int64_t dim = 4 * c->chunks;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (int64_t task = 0; task < bh * splits; task++) {
    const int64_t h = task / splits, part = task % splits;
    const int64_t begin = c->count * part / splits, end = c->count * (part + 1) / splits;
    for (int64_t r = 0; r < rows; r += MAX_ROWS) {
      const int64_t some = rows - r < MAX_ROWS ? rows - r : MAX_ROWS;
      SCORES[some - 1](*c, h, begin, end, in + (h * rows + r) * dim, out + (h * rows + r) * c->count);
    }
  }
}

// weights [BH, R, count] -> out [splits, BH, R, D], to be summed over splits.
void hqmq_weighted_sum(const Cache* c, int64_t bh, int64_t rows, int64_t splits, int threads,
                       const float* in, float* out) {
  const int64_t dim = 4 * c->chunks;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (int64_t task = 0; task < bh * splits; task++) {
    const int64_t h = task / splits, part = task % splits;
    const int64_t begin = c->count * part / splits, end = c->count * (part + 1) / splits;
    for (int64_t r = 0; r < rows; r += MAX_ROWS) {
      const int64_t some = rows - r < MAX_ROWS ? rows - r : MAX_ROWS;
      WEIGHTED[some - 1](*c, h, begin, end, in + (h * rows + r) * c->count,
                         out + ((part * bh + h) * rows + r) * dim);
    }
  }
}

int64_t hqmq_cache_size() { return sizeof(Cache); }
}
