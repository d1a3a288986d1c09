// SPDX-License-Identifier: Apache-2.0
// Host entry of the CUDA kernels, free of torch headers so that nvcc need not parse them.
#pragma once

#include <cuda_runtime_api.h>

#include "problem.h"

namespace qout {

cudaError_t launch(const Problem& problem, cudaStream_t stream);

}  // namespace qout
