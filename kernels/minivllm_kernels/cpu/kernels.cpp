// What a decoder does between its matrix products, for CPUs: one pass over memory each, where torch needs several.
//
// The definition of each function is the torch code of the same name in minivllm/models/layers.py and
// minivllm/runner/attention.py; tests compare the two. Everything is computed in float. Loops over a row's elements are
// left to the compiler to vectorise (`omp simd` allows it to reorder the sums); rows are shared among the threads of the
// OpenMP runtime that torch uses as well.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

struct bfloat16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }

inline float to_float(bfloat16 x) {  // the upper half of a float
  uint32_t bits = uint32_t(x.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, 4);
  return wide;
}

inline void store(float* out, float x) { *out = x; }

inline void store(bfloat16* out, float x) {  // round to nearest, ties to even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  out->bits = uint16_t((x == x ? bits + 0x7fff + ((bits >> 16) & 1) : bits) >> 16);
}

// 16 floats: one register with AVX-512, two with AVX2, four with NEON; the compiler sees to that. Sums in such vectors stay
// in registers through a loop.
typedef float floats __attribute__((vector_size(64)));
typedef uint32_t words __attribute__((vector_size(64)));
constexpr int LANES = 16, MAX_DIM = 512;

// 32 elements as two vectors. Of bfloat16, one has the even and the other the odd ones: a shift and a mask of the words
// that two elements make, where putting them in order would take five instructions each.
struct Pair {
  floats even, odd;
};

template <typename Vector>
inline Vector read(const void* from) {
  Vector x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

inline Pair load(const float* from) { return {read<floats>(from), read<floats>(from + LANES)}; }

inline Pair load(const bfloat16* from) {
  words both = read<words>(from), even = both << 16, odd = both & 0xffff0000;
  return {read<floats>(&even), read<floats>(&odd)};
}

inline void store(float* out, Pair x) { std::memcpy(out, &x, sizeof x); }

inline words rounded(floats x) {
  words bits = read<words>(&x);
  return x == x ? bits + 0x7fff + ((bits >> 16) & 1) : bits;
}

inline void store(bfloat16* out, Pair x) {
  words both = rounded(x.even) >> 16 | (rounded(x.odd) & 0xffff0000);
  std::memcpy(out, &both, sizeof both);
}

inline float sum(floats x) {  // halves onto halves
  x += __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  x += __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3);
  x += __builtin_shufflevector(x, x, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1);
  return x[0] + x[1];
}

// e ** x to 1 part in 10 million: 2 ** n by the exponent's bits, times a polynomial of the rest, |rest| <= ln(2) / 2.
// Coefficients: Taylor's, up to 1 / 7!. NaN gives some number: callers use it on finite x and on -infinity (nearly 0).
inline floats exponential(floats x) {
  x = x < -87.0f ? floats{} - 87.0f : x > 88.0f ? floats{} + 88.0f : x;
  floats n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // to the nearest whole number: 1.5 * 2 ** 23 has no room for more
  floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;    // ln(2) in two parts, the first exact in few bits
  floats p = 1 + r * (1 + r * (1 / 2.f + r * (1 / 6.f + r * (1 / 24.f + r * (1 / 120.f + r * (1 / 720.f + r / 5040.f))))));
  words scale = __builtin_convertvector(n + 127, words) << 23;
  return p * read<floats>(&scale);
}

constexpr int64_t SMALL = 16384;  // elements that one thread does sooner than two could start

// out = x / sqrt(mean(x ** 2) + eps) * weight for `rows` rows of `size`; with `update`, x += update comes first.
template <typename T>
void rms_norm(float* x, const T* update, const T* weight, T* out, int64_t rows, int64_t size, float eps) {
#pragma omp parallel for if (rows * size > SMALL)
  for (int64_t row = 0; row < rows; row++) {
    float* in = x + row * size;
    const T* add = update ? update + row * size : nullptr;
    float sum = 0;
    if (add) {
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < size; i++) {
        in[i] += to_float(add[i]);
        sum += in[i] * in[i];
      }
    } else {
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < size; i++) sum += in[i] * in[i];
    }
    float scale = 1 / std::sqrt(sum / size + eps);
#pragma omp simd
    for (int64_t i = 0; i < size; i++) store(out + row * size + i, in[i] * scale * to_float(weight[i]));
  }
}

inline floats silu(floats x) { return x / (1 + exponential(-x)); }

// out [rows, size] = silu(gate) * up, gate and up side by side in gate_up [rows, 2 * size].
template <typename T>
void gated_silu(const T* gate_up, T* out, int64_t rows, int64_t size) {
#pragma omp parallel for if (rows * size > SMALL / 4)
  for (int64_t row = 0; row < rows; row++) {
    const T *gate = gate_up + row * 2 * size, *up = gate + size;
    for (int64_t i = 0; i < size; i += 2 * LANES) {
      Pair g = load(gate + i), u = load(up + i);
      store(out + row * size + i, Pair{silu(g.even) * u.even, silu(g.odd) * u.odd});
    }
  }
}

// out [tokens, heads, dim]: each head of x turned by its token's angles. x has `stride` elements from token to token;
// cos and sin are [tokens, dim], the minus of the first half in sin.
template <typename T>
void rotate(const T* x, const T* cos, const T* sin, T* out, int64_t tokens, int64_t heads, int64_t dim,
            int64_t stride) {
#pragma omp parallel for if (tokens * heads * dim > SMALL)
  for (int64_t token = 0; token < tokens; token++) {
    const T *c = cos + token * dim, *s = sin + token * dim;
    for (int64_t head = 0; head < heads; head++) {
      const T *low = x + token * stride + head * dim, *high = low + dim / 2;
      T* to = out + (token * heads + head) * dim;
#pragma omp simd
      for (int64_t i = 0; i < dim / 2; i++) {
        float a = to_float(low[i]), b = to_float(high[i]);
        store(to + i, a * to_float(c[i]) + b * to_float(s[i]));
        store(to + dim / 2 + i, b * to_float(c[dim / 2 + i]) + a * to_float(s[dim / 2 + i]));
      }
    }
  }
}

// Put k and v [tokens, heads, dim], `k_stride` and `v_stride` elements from token to token, into the slots of
// cache [2 * heads, num_slots, dim].
template <typename T>
void store_kv(const T* k, const T* v, const int64_t* slots, T* cache, int64_t tokens, int64_t heads, int64_t dim,
              int64_t k_stride, int64_t v_stride, int64_t num_slots) {
#pragma omp parallel for if (tokens * heads * dim > SMALL)
  for (int64_t token = 0; token < tokens; token++)
    for (int64_t plane = 0; plane < 2 * heads; plane++) {
      const T* from = plane < heads ? k + token * k_stride + plane * dim : v + token * v_stride + (plane - heads) * dim;
      std::memcpy(cache + (plane * num_slots + slots[token]) * dim, from, dim * sizeof(T));
    }
}

// One query over slots begin .. length - 1, which the block table finds. PAIRS * 32 is the head's size where it is known when this
// is compiled; 0 means `dim`.
template <typename T, int PAIRS>
void attend(const T* q, const T* keys, const T* values, const int64_t* table, T* out, int64_t begin, int64_t length,
            int64_t dim, int64_t block_size, float scale, float* scores) {
  const int64_t pairs = PAIRS ? PAIRS : dim / (2 * LANES);
  const int64_t size = pairs * 2 * LANES;
  Pair part[PAIRS ? PAIRS : MAX_DIM / (2 * LANES)];
  for (int64_t i = 0; i < pairs; i++) part[i] = load(q + i * 2 * LANES);
  float largest = -INFINITY;
  for (int64_t slot = begin, end; slot < length; slot = end) {
    const T* key = keys + (table[slot / block_size] * block_size + slot % block_size) * size;
    end = std::min((slot / block_size + 1) * block_size, length);
    for (; slot < end; slot++, key += size) {
      floats products = {};
      for (int64_t i = 0; i < pairs; i++) {
        Pair k = load(key + i * 2 * LANES);
        products += part[i].even * k.even + part[i].odd * k.odd;
      }
      scores[slot] = sum(products) * scale;
      largest = std::max(largest, scores[slot]);
    }
  }
  floats totals = {};
  for (int64_t slot = length; slot < length + LANES; slot++) scores[slot] = -INFINITY;  // whole vectors may read on
  for (int64_t slot = begin; slot < length; slot += LANES) {
    floats weights = exponential(read<floats>(scores + slot) - largest);
    std::memcpy(scores + slot, &weights, sizeof weights);
    totals += weights;
  }
  const float total = sum(totals);

  for (int64_t i = 0; i < pairs; i++) part[i] = Pair{};
  for (int64_t slot = begin, end; slot < length; slot = end) {
    const T* value = values + (table[slot / block_size] * block_size + slot % block_size) * size;
    end = std::min((slot / block_size + 1) * block_size, length);
    for (; slot < end; slot++, value += size)
      for (int64_t i = 0; i < pairs; i++) {
        Pair v = load(value + i * 2 * LANES);
        part[i].even += scores[slot] * v.even;
        part[i].odd += scores[slot] * v.odd;
      }
  }
  for (int64_t i = 0; i < pairs; i++) store(out + i * 2 * LANES, Pair{part[i].even / total, part[i].odd / total});
}

// Attention of rows of one token: token tokens[row] of q and out [T, heads, dim] over the lengths[row] slots that
// tables[row] lists, or the last `window` of them, in cache [2 * kv_heads, num_slots, dim], read where they are. q has
// `stride` elements from token to token.
template <typename T, int PAIRS>
void paged_decode(const T* q, const T* cache, const int64_t* tokens, const int64_t* tables, const int64_t* lengths,
                  T* out, int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim, int64_t num_slots,
                  int64_t block_size, int64_t table_size, int64_t stride, int64_t window, float scale) {
  const int64_t group = heads / kv_heads, plane = num_slots * dim;
#pragma omp parallel if (rows * kv_heads > 1)
  {
    std::vector<float> scores;
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < rows * kv_heads; task++) {
      int64_t row = task / kv_heads, head = task % kv_heads;
      const T* queries = q + tokens[row] * stride + head * group * dim;
      T* to = out + (tokens[row] * heads + head * group) * dim;
      int64_t length = lengths[row], begin = std::max<int64_t>(length - window, 0);
      scores.resize(length + LANES);
      for (int64_t i = 0; i < group * dim; i += dim)
        attend<T, PAIRS>(queries + i, cache + head * plane, cache + (kv_heads + head) * plane, tables + row * table_size,
                         to + i, begin, length, dim, block_size, scale, scores.data());
    }
  }
}

}  // namespace

// What ctypes sees: NAME_float and NAME_bfloat16. Memory is contiguous where no stride says otherwise.
#define EXPORT(T)                                                                                                     \
  extern "C" void rms_norm_##T(float* x, const T* update, const T* weight, T* out, int64_t rows, int64_t size,        \
                               float eps) {                                                                           \
    rms_norm(x, update, weight, out, rows, size, eps);                                                                \
  }                                                                                                                   \
  extern "C" void gated_silu_##T(const T* gate_up, T* out, int64_t rows, int64_t size) {                              \
    gated_silu(gate_up, out, rows, size);                                                                             \
  }                                                                                                                   \
  extern "C" void rotate_##T(const T* x, const T* cos, const T* sin, T* out, int64_t tokens, int64_t heads,           \
                             int64_t dim, int64_t stride) {                                                           \
    rotate(x, cos, sin, out, tokens, heads, dim, stride);                                                             \
  }                                                                                                                   \
  extern "C" void store_kv_##T(const T* k, const T* v, const int64_t* slots, T* cache, int64_t tokens, int64_t heads, \
                               int64_t dim, int64_t k_stride, int64_t v_stride, int64_t num_slots) {                  \
    store_kv(k, v, slots, cache, tokens, heads, dim, k_stride, v_stride, num_slots);                                  \
  }                                                                                                                   \
  extern "C" void paged_decode_##T(const T* q, const T* cache, const int64_t* tokens, const int64_t* tables,          \
                                   const int64_t* lengths, T* out, int64_t rows, int64_t heads, int64_t kv_heads,     \
                                   int64_t dim, int64_t num_slots, int64_t block_size, int64_t table_size,            \
                                   int64_t stride, int64_t window, float scale) {                                     \
    auto run = dim == 64 ? paged_decode<T, 2> : dim == 128 ? paged_decode<T, 4> : paged_decode<T, 0>;                 \
    run(q, cache, tokens, tables, lengths, out, rows, heads, kv_heads, dim, num_slots, block_size, table_size,        \
        stride, window, scale);                                                                                       \
  }

EXPORT(float)
EXPORT(bfloat16)
