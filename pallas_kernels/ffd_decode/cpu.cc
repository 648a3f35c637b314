// Attention of a few queries to a cache of low-bit keys: scans the codes, and reads residuals and values of the blocks
// that reach the threshold.
//
// A chunk of the work is some blocks of one KV head, with a partial softmax of its own; the chunks of a head are merged
// in order. How it is cut does not depend on the number of threads, so neither do the bits.
#include "blocks.h"
#include "pool.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace effml::ffd {
namespace {

constexpr int64_t kChunks = 64;       // in all, if there are that many
constexpr int64_t kLeastKeys = 1024;  // of a chunk

int64_t padded(int64_t n) { return (n + kWidth - 1) / kWidth * kWidth; }

struct Call {
  const uint8_t* code;
  const float* scale;
  const uint8_t* resid;
  const uint8_t* v;
  const int32_t* num_blocks;
  const float* threshold;  // [B, H, R]
  bool* kept;              // [B, H, NB]
  float* top;              // [B, H, R], of the probes
  int64_t batch, heads, rows, dim, blocks, block, bytes, value_dim;
  int64_t resid_size, value_size;  // bytes of a number
  int bits;
  bool certified, with_residual, all_blocks;
  float per_scale, constant;
  const Work *scan, *residuals, *values;
  std::vector<float> channels;  // [B * H, R, padded(D)], the queries
  std::vector<float> planes;    // [B * H, R, planes], the queries as the codes come: a vector of bytes, plane by plane
  int64_t plane_stride, chunks_of_head, blocks_of_chunk;
  std::vector<float> m, total;  // [chunks, R]
  std::vector<float> acc;       // [chunks, R, padded(Dv)]

  // Where the code of a channel stands in the order of the codes.
  int64_t place(int64_t channel) const {
    const int64_t of_byte = 8 / bits, byte = channel / of_byte;
    return (byte / kWidth * of_byte + channel % of_byte) * kWidth + byte % kWidth;
  }

  void take_queries(const float* q) {
    const int64_t stride = padded(dim);
    plane_stride = padded(bytes) * (8 / bits);
    channels.assign(batch * heads * rows * stride, 0.0f);
    planes.assign(batch * heads * rows * plane_stride, 0.0f);
    for (int64_t r = 0; r < batch * heads * rows; ++r) {
      std::memcpy(channels.data() + r * stride, q + r * dim, sizeof(float) * dim);
      for (int64_t d = 0; d < dim; ++d) planes[r * plane_stride + place(d)] = q[r * dim + d];
    }
  }
};

// A thread's memory for the block at hand.
struct Scratch {
  std::vector<float> scale, qs, a, error;

  explicit Scratch(const Call& c)
      : scale(c.plane_stride), qs(c.rows * c.plane_stride), a(c.rows * padded(c.block)), error(c.rows) {}
};

// Scan scores of block n of head bh, and their error bounds.
void scan(const Call& c, Scratch& s, int64_t bh, int64_t n) {
  const float* scale = c.scale + (bh * c.blocks + n) * c.dim;
  for (int64_t d = 0; d < c.dim; ++d) s.scale[c.place(d)] = scale[d];
  for (int64_t r = 0; r < c.rows; ++r) {
    const float* q = c.planes.data() + (bh * c.rows + r) * c.plane_stride;
    Vector error = {};
    for (int64_t i = 0; i < c.plane_stride; i += kWidth) {
      const Vector x = vector_at(q + i), by = vector_at(s.scale.data() + i);
      put(s.qs.data() + r * c.plane_stride + i, x * by);
      if (c.certified) error += (x < 0 ? -x : x) * (by * c.per_scale + c.constant);
    }
    s.error[r] = sum_of(error);
  }
  const int64_t keys = c.batch * c.heads * c.blocks * c.block;
  const uint8_t* code = c.code + (bh * c.blocks + n) * c.block * c.bytes;
  Piece piece = {code, c.code + keys * c.bytes, c.block, c.bytes};
  piece.q = s.qs.data(), piece.q_stride = c.plane_stride, piece.a = s.a.data(), piece.a_stride = padded(c.block);
  for_queries(c.scan, piece, c.rows);
}

void add_residual(const Call& c, Scratch& s, int64_t bh, int64_t n) {
  Piece piece = {c.resid + (bh * c.blocks + n) * c.block * c.dim * c.resid_size, nullptr, c.block, c.dim};
  piece.q_stride = padded(c.dim), piece.q = c.channels.data() + bh * c.rows * piece.q_stride;
  piece.a = s.a.data(), piece.a_stride = padded(c.block);
  for_queries(c.residuals, piece, c.rows);
}

// Whether a score reaches the threshold for any of the queries; one that is no number does.
bool keeps(const Call& c, const Scratch& s, int64_t bh) {
  for (int64_t r = 0; r < c.rows; ++r) {
    const float* a = s.a.data() + r * padded(c.block);
    const float threshold = c.threshold[bh * c.rows + r];
    int reached = 0;
    for (int64_t t = 0; t < c.block; ++t) reached |= !(a[t] + s.error[r] < threshold);
    if (reached) return true;
  }
  return false;
}

// Folds the scores of a block into the partial softmax of a chunk.
void fold(Call& c, Scratch& s, int64_t bh, int64_t n, int64_t chunk) {
  const int64_t stride = padded(c.block), width = padded(c.value_dim);
  float* acc = c.acc.data() + chunk * c.rows * width;
  for (int64_t r = 0; r < c.rows; ++r) {
    float* a = s.a.data() + r * stride;
    for (int64_t t = c.block; t < stride; ++t) a[t] = kLowest;
    Vector most = Vector{} + kLowest;
    for (int64_t t = 0; t < stride; t += kWidth) most = vector_at(a + t) > most ? vector_at(a + t) : most;
    float& m = c.m[chunk * c.rows + r];
    float now = m;
    for (int i = 0; i < kWidth; ++i) now = most[i] > now ? most[i] : now;
    const float base = now == kLowest ? 0.0f : now;  // -inf minus -inf is never formed
    Vector weights = {};
    for (int64_t t = 0; t < stride; t += kWidth) {
      const Vector p = exp_of(vector_at(a + t) - base);
      put(a + t, p);
      weights += p;
    }
    const float shrink = m == kLowest ? 0.0f : exp_of(m - base);
    float& total = c.total[chunk * c.rows + r];
    total = total * shrink + sum_of(weights);
    for (int64_t i = 0; i < width; i += kWidth) put(acc + r * width + i, vector_at(acc + r * width + i) * shrink);
    m = now;
  }
  Piece piece = {c.v + (bh * c.blocks + n) * c.block * c.value_dim * c.value_size, nullptr, c.block, c.value_dim};
  piece.a = s.a.data(), piece.a_stride = stride, piece.acc = acc, piece.acc_stride = width;
  for_queries(c.values, piece, c.rows);
}

void attend_chunk(void* context, int chunk) {
  auto& c = *static_cast<Call*>(context);
  Scratch s(c);
  const int64_t bh = chunk / c.chunks_of_head, first = chunk % c.chunks_of_head * c.blocks_of_chunk;
  const int64_t last = std::min({first + c.blocks_of_chunk, c.blocks, int64_t(c.num_blocks[bh / c.heads])});
  for (int64_t n = first; n < last; ++n) {
    scan(c, s, bh, n);
    if (!keeps(c, s, bh)) continue;
    c.kept[bh * c.blocks + n] = true;
    add_residual(c, s, bh, n);
    fold(c, s, bh, n, chunk);
  }
}

// The largest score of the first and the last block, or of all of them.
void probe_head(void* context, int chunk) {
  auto& c = *static_cast<Call*>(context);
  Scratch s(c);
  const int64_t bh = chunk, count = c.num_blocks[bh / c.heads];
  float* top = c.top + bh * c.rows;
  std::fill(top, top + c.rows, kLowest);
  for (int64_t n = 0; n < count; n += c.all_blocks ? 1 : std::max<int64_t>(1, count - 1)) {
    scan(c, s, bh, n);
    if (c.with_residual) add_residual(c, s, bh, n);
    for (int64_t r = 0; r < c.rows; ++r) {
      for (int64_t t = 0; t < c.block; ++t) {
        const float score = s.a[r * padded(c.block) + t] - s.error[r];
        if (!(score <= top[r])) top[r] = score;  // one that is no number stays
        if (top[r] != top[r]) break;
      }
    }
  }
}

using Floats32 = ffi::Buffer<ffi::F32>;

// Sizes and kernels of a call; an error if the arrays don't fit together.
ffi::Error describe(Call& c, Floats32 q, ffi::Buffer<ffi::U8> code, Floats32 scale, ffi::AnyBuffer resid,
                    ffi::Buffer<ffi::S32> num_blocks, int32_t bits, bool certified, float per_scale, float constant) {
  const auto of_q = q.dimensions(), of_code = code.dimensions(), of_scale = scale.dimensions();
  if (of_q.size() != 4 || of_code.size() != 4 || of_scale.size() != 4 || (bits != 2 && bits != 4)) {
    return ffi::Error::InvalidArgument("ffd_decode: ranks or bits");
  }
  c.batch = of_q[0], c.heads = of_q[1], c.rows = of_q[2], c.dim = of_q[3];
  c.blocks = of_scale[2], c.bytes = of_code[3], c.bits = bits;
  c.block = c.blocks ? of_code[2] / c.blocks : 0;
  const int64_t keys = c.batch * c.heads * c.blocks * c.block;
  if (int64_t(code.element_count()) != keys * c.bytes || c.bytes != (c.dim * bits + 7) / 8 ||
      int64_t(scale.element_count()) != c.batch * c.heads * c.blocks * c.dim || of_scale[3] != c.dim ||
      int64_t(resid.element_count()) != keys * c.dim || int64_t(num_blocks.element_count()) != c.batch) {
    return ffi::Error::InvalidArgument("ffd_decode: shapes do not fit");
  }
  c.code = code.typed_data(), c.scale = scale.typed_data(), c.num_blocks = num_blocks.typed_data();
  c.resid = static_cast<const uint8_t*>(resid.untyped_data());
  c.certified = certified, c.per_scale = per_scale, c.constant = constant;
  c.scan = bits == 2 ? kScan<2> : kScan<4>;
  if (resid.element_type() == ffi::F32) c.residuals = kResiduals<float>, c.resid_size = 4;
  else if (resid.element_type() == ffi::BF16) c.residuals = kResiduals<uint16_t>, c.resid_size = 2;
  else if (resid.element_type() == ffi::F8E4M3FN) c.residuals = kResiduals<Float8>, c.resid_size = 1;
  else return ffi::Error::InvalidArgument("ffd_decode: residuals must be float32, bfloat16 or float8_e4m3fn");
  c.take_queries(q.typed_data());
  return ffi::Error::Success();
}

// m, total and acc of every head from those of its chunks.
void merge(const Call& c, float* m, float* total, float* acc) {
  const int64_t width = padded(c.value_dim);
  for (int64_t at = 0; at < c.batch * c.heads * c.rows; ++at) {
    const int64_t bh = at / c.rows, r = at % c.rows, first = bh * c.chunks_of_head;
    float top = kLowest, sums = 0;
    for (int64_t i = 0; i < c.chunks_of_head; ++i) top = std::max(top, c.m[(first + i) * c.rows + r]);
    float* out = acc + at * c.value_dim;
    std::fill(out, out + c.value_dim, 0.0f);
    for (int64_t i = 0; i < c.chunks_of_head; ++i) {
      const int64_t from = (first + i) * c.rows + r;
      if (c.total[from] == 0) continue;  // nothing was kept
      const float weight = top == kLowest ? 1.0f : exp_of(c.m[from] - top);
      sums += weight * c.total[from];
      for (int64_t d = 0; d < c.value_dim; ++d) out[d] += weight * c.acc[from * width + d];
    }
    m[at] = top, total[at] = sums;
  }
}

ffi::Error attend(Floats32 q, ffi::Buffer<ffi::U8> code, Floats32 scale, ffi::AnyBuffer resid, ffi::AnyBuffer v,
                  ffi::Buffer<ffi::S32> num_blocks, Floats32 threshold, int32_t bits, bool certified, float per_scale,
                  float constant, ffi::ResultBuffer<ffi::F32> m, ffi::ResultBuffer<ffi::F32> total,
                  ffi::ResultBuffer<ffi::F32> acc, ffi::ResultBuffer<ffi::PRED> kept) {
  Call c = {};
  const ffi::Error wrong = describe(c, q, code, scale, resid, num_blocks, bits, certified, per_scale, constant);
  if (wrong.failure()) return wrong;
  c.value_dim = acc->dimensions().back();
  const int64_t heads = c.batch * c.heads, queries = heads * c.rows;
  if (int64_t(v.element_count()) != heads * c.blocks * c.block * c.value_dim ||
      int64_t(threshold.element_count()) != queries || int64_t(m->element_count()) != queries ||
      int64_t(total->element_count()) != queries || int64_t(acc->element_count()) != queries * c.value_dim ||
      int64_t(kept->element_count()) != heads * c.blocks) {
    return ffi::Error::InvalidArgument("ffd_decode: shapes do not fit");
  }
  if (v.element_type() == ffi::F32) c.values = kValues<float>, c.value_size = 4;
  else if (v.element_type() == ffi::BF16) c.values = kValues<uint16_t>, c.value_size = 2;
  else return ffi::Error::InvalidArgument("ffd_decode: values must be float32 or bfloat16");
  c.v = static_cast<const uint8_t*>(v.untyped_data());
  c.threshold = threshold.typed_data(), c.kept = kept->typed_data();
  std::fill(c.kept, c.kept + heads * c.blocks, false);
  const int64_t most = std::max<int64_t>(1, c.blocks * c.block / kLeastKeys);
  const int64_t wanted = std::min({(kChunks + heads - 1) / heads, c.blocks, most});
  c.blocks_of_chunk = (c.blocks + wanted - 1) / wanted;
  c.chunks_of_head = (c.blocks + c.blocks_of_chunk - 1) / c.blocks_of_chunk;
  const int64_t chunks = heads * c.chunks_of_head;
  c.m.assign(chunks * c.rows, kLowest), c.total.assign(chunks * c.rows, 0.0f);
  c.acc.assign(chunks * c.rows * padded(c.value_dim), 0.0f);
  Pool::get().run(int(chunks), attend_chunk, &c);
  merge(c, m->typed_data(), total->typed_data(), acc->typed_data());
  return ffi::Error::Success();
}

ffi::Error probe(Floats32 q, ffi::Buffer<ffi::U8> code, Floats32 scale, ffi::AnyBuffer resid,
                 ffi::Buffer<ffi::S32> num_blocks, int32_t bits, bool certified, float per_scale, float constant,
                 bool with_residual, bool all_blocks, ffi::ResultBuffer<ffi::F32> top) {
  Call c = {};
  const ffi::Error wrong = describe(c, q, code, scale, resid, num_blocks, bits, certified, per_scale, constant);
  if (wrong.failure()) return wrong;
  c.top = top->typed_data(), c.with_residual = with_residual, c.all_blocks = all_blocks;
  if (int64_t(top->element_count()) != c.batch * c.heads * c.rows) {
    return ffi::Error::InvalidArgument("ffd_decode: shapes do not fit");
  }
  Pool::get().run(int(c.batch * c.heads), probe_head, &c);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace effml::ffd

XLA_FFI_DEFINE_HANDLER_SYMBOL(effml_ffd_attend, effml::ffd::attend,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Attr<int32_t>("bits")
                                  .Attr<bool>("certified")
                                  .Attr<float>("per_scale")
                                  .Attr<float>("constant")
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::PRED>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(effml_ffd_probe, effml::ffd::probe,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Attr<int32_t>("bits")
                                  .Attr<bool>("certified")
                                  .Attr<float>("per_scale")
                                  .Attr<float>("constant")
                                  .Attr<bool>("with_residual")
                                  .Attr<bool>("all_blocks")
                                  .Ret<ffi::Buffer<ffi::F32>>());
