// The interop delta payloads `xor` and `overwrite` (docs/publication-format.md, "A blob").
// Appliers decode, apply, hash and sum in one pass over cache-sized pieces.
// Thread-safety: pure functions over caller memory.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "core/additive.hpp"
#include "core/digest.hpp"
#include "core/frame.hpp"
#include "core/kernels.hpp"
#include "core/status.hpp"

namespace stitch {

// What to compute over the target while it is in cache. lane_bytes 0 means no sums.
struct VerifyPlan {
  DigestKind digest = DigestKind::kNone;
  std::uint64_t lane_bytes = 0;
};

struct Verified {
  std::string digest_hex;  // empty when no digest was asked for
  Sums sums;
};

// `out` is exactly `base` or disjoint from it, and as long; else InvalidInput. On failure a
// disjoint base is untouched and out unspecified; if out is base, its bytes are as before.
Result<Verified> xor_apply(const Kernels& kernels, std::span<const std::uint8_t> blob,
                           std::span<const std::uint8_t> base, std::span<std::uint8_t> out,
                           const VerifyPlan& plan);
Result<Verified> overwrite_apply(const Kernels& kernels, std::span<const std::uint8_t> blob,
                                 std::span<const std::uint8_t> base, std::span<std::uint8_t> out,
                                 const VerifyPlan& plan);

// Digest and sums of `source`; copy_verify also copies it into `out` on the way, under the same
// rule about overlap.
Result<Verified> digest_verify(const Kernels& kernels, std::span<const std::uint8_t> source,
                               const VerifyPlan& plan);
Result<Verified> copy_verify(const Kernels& kernels, std::span<const std::uint8_t> source,
                             std::span<std::uint8_t> out, const VerifyPlan& plan);

// nullopt when nothing changed. base and target must be equally long.
Result<std::optional<ByteBuffer>> xor_encode(const Kernels& kernels,
                                             std::span<const std::uint8_t> base,
                                             std::span<const std::uint8_t> target, int level);
Result<std::optional<ByteBuffer>> overwrite_encode(std::span<const std::uint8_t> base,
                                                   std::span<const std::uint8_t> target, int level);

}  // namespace stitch
