#include "core/additive.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

namespace stitch {
namespace {

static_assert(std::endian::native == std::endian::little, "lanes are little-endian");

constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15;  // 2**64 / golden ratio, as in splitmix64
constexpr std::uint64_t kShiftTweak = 0xA5A5A5A5A5A5A5A5;
constexpr std::array<std::uint64_t, 2> kSeeds = {0x5354495443480000, 0x5354495443480001};
constexpr std::uint64_t kBlockMask = kAdditiveBlockLanes - 1;
constexpr std::uint64_t kNarrowSpread = 0x0000000100000001;  // puts a narrow lane in both halves

constexpr std::uint64_t mix(std::uint64_t x) {
  std::uint64_t z = x + kGolden;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

// Stored twice over, so that a run rotated by S(b) never wraps.
using KeyTable = std::array<std::uint64_t, 2 * kAdditiveBlockLanes>;

constexpr KeyTable make_keys(std::uint64_t seed) {
  KeyTable keys{};
  for (std::uint64_t i = 0; i < keys.size(); ++i) {
    keys[i] = mix(mix(seed + (i & kBlockMask) * kGolden));
  }
  return keys;
}

alignas(64) constexpr KeyTable kKeys0 = make_keys(kSeeds[0]);
alignas(64) constexpr KeyTable kKeys1 = make_keys(kSeeds[1]);

constexpr std::uint64_t block_shift(std::uint64_t block) {
  return mix(block ^ kShiftTweak) & kBlockMask;
}

constexpr std::uint64_t block_key(std::uint64_t block, std::size_t j) {
  return mix(mix(block) ^ kSeeds[j]);
}

constexpr std::uint64_t half_product(std::uint64_t z) { return (z & 0xFFFFFFFF) * (z >> 32); }

std::uint64_t load_lane(const std::uint8_t* data, std::uint64_t lane_bytes) {
  std::uint64_t value = 0;
  std::memcpy(&value, data, lane_bytes);
  return lane_bytes == 8 ? value : value * kNarrowSpread;
}

template <std::size_t kLaneBytes>
void run_scalar(const std::uint8_t* data, std::size_t lane_count, const AdditiveRun* run,
                std::uint64_t* sums) {
  std::uint64_t s0 = 0;
  std::uint64_t s1 = 0;
  for (std::size_t i = 0; i < lane_count; ++i) {
    const std::uint64_t x = load_lane(data + i * kLaneBytes, kLaneBytes);
    s0 += half_product(x ^ run->keys0[i] ^ run->block0) + x;
    s1 += half_product(x ^ run->keys1[i] ^ run->block1) + std::rotl(x, 32);
  }
  sums[0] += s0;
  sums[1] += s1;
}

void add(Sums& sums, const Sums& part) {
  sums.s0 += part.s0;
  sums.s1 += part.s1;
}

}  // namespace

Status check_lanes(std::uint64_t byte_count, std::uint64_t lane_bytes, std::uint64_t first_lane) {
  if (lane_bytes != 1 && lane_bytes != 2 && lane_bytes != 4 && lane_bytes != 8) {
    return Status::invalid_input("lane_bytes is " + std::to_string(lane_bytes) +
                                 "; it must be 1, 2, 4 or 8");
  }
  if (byte_count % lane_bytes != 0) {
    return Status::invalid_input(std::to_string(byte_count) + " bytes are not a whole number of " +
                                 std::to_string(lane_bytes) + "-byte lanes");
  }
  constexpr std::uint64_t kLaneMax = std::uint64_t{1} << 63;
  if (first_lane >= kLaneMax || byte_count / lane_bytes > kLaneMax - first_lane) {
    return Status::invalid_input("first_lane " + std::to_string(first_lane) +
                                 " is too large; lane numbers stay below 2**63");
  }
  return {};
}

Sums additive_oracle(std::span<const std::uint8_t> data, std::uint64_t lane_bytes,
                     std::uint64_t first_lane) {
  Sums sums;
  for (std::uint64_t offset = 0; offset < data.size(); offset += lane_bytes) {
    const std::uint64_t lane = first_lane + offset / lane_bytes;
    const std::uint64_t block = lane / kAdditiveBlockLanes;
    const std::uint64_t slot = ((lane & kBlockMask) + block_shift(block)) & kBlockMask;
    const std::uint64_t x = load_lane(data.data() + offset, lane_bytes);
    sums.s0 += half_product(x ^ kKeys0[slot] ^ block_key(block, 0)) + x;
    sums.s1 += half_product(x ^ kKeys1[slot] ^ block_key(block, 1)) + std::rotl(x, 32);
  }
  return sums;
}

Sums additive_sums(const Kernels& kernels, std::span<const std::uint8_t> data,
                   std::uint64_t lane_bytes, std::uint64_t first_lane) {
  const AdditiveFn run_lanes = kernels.additive[std::countr_zero(lane_bytes)];
  std::array<std::uint64_t, 2> sums = {0, 0};
  std::uint64_t lane = first_lane;
  const std::uint64_t end = first_lane + data.size() / lane_bytes;
  const std::uint8_t* cursor = data.data();
  while (lane < end) {
    const std::uint64_t block = lane / kAdditiveBlockLanes;
    const std::uint64_t start = lane & kBlockMask;
    const std::uint64_t count = std::min(kAdditiveBlockLanes - start, end - lane);
    const std::uint64_t slot = start + block_shift(block);
    const AdditiveRun run{kKeys0.data() + slot, kKeys1.data() + slot, block_key(block, 0),
                          block_key(block, 1)};
    run_lanes(cursor, count, &run, sums.data());
    cursor += count * lane_bytes;
    lane += count;
  }
  return {sums[0], sums[1]};
}

Sums additive_sums_threaded(const Kernels& kernels, std::span<const std::uint8_t> data,
                            std::uint64_t lane_bytes, std::uint64_t first_lane, unsigned threads) {
  constexpr std::size_t kPieceBytesMin = std::size_t{1} << 20;  // below this a thread costs more
  constexpr std::size_t kThreadsMax = 256;
  const std::size_t pieces = std::clamp<std::size_t>(
      data.size() / kPieceBytesMin, 1, std::clamp<std::size_t>(threads, 1, kThreadsMax));
  // Whole blocks per piece, so that only the ends of the range have part blocks.
  const std::size_t unit = kAdditiveBlockLanes * lane_bytes;
  const std::size_t piece_bytes = (data.size() / pieces + unit - 1) / unit * unit;
  std::vector<Sums> partial(pieces);
  auto work = [&](std::size_t index) {
    const std::size_t begin = std::min(index * piece_bytes, data.size());
    const std::size_t count = std::min(piece_bytes, data.size() - begin);
    partial[index] = additive_sums(kernels, data.subspan(begin, count), lane_bytes,
                                   first_lane + begin / lane_bytes);
  };
  std::vector<std::thread> workers;
  workers.reserve(pieces - 1);
  for (std::size_t index = 1; index < pieces; ++index) {
    try {
      workers.emplace_back(work, index);
    } catch (const std::system_error&) {
      work(index);  // the system has no thread to give: do the piece here
    }
  }
  work(0);
  for (std::thread& worker : workers) {
    worker.join();
  }
  Sums sums;
  for (const Sums& part : partial) {
    add(sums, part);
  }
  return sums;
}

Sums additive_updated(const Kernels& kernels, Sums sums, std::span<const std::uint8_t> old_data,
                      std::span<const std::uint8_t> new_data, std::uint64_t lane_bytes,
                      std::uint64_t first_lane) {
  constexpr std::size_t kPieceBytes = 1024;
  for (std::size_t begin = 0; begin < old_data.size(); begin += kPieceBytes) {
    const std::size_t count = std::min(kPieceBytes, old_data.size() - begin);
    const auto before = old_data.subspan(begin, count);
    const auto after = new_data.subspan(begin, count);
    if (std::memcmp(before.data(), after.data(), count) == 0) {
      continue;
    }
    const std::uint64_t lane = first_lane + begin / lane_bytes;
    const Sums removed = additive_sums(kernels, before, lane_bytes, lane);
    add(sums, additive_sums(kernels, after, lane_bytes, lane));
    sums.s0 -= removed.s0;
    sums.s1 -= removed.s1;
  }
  return sums;
}

void additive_run_scalar1(const std::uint8_t* data, std::size_t lane_count, const AdditiveRun* run,
                          std::uint64_t* sums) {
  run_scalar<1>(data, lane_count, run, sums);
}
void additive_run_scalar2(const std::uint8_t* data, std::size_t lane_count, const AdditiveRun* run,
                          std::uint64_t* sums) {
  run_scalar<2>(data, lane_count, run, sums);
}
void additive_run_scalar4(const std::uint8_t* data, std::size_t lane_count, const AdditiveRun* run,
                          std::uint64_t* sums) {
  run_scalar<4>(data, lane_count, run, sums);
}
void additive_run_scalar8(const std::uint8_t* data, std::size_t lane_count, const AdditiveRun* run,
                          std::uint64_t* sums) {
  run_scalar<8>(data, lane_count, run, sums);
}

}  // namespace stitch
