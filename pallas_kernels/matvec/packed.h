// Products with weights of 2 to 8 bits, decoded on their way from memory to the multiplier.
//
// Eight consecutive codes along the inputs fill `bits` bytes, as a little-endian integer. Up to 4 bits these are one
// 32-bit lane of a vector, above it four codes are: the j-th code of all sixteen lanes comes by one shift, and its value
// by one look-up or mask. The inputs are put in the order in which the codes come once per product.
#ifndef EFFML_PACKED_H_
#define EFFML_PACKED_H_

#include "vectors.h"

#if defined(__AVX512F__) && defined(__AVX512BW__)
#include <immintrin.h>
#define EFFML_AVX512 1
#endif

namespace effml {

// Codes per lane, and inputs of one vector of lanes.
constexpr int codes_of_lane(int bits) { return bits <= 4 ? 8 : 4; }
constexpr int span_of(int bits) { return codes_of_lane(bits) * kLanes; }

struct Packed {
  const float* x;      // [rows, inputs]
  const float* order;  // [rows, spans, codes, lanes]: x as the codes come, 0 behind the end
  const int32_t* lane_groups;  // [spans, lanes]: the group of every lane, counted from that of the first
  const uint8_t* codes;
  const float* scale;  // [outputs, groups]
  float* y;            // [rows, outputs]
  int64_t rows, inputs, outputs, groups, group, row_bytes, spans;
  int chunks;
};

template <int kBits>
inline Words load_lanes(const uint8_t* p) {
  if constexpr (kBits == 4 || kBits == 8) {
    return *reinterpret_cast<const Words*>(p);
  } else if constexpr (kBits == 2) {
    return __builtin_convertvector(*reinterpret_cast<const Halves*>(p), Words);
  } else if constexpr (kBits > 4) {
    Words lanes;
    for (int i = 0; i < kLanes; ++i) {
      uint32_t word;
      std::memcpy(&word, p + i * kBits / 2, 4);
      lanes[i] = word >> (i % 2 * kBits % 2 * 4);
    }
    return lanes;
  } else {
#ifdef EFFML_AVX512
    const __m512i bytes = _mm512_maskz_loadu_epi32(0x0fff, p);
    const __m512i quarters = _mm512_setr_epi32(0, 1, 2, 0, 3, 4, 5, 0, 6, 7, 8, 0, 9, 10, 11, 0);
    const __m512i triples = _mm512_broadcast_i32x4(
        _mm_setr_epi8(0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1));
    return (Words)_mm512_shuffle_epi8(_mm512_permutexvar_epi32(quarters, bytes), triples);
#else
    Words lanes;
    for (int i = 0; i < kLanes; ++i) {
      lanes[i] = uint32_t(p[3 * i]) | uint32_t(p[3 * i + 1]) << 8 | uint32_t(p[3 * i + 2]) << 16;
    }
    return lanes;
#endif
  }
}

// The values of the codes in the lowest bits of every lane; what lies above them does not matter.
template <int kBits>
inline Floats values(Words lanes) {
#ifdef EFFML_AVX512
  if constexpr (kBits <= 4) {
    alignas(64) static constexpr auto table = [] {
      struct Table { float at[kLanes]; } t{};
      for (int i = 0; i < kLanes; ++i) t.at[i] = float(i % (1 << kBits) - (1 << (kBits - 1)));
      return t;
    }();
    return (Floats)_mm512_permutexvar_ps((__m512i)lanes, _mm512_load_ps(table.at));
  }
#endif
  return __builtin_convertvector((Ints)(lanes & ((1u << kBits) - 1)), Floats) - float(1 << (kBits - 1));
}

// The factor of every lane of a span, for groups of whole lanes: at most sixteen groups, that follow each other.
inline Floats lane_scales(const Packed& p, const float* scale, int64_t span, int64_t first) {
  const int32_t* group = p.lane_groups + span * kLanes;
#ifdef EFFML_AVX512
  const int64_t there = std::min<int64_t>(kLanes, p.groups - first);
  const __m512 near = _mm512_maskz_loadu_ps(__mmask16((1u << there) - 1), scale + first);
  return (Floats)_mm512_permutexvar_ps(_mm512_loadu_si512(group), near);
#else
  Floats factors;
  for (int i = 0; i < kLanes; ++i) factors[i] = scale[first + group[i]];
  return factors;
#endif
}

template <int kBits, int kRows>
inline void packed_output(const Packed& p, int64_t n, int64_t first_row) {
  const uint8_t* row = p.codes + n * p.row_bytes;
  const float* scale = p.scale + n * p.groups;
  constexpr int kCodes = codes_of_lane(kBits), kSpan = span_of(kBits), bytes = kBits * kSpan / 8;
  constexpr int reach = bytes + 4;  // a load may read a little more than it uses
  Floats total[kRows] = {};
  for (int64_t span = 0; span < p.spans; ++span) {
    const uint8_t* from = row + span * bytes;
    uint8_t rest[reach] = {};
    if (span * bytes + reach > p.row_bytes) {
      std::memcpy(rest, from, std::min<int64_t>(bytes, p.row_bytes - span * bytes));
      from = rest;
    }
    const Words lanes = load_lanes<kBits>(from);
    Floats even[kRows] = {}, odd[kRows] = {};
    for (int j = 0; j < kCodes; j += 2) {
      const Floats w = values<kBits>(lanes >> (j * kBits)), v = values<kBits>(lanes >> ((j + 1) * kBits));
      for (int r = 0; r < kRows; ++r) {
        const float* x = p.order + ((first_row + r) * p.spans + span) * kSpan + j * kLanes;
        even[r] += load(x) * w;
        odd[r] += load(x + kLanes) * v;
      }
    }
    if (p.groups == 1) {
      for (int r = 0; r < kRows; ++r) total[r] += even[r] + odd[r];
    } else {
      const Floats factors = lane_scales(p, scale, span, span * kSpan / p.group);
      for (int r = 0; r < kRows; ++r) total[r] += (even[r] + odd[r]) * factors;
    }
  }
  for (int r = 0; r < kRows; ++r) {
    p.y[(first_row + r) * p.outputs + n] = sum(total[r]) * (p.groups == 1 ? scale[0] : 1.0f);
  }
}

// Any group, one number after the other.
template <int kBits>
inline void plain_output(const Packed& p, int64_t n) {
  const uint8_t* row = p.codes + n * p.row_bytes;
  const float* scale = p.scale + n * p.groups;
  for (int64_t r = 0; r < p.rows; ++r) {
    const float* x = p.x + r * p.inputs;
    float total = 0;
    for (int64_t g = 0; g < p.groups; ++g) {
      const int64_t end = std::min(p.inputs, (g + 1) * p.group);
      float part = 0;
      for (int64_t i = g * p.group; i < end; ++i) {
        const int64_t bit = i * kBits;
        const uint32_t pair = row[bit / 8] | (bit % 8 + kBits > 8 ? uint32_t(row[bit / 8 + 1]) << 8 : 0);
        part += x[i] * float(int(pair >> (bit % 8) & ((1 << kBits) - 1)) - (1 << (kBits - 1)));
      }
      total += part * scale[g];
    }
    p.y[r * p.outputs + n] = total;
  }
}

template <int kBits>
void packed_chunk(void* context, int chunk) {
  const auto& p = *static_cast<Packed*>(context);
  const int64_t first = edge(p.outputs, p.chunks, chunk), last = edge(p.outputs, p.chunks, chunk + 1);
  for (int64_t n = first; n < last; ++n) {
    if (p.order == nullptr) {
      plain_output<kBits>(p, n);
      continue;
    }
    int64_t r = 0;
    for (; r + 4 <= p.rows; r += 4) packed_output<kBits, 4>(p, n, r);
    for (; r < p.rows; ++r) packed_output<kBits, 1>(p, n, r);
  }
}

inline void packed_product(Packed p, int bits, std::vector<float>& scratch) {
  const int codes = codes_of_lane(bits), span = span_of(bits);
  std::vector<int32_t> groups;
  p.spans = (p.inputs + span - 1) / span;
  if (p.groups == 1 || p.group % codes == 0) {
    scratch.assign(p.rows * p.spans * span, 0.0f);
    for (int64_t r = 0; r < p.rows; ++r) {
      for (int64_t i = 0; i < p.inputs; ++i) {
        const int64_t lane = i / codes % kLanes;
        scratch[(r * p.spans + i / span) * span + i % codes * kLanes + lane] = p.x[r * p.inputs + i];
      }
    }
    p.order = scratch.data();
    for (int64_t lane = 0; p.groups > 1 && lane < p.spans * kLanes; ++lane) {
      const int64_t last = p.groups - 1, first = lane / kLanes * span / p.group;
      groups.push_back(int32_t(std::min(last, lane * codes / p.group) - std::min(last, first)));
    }
    p.lane_groups = groups.data();
  }
  p.chunks = int(std::min<int64_t>({std::max<int64_t>(1, p.outputs * p.row_bytes >> 14), 256, p.outputs}));
  void (*const work[])(void*, int) = {packed_chunk<2>, packed_chunk<3>, packed_chunk<4>, packed_chunk<5>,
                                      packed_chunk<6>, packed_chunk<7>, packed_chunk<8>};
  Pool::get().run(p.chunks, work[bits - 2], &p);
}

}  // namespace effml

#endif  // EFFML_PACKED_H_
