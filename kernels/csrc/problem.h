// SPDX-License-Identifier: Apache-2.0
// One validated call, as raw pointers and sizes: what every backend computes from.
#pragma once

#include <cstdint>

#define QOUT_API __attribute__((visibility("default")))

namespace qout {

constexpr int64_t kHeadDim = 512;
constexpr int64_t kNopeDim = 448;
constexpr int64_t kRopeDim = 64;
constexpr int64_t kGroupDim = 64;       // dims that share one scale byte
constexpr int64_t kTokenDataBytes = 576;  // 448 e4m3 values and 64 bf16 values
constexpr int64_t kTokenScaleBytes = 8;   // 7 scale bytes and a zero
constexpr int64_t kTokenBytes = kTokenDataBytes + kTokenScaleBytes;
constexpr int64_t kMaxHeads = 128;

struct Problem {
  const uint16_t* q_in;     // bf16 [rows, heads, 512]; null for the KV-only operator
  uint16_t* q_out;          // bf16 [rows, padded_heads, 512]; equals q_in in place
  const uint16_t* kv;       // bf16 [rows, 512]
  uint8_t* k_cache;         // blocks of block_size records, block_stride bytes apart
  const int64_t* slot_mapping;  // [inserts]
  const int64_t* position_ids;  // [rows]
  const float* cos_sin;     // [max_position, 64]: 32 cosines, 32 sines
  int64_t rows;
  int64_t inserts;
  int64_t heads;
  int64_t padded_heads;
  int64_t blocks;
  int64_t block_stride;
  int64_t block_size;
  int64_t max_position;
  float eps;
  bool apply_q_norm;
  int device_index;
};

// Rejects bad slots, positions and repeated slots; reads host memory only.
QOUT_API void check_values(
    const int64_t* slot_mapping, int64_t inserts, int64_t slots,
    const int64_t* position_ids, int64_t rows, int64_t max_position);

// Rejects cards that the CUDA kernels cannot run on.
QOUT_API void check_capability(int64_t major, int64_t minor);

// Whether GPU calls copy slots and positions to the host and check them (synchronises).
QOUT_API bool debug_enabled();

}  // namespace qout
