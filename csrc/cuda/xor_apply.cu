#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "cuda/xor_apply.hpp"

namespace stitch::cuda {
namespace {

constexpr unsigned kThreadsPerBlock = 256;
constexpr std::uint64_t kBlocksMax =
    16384;  // enough for every device; the loop strides over the rest
constexpr std::uint64_t kVectorBytes = sizeof(uint4);

// `head` bytes, then `vectors` aligned 16-byte words, then `tail` bytes.
struct Split {
  std::uint64_t head;
  std::uint64_t vectors;
  std::uint64_t tail;
};

__global__ void xor_apply_kernel(XorApplyParams params, Split split) {
  const std::uint64_t stride = std::uint64_t{gridDim.x} * blockDim.x;  // counts pass 2**32
  const std::uint64_t first = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  // Both pointers are 16-byte aligned here by construction of the split.
  auto* const base = reinterpret_cast<uint4*>(params.base + split.head);
  const auto* const delta = reinterpret_cast<const uint4*>(params.delta + split.head);
  for (std::uint64_t i = first; i < split.vectors; i += stride) {
    const uint4 change = __ldg(delta + i);
    if ((change.x | change.y | change.z | change.w) != 0) {  // most of a delta is zero
      uint4 value = base[i];
      value.x ^= change.x;
      value.y ^= change.y;
      value.z ^= change.z;
      value.w ^= change.w;
      base[i] = value;
    }
  }
  for (std::uint64_t i = first; i < split.head; i += stride) {
    params.base[i] ^= params.delta[i];
  }
  const std::uint64_t tail_begin = split.head + split.vectors * kVectorBytes;
  for (std::uint64_t i = first; i < split.tail; i += stride) {
    params.base[tail_begin + i] ^= params.delta[tail_begin + i];
  }
}

Split split_for(const XorApplyParams& params) {
  const auto base = reinterpret_cast<std::uintptr_t>(params.base);
  const auto delta = reinterpret_cast<std::uintptr_t>(params.delta);
  if ((base ^ delta) % kVectorBytes != 0) {
    return {params.byte_count, 0, 0};  // no common alignment: byte by byte
  }
  const std::uint64_t to_boundary = (kVectorBytes - base % kVectorBytes) % kVectorBytes;
  const std::uint64_t head = std::min<std::uint64_t>(to_boundary, params.byte_count);
  const std::uint64_t rest = params.byte_count - head;
  return {head, rest / kVectorBytes, rest % kVectorBytes};
}

bool overlaps(const XorApplyParams& params) {
  const auto base = reinterpret_cast<std::uintptr_t>(params.base);
  const auto delta = reinterpret_cast<std::uintptr_t>(params.delta);
  return base < delta ? delta - base < params.byte_count : base - delta < params.byte_count;
}

}  // namespace

Status launch_xor_apply(const XorApplyParams& params, CUstream_st* stream) {
  if (params.byte_count == 0) {
    return {};
  }
  if (params.base == nullptr || params.delta == nullptr) {
    return Status::invalid_input("xor apply: base and delta must not be null");
  }
  if (overlaps(params)) {
    return Status::invalid_input("xor apply: base and delta overlap");
  }
  const Split split = split_for(params);
  const std::uint64_t items = std::max({split.head, split.vectors, split.tail});
  const std::uint64_t blocks =
      std::min((items + kThreadsPerBlock - 1) / kThreadsPerBlock, kBlocksMax);
  xor_apply_kernel<<<static_cast<unsigned>(blocks), kThreadsPerBlock, 0, stream>>>(params, split);
  const cudaError_t launched = cudaGetLastError();
  if (launched != cudaSuccess) {
    return Status::internal(std::string("xor apply launch: ") + cudaGetErrorString(launched));
  }
  return {};
}

}  // namespace stitch::cuda
