// SPDX-License-Identifier: Apache-2.0
// Schemas and the CPU kernels. Sums run in the order of the CUDA kernels (32 lanes of 16 dims, then
// a butterfly), so the two differ only by the approximate reciprocal square root of the GPU.
#include <torch/csrc/stable/library.h>

#include <cmath>
#include <cstring>

#include "numerics.h"
#include "validation.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define QOUT_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define QOUT_CLONES
#endif

namespace qout {

bool set_debug(bool enabled);

namespace {

constexpr int kLanes = 32;
constexpr int kLaneDims = 16;
constexpr int kPairs = 32;

QOUT_INLINE float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

QOUT_INLINE uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

QOUT_INLINE float bf16_to_float(uint16_t value) { return from_bits(static_cast<uint32_t>(value) << 16); }

QOUT_INLINE uint16_t float_to_bf16(float value) {
  const uint32_t bits = to_bits(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : rounded);
}

// Nearest-even e4m3fn of a value within +-448; NaN becomes -448, as max and min drop it.
QOUT_INLINE uint8_t float_to_e4m3(float value) {
  value = value > -kFp8Max ? value : -kFp8Max;
  value = value < kFp8Max ? value : kFp8Max;
  const uint32_t sign = (to_bits(value) >> 24) & 0x80u;
  const uint32_t magnitude = to_bits(value) & 0x7fffffffu;
  const uint32_t normal = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
  // Adding 2^14, whose last bit is worth 2^-9, rounds a subnormal to its multiple of 2^-9.
  const uint32_t subnormal = to_bits(from_bits(magnitude) + 16384.0f) - to_bits(16384.0f);
  return static_cast<uint8_t>(sign | (magnitude < 0x3c800000u ? subnormal : normal));
}

// Rotates the 32 interleaved pairs of the last 64 dims in place.
QOUT_INLINE void rotate(float* rope, const float* cos_sin) {
  for (int pair = 0; pair < kPairs; ++pair) {
    const float even = rope[2 * pair];
    const float odd = rope[2 * pair + 1];
    const float cosine = cos_sin[pair];
    const float sine = cos_sin[kPairs + pair];
    rope[2 * pair] = std::fma(even, cosine, -(odd * sine));
    rope[2 * pair + 1] = std::fma(even, sine, odd * cosine);
  }
}

QOUT_INLINE float reciprocal_rms(const float* values, float eps) {
  float lane_sums[kLanes] = {};
  for (int dim = 0; dim < kLaneDims; ++dim)
    for (int lane = 0; lane < kLanes; ++lane) {
      const float value = values[lane * kLaneDims + dim];
      lane_sums[lane] = std::fma(value, value, lane_sums[lane]);
    }
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) lane_sums[lane] += lane_sums[lane + half];
  const float argument = std::fma(lane_sums[0], 1.0f / kHeadDim, eps);
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(argument)));
}

QOUT_CLONES void query_rows(const Problem& p) {
  float values[kHeadDim];
  for (int64_t row = 0; row < p.rows; ++row) {
    const float* cos_sin = p.cos_sin + p.position_ids[row] * kRopeDim;
    const uint16_t* in = p.q_in + row * p.heads * kHeadDim;
    uint16_t* out = p.q_out + row * p.padded_heads * kHeadDim;
    for (int64_t head = 0; head < p.heads; ++head, in += kHeadDim, out += kHeadDim) {
      for (int dim = 0; dim < kHeadDim; ++dim) values[dim] = bf16_to_float(in[dim]);
      const float scale = p.apply_q_norm ? reciprocal_rms(values, p.eps) : 1.0f;
      for (int dim = 0; dim < kHeadDim; ++dim) values[dim] *= scale;
      rotate(values + kNopeDim, cos_sin);
      for (int dim = 0; dim < kHeadDim; ++dim) out[dim] = float_to_bf16(values[dim]);
    }
    std::memset(out, 0, static_cast<size_t>((p.padded_heads - p.heads) * kHeadDim) * sizeof *out);
  }
}

QOUT_INLINE uint8_t quantize_group(const float* values, uint8_t* out) {
  float amax = kAmaxFloor;
  for (int dim = 0; dim < kGroupDim; ++dim) {
    const float magnitude = std::fabs(values[dim]);
    amax = magnitude > amax ? magnitude : amax;
  }
  const uint32_t byte = scale_byte(to_bits(amax));
  const float inverse = from_bits(inverse_scale_bits(byte));
  for (int dim = 0; dim < kGroupDim; ++dim) out[dim] = float_to_e4m3(values[dim] * inverse);
  return static_cast<uint8_t>(byte);
}

QOUT_CLONES void context_rows(const Problem& p) {
  float values[kHeadDim];
  uint16_t rounded[kRopeDim];
  for (int64_t row = 0; row < p.inserts; ++row) {
    const int64_t slot = p.slot_mapping[row];
    if (slot < 0) continue;
    const int64_t place = slot % p.block_size;
    uint8_t* block = p.k_cache + slot / p.block_size * p.block_stride;
    uint8_t* data = block + place * kTokenDataBytes;
    uint8_t* scales = block + p.block_size * kTokenDataBytes + place * kTokenScaleBytes;

    const uint16_t* in = p.kv + row * kHeadDim;
    for (int dim = 0; dim < kHeadDim; ++dim) values[dim] = bf16_to_float(in[dim]);
    rotate(values + kNopeDim, p.cos_sin + p.position_ids[row] * kRopeDim);
    for (int group = 0; group < kNopeDim / kGroupDim; ++group)
      scales[group] = quantize_group(values + group * kGroupDim, data + group * kGroupDim);
    scales[kTokenScaleBytes - 1] = 0;
    for (int dim = 0; dim < kRopeDim; ++dim) rounded[dim] = float_to_bf16(values[kNopeDim + dim]);
    std::memcpy(data + kNopeDim, rounded, sizeof rounded);
  }
}

void check_host_values(const Problem& p) {
  check_values(p.slot_mapping, p.inserts, p.blocks * p.block_size, p.position_ids, p.rows, p.max_position);
}

void run_on_cpu(const Problem& p) {
  check_host_values(p);
  if (p.q_in) query_rows(p);
  context_rows(p);
}

// Reached by CUDA tensors only when no CUDA library registered itself; other devices fail the checks.
void run_without_backend(const Problem& p) {
  STD_TORCH_CHECK(false, "k_cache: got device cuda:", p.device_index,
                  "; needs a device with an implementation: load libvllm_qout_cuda.so (a wheel built with "
                  "CUDA), or use the Triton backend");
}

void check_only(const Problem& p) {
  if (p.device_index < 0) check_host_values(p);
}

}  // namespace

STABLE_TORCH_LIBRARY(vllm_qout, library) {
  library.def(
      "fused_qnorm_rope_kv_insert(Tensor q_in, Tensor kv, Tensor(a!) q_out, Tensor(b!) k_cache, "
      "Tensor slot_mapping, Tensor position_ids, Tensor cos_sin_cache, float eps, int cache_block_size, "
      "bool apply_q_norm=True) -> ()");
  library.def(
      "kv_rope_insert(Tensor kv, Tensor(a!) k_cache, Tensor slot_mapping, Tensor position_ids, "
      "Tensor cos_sin_cache, int cache_block_size) -> ()");
  library.def(
      "qnorm_rope_kv_insert_(Tensor(a!) q, Tensor kv, Tensor(b!) k_cache, Tensor slot_mapping, "
      "Tensor position_ids, Tensor cos_sin_cache, float eps, int cache_block_size, "
      "bool apply_q_norm=True) -> ()");
  // The same checks without the computation, for backends written in Python.
  library.def(
      "check_fused_qnorm_rope_kv_insert(Tensor q_in, Tensor kv, Tensor q_out, Tensor k_cache, "
      "Tensor slot_mapping, Tensor position_ids, Tensor cos_sin_cache, float eps, int cache_block_size, "
      "bool apply_q_norm=True) -> ()");
  library.def(
      "check_kv_rope_insert(Tensor kv, Tensor k_cache, Tensor slot_mapping, Tensor position_ids, "
      "Tensor cos_sin_cache, int cache_block_size) -> ()");
  library.def(
      "check_qnorm_rope_kv_insert_(Tensor q, Tensor kv, Tensor k_cache, Tensor slot_mapping, "
      "Tensor position_ids, Tensor cos_sin_cache, float eps, int cache_block_size, "
      "bool apply_q_norm=True) -> ()");
  library.def("check_capability(int major, int minor) -> ()");
  library.def("set_debug(bool enabled) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_qout, CPU, library) {
  using Cpu = Operators<run_on_cpu>;
  library.impl("fused_qnorm_rope_kv_insert", TORCH_BOX(&Cpu::fused_qnorm_rope_kv_insert));
  library.impl("kv_rope_insert", TORCH_BOX(&Cpu::kv_rope_insert));
  library.impl("qnorm_rope_kv_insert_", TORCH_BOX(&Cpu::qnorm_rope_kv_insert_));
}

STABLE_TORCH_LIBRARY_IMPL(vllm_qout, CompositeExplicitAutograd, library) {
  using Absent = Operators<run_without_backend>;
  library.impl("fused_qnorm_rope_kv_insert", TORCH_BOX(&Absent::fused_qnorm_rope_kv_insert));
  library.impl("kv_rope_insert", TORCH_BOX(&Absent::kv_rope_insert));
  library.impl("qnorm_rope_kv_insert_", TORCH_BOX(&Absent::qnorm_rope_kv_insert_));
  using Check = Operators<check_only>;
  library.impl("check_fused_qnorm_rope_kv_insert", TORCH_BOX(&Check::fused_qnorm_rope_kv_insert));
  library.impl("check_kv_rope_insert", TORCH_BOX(&Check::kv_rope_insert));
  library.impl("check_qnorm_rope_kv_insert_", TORCH_BOX(&Check::qnorm_rope_kv_insert_));
  library.impl("check_capability", TORCH_BOX(&check_capability));
  library.impl("set_debug", TORCH_BOX(&set_debug));
}

}  // namespace qout
