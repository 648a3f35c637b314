// What is computed on one block of the cache: scan scores from codes, scores from residuals, sums of values.
//
// Tokens follow each other in memory and channels are the lanes, so a token's score is the sum of a vector's lanes. Such
// sums are taken for as many tokens at once as there are lanes, by adding halves, quarters, ... of the vectors.
#ifndef EFFML_FFD_BLOCKS_H_
#define EFFML_FFD_BLOCKS_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace effml::ffd {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

using Vector = float __attribute__((vector_size(4 * kWidth), aligned(4), may_alias));
using Signed = int32_t __attribute__((vector_size(4 * kWidth), aligned(4), may_alias));
using Bits = uint32_t __attribute__((vector_size(4 * kWidth), aligned(4), may_alias));
using Shorts = uint16_t __attribute__((vector_size(2 * kWidth), aligned(1), may_alias));
using Bytes = uint8_t __attribute__((vector_size(kWidth), aligned(1), may_alias));

constexpr float kLowest = -std::numeric_limits<float>::infinity();

// float8 with 4 bits of exponent, 3 of fraction, no infinity, and one NaN of either sign.
struct Float8 {
  uint8_t bits;
};

inline Vector floats_of(Bits bits) { return reinterpret_cast<const Vector&>(bits); }
inline Bits bits_of(Vector value) { return reinterpret_cast<const Bits&>(value); }

// Numbers of 8 and 16 bits, widened. GCC takes __builtin_convertvector apart into one load for each number.
inline Bits widened(const uint8_t* p) {
#if defined(__AVX512F__)
  return (Bits)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
  return (Bits)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  return __builtin_convertvector(*reinterpret_cast<const Bytes*>(p), Bits);
#endif
}

inline Bits widened(const uint16_t* p) {
#if defined(__AVX512F__)
  return (Bits)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  return (Bits)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  return __builtin_convertvector(*reinterpret_cast<const Shorts*>(p), Bits);
#endif
}

inline Vector vector_at(const float* p) { return *reinterpret_cast<const Vector*>(p); }

// bfloat16 is the upper half of a float32.
inline Vector vector_at(const uint16_t* p) {
  return floats_of(widened(p) << 16);
}

inline Vector vector_at(const Float8* p) {
  const Bits bits = widened(&p->bits), size = bits & 0x7f;
  Vector value = floats_of((size << 20) + (120u << 23));
  // Without an exponent there is no hidden 1 (2^-7 here). No float32 subnormal is formed: XLA's threads flush those.
  value = size < 8 ? value + value - 0x1p-6f : value;
  value = size == 0x7f ? Vector{} + std::numeric_limits<float>::quiet_NaN() : value;
  return floats_of(bits_of(value) | (bits & 0x80) << 24);
}

inline void put(float* p, Vector value) { *reinterpret_cast<Vector*>(p) = value; }

// The first n numbers, then zeros.
template <typename Number>
inline Vector first_at(const Number* p, int64_t n) {
  Number there[kWidth] = {};
  std::memcpy(there, p, n * sizeof(Number));
  return vector_at(there);
}

inline float sum_of(Vector v) {
  float total = 0;
  for (int i = 0; i < kWidth; ++i) total += v[i];
  return total;
}

// Pieces of kSize lanes, in turns of a and of b: sums of the neighbours that a and b have there.
template <int kSize, int... kLane>
inline Vector add_neighbours(Vector a, Vector b, std::integer_sequence<int, kLane...>) {
#if defined(__clang__) || __GNUC__ >= 12
  constexpr auto from = [](int lane, int more) {
    const int of_b = lane % (2 * kSize) / kSize;
    return of_b * kWidth + lane - of_b * kSize + more * kSize;
  };
  return __builtin_shufflevector(a, b, from(kLane, 0)...) + __builtin_shufflevector(a, b, from(kLane, 1)...);
#else
  Vector sums;
  for (int lane = 0; lane < kWidth; ++lane) {
    const bool of_b = lane % (2 * kSize) / kSize;
    const int first = lane - of_b * kSize;
    sums[lane] = of_b ? b[first] + b[first + kSize] : a[first] + a[first + kSize];
  }
  return sums;
#endif
}

// Lane t is the sum of part[t]; `part` is used up.
template <int kSize = kWidth / 2>
inline Vector lane_sums(Vector* part) {
  for (int t = 0; t < kSize; ++t) {
    part[t] = add_neighbours<kSize>(part[t], part[t + kSize], std::make_integer_sequence<int, kWidth>());
  }
  if constexpr (kSize > 1) return lane_sums<kSize / 2>(part);
  return part[0];
}

// e^x for x <= 0, to two units in the last place; below -87 it is 0. NaN stays.
inline Vector exp_of(Vector x) {
  const Vector low = Vector{} - 87.0f;
  const Vector near = x < low ? low : x;
  const Vector shifted = near * 1.44269504f + 12582912.0f;  // rounds to a whole number, which lands in the lowest bits
  const Vector whole = shifted - 12582912.0f;
  const Vector r = (near - whole * 0.693145752f) - whole * 1.42860677e-6f;
  Vector y = Vector{} + 1.0f / 720;
  for (const float term : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) y = y * r + term;
  y *= floats_of((bits_of(shifted) << 23) + 0x3f800000u);
  return x < low ? Vector{} : y;
}

inline float exp_of(float x) { return exp_of(Vector{} + x)[0]; }

// Levels c - z of the codes in the lowest bits of every lane; what lies above them does not matter.
template <int kBits>
inline Vector levels(Bits lanes) {
  constexpr float z = ((1 << kBits) - 1) / 2.0f;
#if defined(__AVX512F__)
  alignas(64) static constexpr auto table = [] {
    struct Table { float at[kWidth]; } t{};
    for (int i = 0; i < kWidth; ++i) t.at[i] = float(i % (1 << kBits)) - z;
    return t;
  }();
  return (Vector)_mm512_permutexvar_ps((__m512i)lanes, _mm512_load_ps(table.at));
#else
  return __builtin_convertvector((Signed)(lanes & ((1u << kBits) - 1)), Vector) - z;
#endif
}

// What a few queries need of one block. Rows of queries, scores and sums follow each other by their strides.
struct Piece {
  const void* from;    // [tokens, width]: codes, residuals or values
  const uint8_t* end;  // of the whole array of codes
  int64_t tokens, width;
  const float* q;      // queries in the order of the codes or of the channels, padded with zeros
  int64_t q_stride;
  float* a;            // scores, or weights
  int64_t a_stride;
  float* acc;          // sums of values
  int64_t acc_stride;
};

// a = q · (c - z), q being scaled by the block. kVectors: of the bytes of a token, if known (it is faster), or 0.
template <int kBits, int kRows, int kVectors>
inline void scan_rows(const Piece& p) {
  constexpr int kPlanes = 8 / kBits;
  const auto* code = static_cast<const uint8_t*>(p.from);
  const int64_t vectors = kVectors ? kVectors : (p.width + kWidth - 1) / kWidth;
  for (int64_t first = 0; first < p.tokens; first += kWidth) {
    Vector part[kRows][kWidth];
    for (int64_t t = 0; t < kWidth; ++t) {
      // Tokens behind the end repeat the last one; so do bytes behind a row's end, where q is 0.
      const uint8_t* row = code + std::min(first + t, p.tokens - 1) * p.width;
      Vector total[kRows] = {};
      for (int64_t i = 0; i < vectors; ++i) {
        const Bits lanes = widened(row + i * kWidth);
        for (int plane = 0; plane < kPlanes; ++plane) {
          const Vector level = levels<kBits>(lanes >> (plane * kBits));
          const float* q = p.q + (i * kPlanes + plane) * kWidth;
          for (int r = 0; r < kRows; ++r) total[r] += level * vector_at(q + r * p.q_stride);
        }
      }
      for (int r = 0; r < kRows; ++r) part[r][t] = total[r];
    }
    for (int r = 0; r < kRows; ++r) put(p.a + r * p.a_stride + first, lane_sums(part[r]));
  }
}

template <int kBits, int kRows>
void scan_codes(const Piece& p) {
  const int64_t vectors = (p.width + kWidth - 1) / kWidth, read = (p.tokens - 1) * p.width + vectors * kWidth;
  Piece safe = p;
  std::vector<uint8_t> copy;
  if (p.end - static_cast<const uint8_t*>(p.from) < read) {  // the last block: vectors would reach behind the array
    copy.resize(read);
    std::memcpy(copy.data(), p.from, p.tokens * p.width);
    safe.from = copy.data();
  }
  if (vectors == 1) scan_rows<kBits, kRows, 1>(safe);
  else if (vectors == 2) scan_rows<kBits, kRows, 2>(safe);
  else scan_rows<kBits, kRows, 0>(safe);
}

// a += q · residual.
template <typename Number, int kRows>
void add_residuals(const Piece& p) {
  const auto* residual = static_cast<const Number*>(p.from);
  const int64_t rest = p.width % kWidth, even = p.width - rest;
  for (int64_t first = 0; first < p.tokens; first += kWidth) {
    Vector part[kRows][kWidth];
    for (int64_t t = 0; t < kWidth; ++t) {
      const Number* row = residual + std::min(first + t, p.tokens - 1) * p.width;
      Vector total[kRows] = {};
      for (int64_t d = 0; d < p.width; d += kWidth) {
        const Vector k = d < even ? vector_at(row + d) : first_at(row + d, rest);
        for (int r = 0; r < kRows; ++r) total[r] += k * vector_at(p.q + r * p.q_stride + d);
      }
      for (int r = 0; r < kRows; ++r) part[r][t] = total[r];
    }
    for (int r = 0; r < kRows; ++r) {
      float* a = p.a + r * p.a_stride + first;
      put(a, vector_at(a) + lane_sums(part[r]));
    }
  }
}

// acc += Σ_t a[t] v[t], kColumns vectors of columns at once.
template <typename Number, int kRows, int kColumns>
inline void add_columns(const Piece& p, int64_t column, int64_t there) {
  const auto* value = static_cast<const Number*>(p.from) + column;
  Vector total[kRows][kColumns];
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kColumns; ++c) total[r][c] = vector_at(p.acc + r * p.acc_stride + column + c * kWidth);
  }
  for (int64_t t = 0; t < p.tokens; ++t, value += p.width) {
    Vector v[kColumns];
    for (int c = 0; c < kColumns; ++c) {
      v[c] = kColumns > 1 || there >= kWidth ? vector_at(value + c * kWidth) : first_at(value, there);
    }
    for (int r = 0; r < kRows; ++r) {
      for (int c = 0; c < kColumns; ++c) total[r][c] += p.a[r * p.a_stride + t] * v[c];
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kColumns; ++c) put(p.acc + r * p.acc_stride + column + c * kWidth, total[r][c]);
  }
}

template <typename Number, int kRows>
void add_values(const Piece& p) {
  constexpr int kColumns = kWidth == 16 || kRows == 1 ? 4 : 2;
  int64_t column = 0;
  for (; column + kColumns * kWidth <= p.width; column += kColumns * kWidth) {
    add_columns<Number, kRows, kColumns>(p, column, kWidth);
  }
  for (; column < p.width; column += kWidth) add_columns<Number, kRows, 1>(p, column, p.width - column);
}

// For one, two and four queries.
using Work = void (*)(const Piece&);
template <int kBits>
constexpr Work kScan[] = {scan_codes<kBits, 1>, scan_codes<kBits, 2>, scan_codes<kBits, 4>};
template <typename Number>
constexpr Work kResiduals[] = {add_residuals<Number, 1>, add_residuals<Number, 2>, add_residuals<Number, 4>};
template <typename Number>
constexpr Work kValues[] = {add_values<Number, 1>, add_values<Number, 2>, add_values<Number, 4>};

// All queries, four at a time.
inline void for_queries(const Work* work, Piece p, int64_t queries) {
  while (queries > 0) {
    const int kind = queries >= 4 ? 2 : queries >= 2 ? 1 : 0, now = 1 << kind;
    work[kind](p);
    p.q += now * p.q_stride, p.a += now * p.a_stride;
    if (p.acc != nullptr) p.acc += now * p.acc_stride;
    queries -= now;
  }
}

}  // namespace effml::ffd

#endif  // EFFML_FFD_BLOCKS_H_
