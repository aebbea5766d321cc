// The additive checksum: golden values, variants against the oracle, partial sums, threads.
#include <array>
#include <thread>

#include "check.hpp"
#include "core/additive.hpp"

namespace stitch::test {
namespace {

constexpr std::array<std::uint64_t, 4> kLaneBytes = {1, 2, 4, 8};

// docs/format.md prints the same vectors.
struct Golden {
  std::size_t size;
  std::uint64_t lane_bytes;
  std::uint64_t first_lane;
  Sums sums;
};
constexpr std::array kGolden = {
    Golden{0, 8, 0, {0x0000000000000000, 0x0000000000000000}},
    Golden{1, 1, 0, {0x6B25C47DEC43639F, 0x8DA0935493B11387}},
    Golden{8, 8, 0, {0x131CFA7E68132DB7, 0x962627158A9CF523}},
    Golden{8, 4, 0, {0xE49861630272DC93, 0x300633C51A1B932E}},
    Golden{8, 2, 0, {0xD09A34FF0E45ECB7, 0x84B0A6EE4A7CE4D6}},
    Golden{8, 1, 0, {0x1644536D36DC3D29, 0x5A06B4C2C1330C4D}},
    Golden{4096, 8, 0, {0x696F04597E16ECC6, 0x703894FBC8A79D4F}},
    Golden{4104, 8, 0, {0x1832995F6CBC7D77, 0x70DDF11F1265A192}},
    Golden{1024, 2, 300, {0xC036FC6AE42369E0, 0x45D56511090488B6}},
    Golden{24, 8, 510, {0xF3018F6B66478309, 0x7CB90B1EB432E3B4}},
    Golden{5000, 4, 8589934585, {0xF1076DA4583BD75F, 0xB198188FAC6D877E}},
    Golden{777, 1, 1099511627776, {0x2331ABB44F0A8F75, 0x94BBEC498A878744}},
};

Bytes pattern(std::size_t size) {
  Bytes data(size);
  for (std::size_t i = 0; i < size; ++i) {
    data[i] = static_cast<std::uint8_t>(i * 131 + (i >> 8) * 17 + 7);
  }
  return data;
}

}  // namespace

void test_additive(Checks& checks, const Kernels& kernels) {
  for (const Golden& golden : kGolden) {
    const Bytes data = pattern(golden.size);
    checks.that(additive_oracle(data, golden.lane_bytes, golden.first_lane) == golden.sums,
                "oracle, " + std::to_string(golden.size) + " bytes");
    checks.that(additive_sums(kernels, data, golden.lane_bytes, golden.first_lane) == golden.sums,
                "variant, " + std::to_string(golden.size) + " bytes");
  }
  Random random(1);
  const Bytes backing = random.bytes(5000 * 8);
  for (const std::uint64_t lane_bytes : kLaneBytes) {
    for (std::size_t lanes = 0; lanes < 4000; lanes += lanes < 140 ? 1 : 61) {
      // An exact heap copy, so that a read past the end is a sanitizer error.
      const std::size_t skip = random.below(9);
      const Bytes data(backing.begin() + static_cast<std::ptrdiff_t>(skip),
                       backing.begin() + static_cast<std::ptrdiff_t>(skip + lanes * lane_bytes));
      const std::uint64_t first = random.below(3) == 0 ? 0 : random.next() >> 2;
      checks.that(additive_sums(kernels, data, lane_bytes, first) ==
                      additive_oracle(data, lane_bytes, first),
                  "lanes " + std::to_string(lanes) + " of " + std::to_string(lane_bytes));
    }
  }
  const Bytes before = random.bytes(8192);
  Bytes after = before;
  after[5000] ^= 1;
  const Sums sums = additive_sums(kernels, before, 8, 3);
  checks.that(
      additive_updated(kernels, sums, before, after, 8, 3) == additive_sums(kernels, after, 8, 3),
      "update equals the full sum");
  checks.that(!check_lanes(8, 3, 0).ok(), "lane of 3 bytes");
  checks.that(!check_lanes(9, 8, 0).ok(), "part of a lane");
  checks.that(!check_lanes(8, 8, ~std::uint64_t{0}).ok(), "lane number overflow");
}

void test_threads(Checks& checks, const Kernels& kernels) {
  Random random(2);
  const Bytes data = random.bytes((std::size_t{3} << 20) + 8);
  const Sums expected = additive_sums(kernels, data, 8, 5);
  std::array<Sums, 4> found;
  std::array<std::thread, 4> callers;
  for (std::size_t i = 0; i < callers.size(); ++i) {
    callers[i] = std::thread([&, i] {
      found[i] = additive_sums_threaded(kernels, data, 8, 5, static_cast<unsigned>(i + 1));
    });
  }
  for (std::thread& caller : callers) {
    caller.join();
  }
  for (const Sums& sums : found) {
    checks.that(sums == expected, "threaded sum");
  }
}

}  // namespace stitch::test
