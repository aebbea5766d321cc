// Whole-tensor digests of the interop formats, streamed: XXH3-128 and Adler-32.
// Thread-safety: one Digester belongs to one thread at a time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "core/kernels.hpp"
#include "core/status.hpp"

namespace stitch {

enum class DigestKind : std::uint8_t { kNone = 0, kXxh3 = 1, kAdler32 = 2 };

// "xxh3-128", "adler32" or "none"; InvalidInput for anything else.
Result<DigestKind> parse_digest_kind(std::string_view text);

class Digester {
 public:
  // `kernels` must outlive the digester.
  Digester(const Kernels& kernels, DigestKind kind);

  DigestKind kind() const noexcept { return kind_; }
  void update(std::span<const std::uint8_t> data);
  // Lower-case hex, most significant digit first; empty for kNone. Does not end the stream.
  std::string hex() const;

 private:
  const Kernels* kernels_;
  DigestKind kind_;
  std::uint32_t adler_ = 1;
  alignas(kXxh3StateAlign) std::array<std::byte, kXxh3StateBytes> xxh3_;
};

}  // namespace stitch
