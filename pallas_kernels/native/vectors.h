// Vectors of sixteen numbers, as the compiler maps them to the machine's.
#ifndef EFFML_VECTORS_H_
#define EFFML_VECTORS_H_

#include <cstdint>
#include <cstring>
#include <vector>

#include "pool.h"

namespace effml {

constexpr int kLanes = 16;

using Floats = float __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
using Ints = int32_t __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
using Words = uint32_t __attribute__((vector_size(4 * kLanes), aligned(1), may_alias));
using Halves = uint16_t __attribute__((vector_size(2 * kLanes), aligned(1), may_alias));

inline Floats load(const float* p) { return *reinterpret_cast<const Floats*>(p); }
inline void store(float* p, Floats value) { *reinterpret_cast<Floats*>(p) = value; }
inline float one(const float* p) { return *p; }

// bfloat16 is the upper half of a float32.
inline Floats load(const uint16_t* p) {
  const Words wide = __builtin_convertvector(*reinterpret_cast<const Halves*>(p), Words) << 16;
  return reinterpret_cast<const Floats&>(wide);
}
inline float one(const uint16_t* p) {
  const uint32_t wide = uint32_t(*p) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

inline float sum(Floats v) {
  float total = 0;
  for (int i = 0; i < kLanes; ++i) total += v[i];
  return total;
}

// Where chunk begins when `size` is cut into `chunks`.
inline int64_t edge(int64_t size, int chunks, int chunk) { return size * chunk / chunks; }

}  // namespace effml

#endif  // EFFML_VECTORS_H_
