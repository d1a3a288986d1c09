// SPDX-License-Identifier: Apache-2.0
// Registers the CUDA kernels under the schemas of libvllm_qout.so.
#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <array>
#include <atomic>
#include <vector>

#include "launch.h"
#include "validation.h"

namespace qout {
namespace {

constexpr int kMaxDevices = 64;
constexpr int64_t kMaxSlots = int64_t{1} << 32;  // the kernels divide slots in 32 bits

void check_cuda(cudaError_t status, const char* what) {
  STD_TORCH_CHECK(status == cudaSuccess, what, ": ", cudaGetErrorString(status));
}

// Asks the driver once for each device; the answer cannot change.
void check_card(int device) {
  static std::array<std::atomic<bool>, kMaxDevices> known{};
  const bool cached = device < kMaxDevices;
  if (cached && known[device].load(std::memory_order_relaxed)) return;
  int major = 0;
  int minor = 0;
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "compute capability");
  check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "compute capability");
  check_capability(major, minor);
  if (cached) known[device].store(true, std::memory_order_relaxed);
}

std::vector<int64_t> to_host(const int64_t* device_values, int64_t count, cudaStream_t stream) {
  std::vector<int64_t> values(static_cast<size_t>(count));
  check_cuda(cudaMemcpyAsync(values.data(), device_values, values.size() * sizeof(int64_t),
                             cudaMemcpyDeviceToHost, stream),
             "copying indices for the debug checks");
  return values;
}

void check_device_values(const Problem& p, cudaStream_t stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream, &capture), "capture status");
  if (capture != cudaStreamCaptureStatusNone) return;
  const auto slots = to_host(p.slot_mapping, p.inserts, stream);
  const auto positions = to_host(p.position_ids, p.rows, stream);
  check_cuda(cudaStreamSynchronize(stream), "waiting for the debug checks");
  check_values(slots.data(), p.inserts, p.blocks * p.block_size, positions.data(), p.rows, p.max_position);
}

void run_on_cuda(const Problem& p) {
  STD_TORCH_CHECK(p.device_index >= 0, "k_cache: got a device without an index; needs a CUDA device");
  STD_TORCH_CHECK(p.blocks * p.block_size <= kMaxSlots, "k_cache: got ", p.blocks * p.block_size,
                  " slots; needs at most ", kMaxSlots);
  check_card(p.device_index);
  const torch::stable::accelerator::DeviceGuard guard(p.device_index);
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(p.device_index, &stream));
  if (debug_enabled()) check_device_values(p, static_cast<cudaStream_t>(stream));
  check_cuda(launch(p, static_cast<cudaStream_t>(stream)), "launching the kernel");
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(vllm_qout, CUDA, library) {
  using Cuda = Operators<run_on_cuda>;
  library.impl("fused_qnorm_rope_kv_insert", TORCH_BOX(&Cuda::fused_qnorm_rope_kv_insert));
  library.impl("kv_rope_insert", TORCH_BOX(&Cuda::kv_rope_insert));
  library.impl("qnorm_rope_kv_insert_", TORCH_BOX(&Cuda::qnorm_rope_kv_insert_));
}

}  // namespace qout
