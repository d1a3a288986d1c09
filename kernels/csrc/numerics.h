// SPDX-License-Identifier: Apache-2.0
// Arithmetic that the CPU and CUDA kernels share bit for bit.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define QOUT_INLINE __host__ __device__ __forceinline__
#else
#define QOUT_INLINE inline __attribute__((always_inline))
#endif

namespace qout {

constexpr float kFp8Max = 448.0f;
constexpr float kAmaxFloor = 1e-4f;

// UE8M0 byte of a group whose largest magnitude is the float with bits `amax` (at least 1e-4):
// 127 + the smallest k with 448 * 2^k >= amax. 448 is 1.75 * 2^8, so k follows from the exponent
// and from whether the mantissa exceeds .75. An infinite amax gives 255, as the stock operator does.
QOUT_INLINE uint32_t scale_byte(uint32_t amax) {
  if (amax >= 0x7f800000u) return 255u;
  return (amax >> 23) - 8u + ((amax & 0x7fffffu) > 0x600000u ? 1u : 0u);
}

// Bits of the float 2^-(byte - 127); 0 for byte 255, which turns finite values into signed zeros.
QOUT_INLINE uint32_t inverse_scale_bits(uint32_t byte) {
  return byte == 255u ? 0u : (254u - byte) << 23;
}

}  // namespace qout
