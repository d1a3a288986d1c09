// SPDX-License-Identifier: Apache-2.0
// The checks of the operator contract, before any launch.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "problem.h"

namespace qout {

using torch::stable::Tensor;

QOUT_API Problem check_fused(
    const Tensor& q_in, const Tensor& kv, const Tensor& q_out, const Tensor& k_cache,
    const Tensor& slot_mapping, const Tensor& position_ids, const Tensor& cos_sin_cache,
    double eps, int64_t cache_block_size, bool apply_q_norm);

QOUT_API Problem check_kv(
    const Tensor& kv, const Tensor& k_cache, const Tensor& slot_mapping, const Tensor& position_ids,
    const Tensor& cos_sin_cache, int64_t cache_block_size);

QOUT_API Problem check_in_place(
    const Tensor& q, const Tensor& kv, const Tensor& k_cache, const Tensor& slot_mapping,
    const Tensor& position_ids, const Tensor& cos_sin_cache, double eps, int64_t cache_block_size,
    bool apply_q_norm);

// The three operators of one backend: check, then run.
template <void (*run)(const Problem&)>
struct Operators {
  static void fused_qnorm_rope_kv_insert(
      const Tensor& q_in, const Tensor& kv, Tensor& q_out, Tensor& k_cache,
      const Tensor& slot_mapping, const Tensor& position_ids, const Tensor& cos_sin_cache,
      double eps, int64_t cache_block_size, bool apply_q_norm) {
    run(check_fused(q_in, kv, q_out, k_cache, slot_mapping, position_ids, cos_sin_cache, eps,
                    cache_block_size, apply_q_norm));
  }
  static void kv_rope_insert(
      const Tensor& kv, Tensor& k_cache, const Tensor& slot_mapping, const Tensor& position_ids,
      const Tensor& cos_sin_cache, int64_t cache_block_size) {
    run(check_kv(kv, k_cache, slot_mapping, position_ids, cos_sin_cache, cache_block_size));
  }
  static void qnorm_rope_kv_insert_(
      Tensor& q, const Tensor& kv, Tensor& k_cache, const Tensor& slot_mapping,
      const Tensor& position_ids, const Tensor& cos_sin_cache, double eps, int64_t cache_block_size,
      bool apply_q_norm) {
    run(check_in_place(q, kv, k_cache, slot_mapping, position_ids, cos_sin_cache, eps,
                       cache_block_size, apply_q_norm));
  }
};

}  // namespace qout
