// XOR apply on device memory: base ^= delta, byte for byte. XOR commutes with any layout that only
// moves elements, so the same kernel serves canonical tensors and rank images, and is its own undo.
// Thread-safety: may be called from any thread; work is ordered by the stream alone.
#pragma once

#include <cstdint>

#include "core/status.hpp"

struct CUstream_st;  // cudaStream_t without the CUDA headers

namespace stitch::cuda {

struct XorApplyParams {
  std::uint8_t* base;         // device memory, any alignment
  const std::uint8_t* delta;  // device memory, disjoint from base
  std::uint64_t byte_count;
};

// Enqueues the kernel on `stream` of the current device; neither allocates nor synchronises.
// InvalidInput for null or overlapping ranges; Internal if the launch itself is refused. Faults of
// the kernel show at the stream's next synchronisation.
Status launch_xor_apply(const XorApplyParams& params, CUstream_st* stream);

}  // namespace stitch::cuda
