// SPDX-License-Identifier: Apache-2.0
// Device code. One warp computes one context record, or `Shape::heads` query heads of one row.
//
// A warp holds 512 dims as 32 runs of 16; the lane that owns run i sums its squares in index order,
// and the butterfly adds runs 16, 8, 4, 2, 1 apart. The stock operator sums in this order, which is
// what makes the results bit-equal. Memory is read and written 16 bytes a lane, 512 contiguous bytes
// a warp, and neighbour lanes swap halves, so that lane 2i owns run i and lane 2i+1 run 16+i.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include "numerics.h"
#include "problem.h"

namespace qout {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kWarp = 32;
constexpr int kRun = 16;             // dims of one run
constexpr int kHeadVectors = 64;     // 16-byte vectors of one head
constexpr int kFirstRopeRun = 28;    // runs 28..31 hold the rotated dims
constexpr int kPairs = 32;

// Waits until the kernels before this one in the stream have finished and their writes are visible.
__device__ __forceinline__ void wait_for_predecessor() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Lets the next kernel of the stream start its prologue; its own wait still covers all our writes.
__device__ __forceinline__ void release_successor() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

struct Rotation {
  float cosine[kRun / 2];
  float sine[kRun / 2];
};

__device__ __forceinline__ void unpack(const uint4& packed, float* out) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out[2 * i] = __uint_as_float(words[i] << 16);
    out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}

__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ uint4 pack(const float* in) {
  return make_uint4(pack_pair(in[0], in[1]), pack_pair(in[2], in[3]), pack_pair(in[4], in[5]),
                    pack_pair(in[6], in[7]));
}

__device__ __forceinline__ uint4 shuffle_neighbour(const uint4& value) {
  return make_uint4(__shfl_xor_sync(kAllLanes, value.x, 1), __shfl_xor_sync(kAllLanes, value.y, 1),
                    __shfl_xor_sync(kAllLanes, value.z, 1), __shfl_xor_sync(kAllLanes, value.w, 1));
}

__device__ __forceinline__ uint4 choose(bool condition, const uint4& yes, const uint4& no) {
  return make_uint4(condition ? yes.x : no.x, condition ? yes.y : no.y, condition ? yes.z : no.z,
                    condition ? yes.w : no.w);
}

// Vectors `lane` and `lane + 32` of a head become the two halves of the lane's own run, and back.
__device__ __forceinline__ void swap_to_runs(bool odd, uint4& first, uint4& second) {
  const uint4 received = shuffle_neighbour(choose(odd, first, second));
  first = choose(odd, received, first);
  second = choose(odd, second, received);
}

__device__ __forceinline__ void swap_to_vectors(bool odd, uint4& first, uint4& second) {
  const uint4 received = shuffle_neighbour(choose(odd, first, second));
  first = choose(odd, received, first);
  second = choose(odd, second, received);
}

// A position outside the table reads its last row instead of foreign memory.
__device__ __forceinline__ void load_rotation(const Problem& p, int64_t row, int run, Rotation& rotation) {
  const uint64_t position = min(static_cast<uint64_t>(p.position_ids[row]),
                                static_cast<uint64_t>(p.max_position - 1));
  const float4* cosines = reinterpret_cast<const float4*>(
      p.cos_sin + position * kRopeDim + (run - kFirstRopeRun) * (kRun / 2));
  const float4* sines = cosines + kPairs / 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    *reinterpret_cast<float4*>(rotation.cosine + 4 * i) = __ldg(cosines + i);
    *reinterpret_cast<float4*>(rotation.sine + 4 * i) = __ldg(sines + i);
  }
}

__device__ __forceinline__ void rotate(const Rotation& rotation, float* values) {
#pragma unroll
  for (int i = 0; i < kRun / 2; ++i) {
    const float even = values[2 * i];
    const float odd = values[2 * i + 1];
    values[2 * i] = __fmaf_rn(even, rotation.cosine[i], -__fmul_rn(odd, rotation.sine[i]));
    values[2 * i + 1] = __fmaf_rn(even, rotation.sine[i], __fmul_rn(odd, rotation.cosine[i]));
  }
}

// Norms and rotates up to `Shape::heads` heads of a row; `first_head` is below `p.heads`.
template <typename Shape>
__device__ __forceinline__ void query_heads(const Problem& p, int64_t row, int first_head, int lane) {
  constexpr int kHeads = Shape::heads;
  const bool odd = lane & 1;
  const int run = (lane & 1) * 16 + lane / 2;
  const int heads = static_cast<int>(p.heads) - first_head;
  const int64_t in_head = row * p.heads + first_head;
  const int64_t out_head = row * p.padded_heads + first_head;
  const uint4* in = reinterpret_cast<const uint4*>(p.q_in) + in_head * kHeadVectors + lane;
  uint4* out = reinterpret_cast<uint4*>(p.q_out) + out_head * kHeadVectors + lane;

  uint4 first[kHeads];
  uint4 second[kHeads];
#pragma unroll
  for (int i = 0; i < kHeads; ++i)
    if (i < heads) {
      first[i] = in[i * kHeadVectors];
      second[i] = in[i * kHeadVectors + kWarp];
    }
  Rotation rotation;
  if (run >= kFirstRopeRun) load_rotation(p, row, run, rotation);

#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    if (i >= heads) break;
    swap_to_runs(odd, first[i], second[i]);
    float values[kRun];
    unpack(first[i], values);
    unpack(second[i], values + kRun / 2);
    if (p.apply_q_norm) {
      float sum = 0.0f;
#pragma unroll
      for (int d = 0; d < kRun; ++d) sum = __fmaf_rn(values[d], values[d], sum);
      sum = __fadd_rn(sum, __shfl_xor_sync(kAllLanes, sum, 1));  // runs 16 apart
#pragma unroll
      for (int lanes_apart = 16; lanes_apart > 1; lanes_apart /= 2)  // runs 8, 4, 2, 1 apart
        sum = __fadd_rn(sum, __shfl_xor_sync(kAllLanes, sum, lanes_apart));
      const float scale = rsqrtf(__fmaf_rn(sum, 1.0f / kHeadDim, p.eps));
#pragma unroll
      for (int d = 0; d < kRun; ++d) values[d] = __fmul_rn(values[d], scale);
    }
    if (run >= kFirstRopeRun) rotate(rotation, values);
    first[i] = pack(values);
    second[i] = pack(values + kRun / 2);
    swap_to_vectors(odd, first[i], second[i]);
    out[i * kHeadVectors] = first[i];
    out[i * kHeadVectors + kWarp] = second[i];
  }
}

// Zeroes up to `Shape::zero_heads` padding heads of a row, from `first_head` on.
template <typename Shape>
__device__ __forceinline__ void zero_heads(const Problem& p, int64_t row, int first_head, int lane) {
  const int heads = static_cast<int>(p.padded_heads) - first_head;
  const int64_t out_head = row * p.padded_heads + first_head;
  uint4* out = reinterpret_cast<uint4*>(p.q_out) + out_head * kHeadVectors + lane;
#pragma unroll
  for (int i = 0; i < Shape::zero_heads; ++i)
    if (i < heads) {
      out[i * kHeadVectors] = make_uint4(0, 0, 0, 0);
      out[i * kHeadVectors + kWarp] = make_uint4(0, 0, 0, 0);
    }
}

__device__ __forceinline__ uint32_t quantize_four(const float* values, float inverse) {
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    // max first: it drops a NaN in favour of -448, as the stock operator does.
    const float scaled = fminf(fmaxf(__fmul_rn(values[i], inverse), -kFp8Max), kFp8Max);
    word |= static_cast<uint32_t>(__nv_cvt_float_to_fp8(scaled, __NV_SATFINITE, __NV_E4M3)) << (8 * i);
  }
  return word;
}

// Writes the record of one row; slots outside the cache, -1 among them, are skipped.
__device__ __forceinline__ void context_record(const Problem& p, int64_t row, int lane) {
  const uint64_t slot = static_cast<uint64_t>(p.slot_mapping[row]);
  const uint4* in = reinterpret_cast<const uint4*>(p.kv) + row * kHeadVectors + 2 * lane;
  const uint4 first = in[0];
  const uint4 second = in[1];
  Rotation rotation;
  if (lane >= kFirstRopeRun) load_rotation(p, row, lane, rotation);
  if (slot >= static_cast<uint64_t>(p.blocks * p.block_size)) return;

  const uint32_t block_size = static_cast<uint32_t>(p.block_size);
  const uint32_t block = static_cast<uint32_t>(slot) / block_size;
  const uint32_t place = static_cast<uint32_t>(slot) - block * block_size;
  uint8_t* base = p.k_cache + static_cast<int64_t>(block) * p.block_stride;
  uint8_t* data = base + static_cast<int64_t>(place) * kTokenDataBytes;

  float values[kRun];
  unpack(first, values);
  unpack(second, values + kRun / 2);
  float amax = kAmaxFloor;
#pragma unroll
  for (int d = 0; d < kRun; ++d) amax = fmaxf(amax, fabsf(values[d]));
  amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, 1));
  amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, 2));
  const uint32_t byte = scale_byte(__float_as_uint(amax));

  // Lane 4g contributes the byte of group g; the rotated lanes leave the eighth byte zero.
  const bool leader = lane % 4 == 0 && lane < kFirstRopeRun;
  const uint32_t shifted = leader ? byte << (lane / 4 % 4 * 8) : 0u;
  const uint32_t low = __reduce_or_sync(kAllLanes, lane < 16 ? shifted : 0u);
  const uint32_t high = __reduce_or_sync(kAllLanes, lane < 16 ? 0u : shifted);

  if (lane < kFirstRopeRun) {
    const float inverse = __uint_as_float(inverse_scale_bits(byte));
    const uint4 quantized =
        make_uint4(quantize_four(values, inverse), quantize_four(values + 4, inverse),
                   quantize_four(values + 8, inverse), quantize_four(values + 12, inverse));
    *reinterpret_cast<uint4*>(data + lane * kRun) = quantized;
  } else {
    rotate(rotation, values);
    uint4* rope = reinterpret_cast<uint4*>(data + kNopeDim) + 2 * (lane - kFirstRopeRun);
    rope[0] = pack(values);
    rope[1] = pack(values + kRun / 2);
  }
  if (lane == 0)
    *reinterpret_cast<uint2*>(base + block_size * kTokenDataBytes + place * kTokenScaleBytes) =
        make_uint2(low, high);
}

// How the tasks of a launch follow each other: every context record, then every group of query heads,
// then every group of padding heads, so that reads and writes end before the phase of writes alone.
struct Tasks {
  uint32_t query_groups;  // of one row
  uint32_t zero_groups;   // of one row
  uint32_t first_query;
  uint32_t first_zero;
  uint32_t count;
};

template <typename Shape>
__global__ void __launch_bounds__(Shape::warps * kWarp, Shape::blocks_per_sm)
    fused_kernel(const __grid_constant__ Problem p, const __grid_constant__ Tasks tasks) {
  const int lane = threadIdx.x % kWarp;
  const uint32_t task = blockIdx.x * Shape::warps + threadIdx.x / kWarp;
  const bool zero = task >= tasks.first_zero;
  const uint32_t groups = zero ? tasks.zero_groups : tasks.query_groups;
  const uint32_t place = task - (zero ? tasks.first_zero : tasks.first_query);
  const uint32_t row = place / groups;
  const int group = static_cast<int>(place % groups);
  release_successor();
  wait_for_predecessor();
  if (task < tasks.first_query) {
    context_record(p, task, lane);
  } else if (task < tasks.first_zero) {
    query_heads<Shape>(p, row, group * Shape::heads, lane);
  } else if (task < tasks.count) {
    zero_heads<Shape>(p, row, static_cast<int>(p.heads) + group * Shape::zero_heads, lane);
  }
}

constexpr int kContextWarps = 4;

__global__ void __launch_bounds__(kContextWarps * kWarp) context_kernel(const __grid_constant__ Problem p) {
  const uint32_t row = blockIdx.x * kContextWarps + threadIdx.x / kWarp;
  release_successor();
  wait_for_predecessor();
  if (row < p.inserts) context_record(p, row, threadIdx.x % kWarp);
}

}  // namespace qout
