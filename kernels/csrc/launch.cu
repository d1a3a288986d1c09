// SPDX-License-Identifier: Apache-2.0
// Chooses a shape for a call and launches it. The shapes and limits were chosen on an H200
// (docs/benchmarks.md); every shape computes the same bits.
#include "kernels.cuh"
#include "launch.h"

namespace qout {
namespace {

// A few rows: one head a warp in small blocks, spread over as many multiprocessors as there are.
struct LatencyShape {
  static constexpr int heads = 1, zero_heads = 1, warps = 2, blocks_per_sm = 16;
};

// Tens to hundreds of rows: two heads in flight a warp.
struct BalancedShape {
  static constexpr int heads = 2, zero_heads = 2, warps = 4, blocks_per_sm = 8;
};

// Bound by device memory: small blocks that retire early, longer runs of zeros.
struct StreamingShape {
  static constexpr int heads = 2, zero_heads = 8, warps = 2, blocks_per_sm = 16;
};

constexpr int64_t kLatencyHeads = 2048;      // rows * padded heads below this: LatencyShape
constexpr int64_t kStreamingHeads = 131072;  // rows * query heads from this on: StreamingShape
constexpr int64_t kMaxTasks = int64_t{1} << 31;

// Programmatic launch: the next kernel may be set up while this one runs; both wait before memory.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_blocks(void (*kernel)(Parameters...), int64_t blocks, int threads, cudaStream_t stream,
                          const Arguments&... arguments) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(blocks);
  config.blockDim = static_cast<unsigned>(threads);
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

int64_t divide_up(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

template <typename Shape>
cudaError_t launch_fused(const Problem& p, cudaStream_t stream) {
  const int64_t query_groups = divide_up(p.heads, Shape::heads);
  const int64_t zero_groups = divide_up(p.padded_heads - p.heads, Shape::zero_heads);
  const int64_t first_zero = p.inserts + p.rows * query_groups;
  const int64_t count = first_zero + p.rows * zero_groups;
  if (count >= kMaxTasks) return cudaErrorInvalidConfiguration;
  const Tasks tasks{static_cast<uint32_t>(query_groups), static_cast<uint32_t>(zero_groups),
                    static_cast<uint32_t>(p.inserts), static_cast<uint32_t>(first_zero),
                    static_cast<uint32_t>(count)};
  return launch_blocks(fused_kernel<Shape>, divide_up(count, Shape::warps), Shape::warps * kWarp, stream, p, tasks);
}

}  // namespace

cudaError_t launch(const Problem& p, cudaStream_t stream) {
  if (p.q_in == nullptr)
    return p.inserts == 0 ? cudaSuccess
                          : launch_blocks(context_kernel, divide_up(p.inserts, kContextWarps),
                                          kContextWarps * kWarp, stream, p);
  if (p.rows == 0) return cudaSuccess;
  if (p.rows * p.padded_heads < kLatencyHeads) return launch_fused<LatencyShape>(p, stream);
  if (p.rows * p.heads < kStreamingHeads) return launch_fused<BalancedShape>(p, stream);
  return launch_fused<StreamingShape>(p, stream);
}

}  // namespace qout
