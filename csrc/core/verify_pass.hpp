// Digest and sums of one target, fed piece by piece in order while each piece is in cache.
// Thread-safety: belongs to one thread at a time.
#pragma once

#include <cstdint>
#include <span>

#include "core/delta.hpp"

namespace stitch {

// 256 KiB of delta, base and target fit a private cache together with a zstd window.
inline constexpr std::size_t kPieceBytes = std::size_t{256} << 10;

class VerifyPass {
 public:
  VerifyPass(const Kernels& kernels, const VerifyPlan& plan);
  // Every piece but the last is a multiple of 8 bytes.
  void feed(std::span<const std::uint8_t> piece);
  Verified result() const;

 private:
  const Kernels* kernels_;
  std::uint64_t lane_bytes_;
  std::uint64_t lane_ = 0;
  Sums sums_;
  Digester digester_;
};

// InvalidInput if the plan does not fit `byte_count` bytes.
Status check_plan(const VerifyPlan& plan, std::uint64_t byte_count);

// InvalidInput unless out is as long as base, exactly it or disjoint from it, and disjoint from
// `blob`, which is still read while out is written.
Status check_target(std::span<const std::uint8_t> blob, std::span<const std::uint8_t> base,
                    std::span<const std::uint8_t> out);

}  // namespace stitch
