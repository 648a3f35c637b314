// Products of rows with matrices of signs, without unpacking one of them.
//
// A few inputs have few sums of ±x: of four, sixteen, which fill one vector of AVX-512 (of three, eight, which fill one
// of AVX2). Those tables are made once per row of x. Along the columns a vector of words then holds the signs of these
// inputs for as many columns as it has lanes, and one permutation of the table looks all of them up.
//
//     y[c] = Σ_g table_g[(words[g / groups of a word, c] >> bits (g % groups of a word)) & (2^bits - 1)]
//
// A column is summed in one order, whatever the number of threads.
#include <cstring>

#include "vectors.h"
#include "xla/ffi/api/ffi.h"

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace ffi = xla::ffi;

namespace effml {
namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16, kBits = 4;
#elif defined(__AVX2__)
constexpr int kWidth = 8, kBits = 3;
#else
constexpr int kWidth = 4, kBits = 1;
#endif

constexpr int kGroups = (32 + kBits - 1) / kBits;  // of one word
constexpr int kTable = kBits == 1 ? 1 : 1 << kBits;
constexpr int64_t kChunk = 48 << 10;  // bytes of words that are worth another thread

using Lanes = float __attribute__((vector_size(4 * kWidth), aligned(4), may_alias));
using Codes = uint32_t __attribute__((vector_size(4 * kWidth), aligned(4), may_alias));

// For every lane the sum of ±x that its lowest bits choose; what lies above them does not matter.
inline Lanes look_up(const float* table, Codes codes) {
#if defined(__AVX512F__)
  return (Lanes)_mm512_permutexvar_ps((__m512i)codes, _mm512_loadu_ps(table));
#elif defined(__AVX2__)
  return (Lanes)_mm256_permutevar8x32_ps(_mm256_loadu_ps(table), (__m256i)codes);
#else
  uint32_t x;
  std::memcpy(&x, table, 4);
  return (Lanes)(codes << 31 ^ x);
#endif
}

struct Product {
  const float* tables;    // [words, groups, rows, 2^bits]
  const uint32_t* words;  // [depth, columns]
  float* y;               // [rows, stride]
  int64_t depth, columns, stride;
  int chunks;
};

// The sums of kRows rows for kAcross vectors of columns; of the last vector only `there` lanes exist.
template <int kRows, int kAcross, bool kWhole>
inline void sums(const Product& p, int64_t column, int there) {
  Lanes total[kRows][kAcross] = {};
  const float* table = p.tables;
  const uint32_t* words = p.words + column;
  for (int64_t i = 0; i < p.depth; ++i, words += p.columns) {
    Codes codes[kAcross] = {};
    for (int k = 0; k < kAcross; ++k) {
      if constexpr (kWhole) codes[k] = *reinterpret_cast<const Codes*>(words + k * kWidth);
      else std::memcpy(&codes[k], words + k * kWidth, 4 * there);
    }
    for (int g = 0; g < kGroups; ++g, table += kRows * kTable) {
      for (int k = 0; k < kAcross; ++k) {
        for (int r = 0; r < kRows; ++r) total[r][k] += look_up(table + r * kTable, codes[k]);
        codes[k] >>= kBits;
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int k = 0; k < kAcross; ++k) {
      std::memcpy(p.y + r * p.stride + column + k * kWidth, &total[r][k], kWhole ? 4 * kWidth : 4 * there);
    }
  }
}

template <int kRows>
void columns_of_chunk(void* context, int chunk) {
  const auto& p = *static_cast<Product*>(context);
  const int64_t vectors = (p.columns + kWidth - 1) / kWidth;
  const int64_t last = std::min(p.columns, edge(vectors, p.chunks, chunk + 1) * kWidth);
  int64_t c = edge(vectors, p.chunks, chunk) * kWidth;
  constexpr int kAcross = kWidth == 16 ? (kRows == 1 ? 8 : 4) : kRows == 4 ? 2 : 4;
  for (; c + kAcross * kWidth <= last; c += kAcross * kWidth) sums<kRows, kAcross, true>(p, c, kWidth);
  if constexpr (kAcross > 2) {
    for (; c + 2 * kWidth <= last; c += 2 * kWidth) sums<kRows, 2, true>(p, c, kWidth);
  }
  for (; c + kWidth <= last; c += kWidth) sums<kRows, 1, true>(p, c, kWidth);
  if (c < last) sums<kRows, 1, false>(p, c, int(last - c));
}

// All sums of ±x of `kBits` inputs; behind the last input x is zero.
inline void fill(float* table, const float* x, int count) {
  if constexpr (kBits == 1) {
    table[0] = count > 0 ? x[0] : 0.0f;
  } else {
    Lanes total = {};
    for (int b = 0; b < kBits; ++b) {
      const float value = b < count ? x[b] : 0.0f;
      Lanes sign;
      for (int i = 0; i < kWidth; ++i) sign[i] = i >> b & 1 ? -1.0f : 1.0f;
      total += sign * value;
    }
    std::memcpy(table, &total, sizeof(total));
  }
}

struct Scratch {
  std::vector<float> tables, middle;
};

template <int kRows>
void multiply(const float* x, int64_t inputs, int64_t x_stride, Product p, std::vector<float>& tables) {
  const int64_t size = p.depth * kGroups * kRows * kTable;
  if (int64_t(tables.size()) < size) tables.resize(size);
  for (int64_t i = 0; i < p.depth; ++i) {
    for (int g = 0; g < kGroups; ++g) {
      const int first = g * kBits;
      const int64_t at = 32 * i + first;
      const int count = int(std::clamp<int64_t>(std::min<int64_t>(inputs - at, 32 - first), 0, kBits));
      float* table = tables.data() + (i * kGroups + g) * kRows * kTable;
      for (int r = 0; r < kRows; ++r) fill(table + r * kTable, x + r * x_stride + at, count);
    }
  }
  p.tables = tables.data();
  const int64_t vectors = (p.columns + kWidth - 1) / kWidth;
  p.chunks = int(std::min<int64_t>({std::max<int64_t>(1, 4 * p.depth * p.columns * kRows / kChunk), 256, vectors}));
  Pool::get().run(p.chunks, columns_of_chunk<kRows>, &p);
}

void multiply_rows(const float* x, int64_t rows, int64_t inputs, const uint32_t* words, int64_t columns, float* y,
                   std::vector<float>& tables) {
  const int64_t depth = (inputs + 31) / 32;
  while (rows > 0) {
    const int now = rows >= 4 ? 4 : rows >= 2 ? 2 : 1;
    const Product p{nullptr, words, y, depth, columns, columns, 1};
    if (now == 4) multiply<4>(x, inputs, inputs, p, tables);
    else if (now == 2) multiply<2>(x, inputs, inputs, p, tables);
    else multiply<1>(x, inputs, inputs, p, tables);
    x += now * inputs;
    y += now * columns;
    rows -= now;
  }
}

ffi::Error sign_products(ffi::Buffer<ffi::F32> x, ffi::RemainingArgs matrices, ffi::ResultBuffer<ffi::F32> y) {
  static thread_local Scratch scratch;
  const auto in = x.dimensions(), out = y->dimensions();
  if (in.size() != 2 || out.size() != 2 || in[0] != out[0] || matrices.size() < 1 || matrices.size() > 2) {
    return ffi::Error::InvalidArgument("sign_products: ranks");
  }
  const int64_t rows = in[0];
  int64_t inputs = in[1];
  const float* from = x.typed_data();
  for (size_t i = 0; i < matrices.size(); ++i) {
    auto words = matrices.get<ffi::Buffer<ffi::U32>>(i);
    if (!words.has_value()) return ffi::Error::InvalidArgument("sign_products: words are not uint32");
    const auto shape = words->dimensions();
    const bool last = i + 1 == matrices.size();
    if (shape.size() != 2 || shape[0] != (inputs + 31) / 32 || (last && shape[1] != out[1])) {
      return ffi::Error::InvalidArgument("sign_products: shapes do not fit");
    }
    float* to = y->typed_data();
    if (!last) {
      if (int64_t(scratch.middle.size()) < rows * shape[1]) scratch.middle.resize(rows * shape[1]);
      to = scratch.middle.data();
    }
    multiply_rows(from, rows, inputs, words->typed_data(), shape[1], to, scratch.tables);
    from = to;
    inputs = shape[1];
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace effml

// Whether sums are looked up in tables; without that the code is right and slow.
extern "C" int effml_sign_tables() { return effml::kBits > 1; }

XLA_FFI_DEFINE_HANDLER_SYMBOL(effml_sign_products, effml::sign_products,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::F32>>());
