// The additive, position-keyed checksum `add1` (docs/format.md, "Additive checksum").
// Thread-safety: pure functions; partial sums over disjoint lanes add up in any order.
#pragma once

#include <cstdint>
#include <span>

#include "core/kernels.hpp"
#include "core/status.hpp"

namespace stitch {

inline constexpr int kAdditiveVersion = 1;
inline constexpr std::uint64_t kAdditiveBlockLanes = 512;

struct Sums {
  std::uint64_t s0 = 0;
  std::uint64_t s1 = 0;

  friend bool operator==(const Sums&, const Sums&) = default;
};

// InvalidInput unless lane_bytes is 1, 2, 4 or 8, byte_count is a multiple of it, and lane
// numbers stay below 2**63.
Status check_lanes(std::uint64_t byte_count, std::uint64_t lane_bytes, std::uint64_t first_lane);

// The definition, one lane at a time. Arguments must satisfy check_lanes.
Sums additive_oracle(std::span<const std::uint8_t> data, std::uint64_t lane_bytes,
                     std::uint64_t first_lane);

// The same through a variant's inner loops. Arguments must satisfy check_lanes.
Sums additive_sums(const Kernels& kernels, std::span<const std::uint8_t> data,
                   std::uint64_t lane_bytes, std::uint64_t first_lane);

// As additive_sums, split over at most `threads` threads.
Sums additive_sums_threaded(const Kernels& kernels, std::span<const std::uint8_t> data,
                            std::uint64_t lane_bytes, std::uint64_t first_lane, unsigned threads);

// Sums after lanes that held `old_data` hold `new_data` (equal lengths). Pieces that did not
// change cost one comparison.
Sums additive_updated(const Kernels& kernels, Sums sums, std::span<const std::uint8_t> old_data,
                      std::span<const std::uint8_t> new_data, std::uint64_t lane_bytes,
                      std::uint64_t first_lane);

// The scalar inner loops, for the portable table.
void additive_run_scalar1(const std::uint8_t* data, std::size_t lane_count, const AdditiveRun* run,
                          std::uint64_t* sums);
void additive_run_scalar2(const std::uint8_t* data, std::size_t lane_count, const AdditiveRun* run,
                          std::uint64_t* sums);
void additive_run_scalar4(const std::uint8_t* data, std::size_t lane_count, const AdditiveRun* run,
                          std::uint64_t* sums);
void additive_run_scalar8(const std::uint8_t* data, std::size_t lane_count, const AdditiveRun* run,
                          std::uint64_t* sums);

}  // namespace stitch
