// A test harness of one page: named cases, checks that count and print, no dependency.
// Thread-safety: check from the main thread only.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "core/kernels.hpp"
#include "core/status.hpp"

namespace stitch::test {

class Checks {
 public:
  void begin(std::string_view name) { name_ = name; }

  void that(bool holds, std::string_view what) {
    ++count_;
    if (!holds) {
      ++failed_;
      std::fprintf(stderr, "FAILED %s: %.*s\n", name_.c_str(), static_cast<int>(what.size()),
                   what.data());
    }
  }

  // The status must be CorruptData and its message must contain `words`.
  void corrupt(const Status& status, std::string_view words) {
    that(status.code() == StatusCode::kCorruptData &&
             status.message().find(words) != std::string::npos,
         "expected CorruptData with '" + std::string(words) + "', got '" + status.message() + "'");
  }

  std::uint64_t count() const { return count_; }
  std::uint64_t failed() const { return failed_; }

 private:
  std::string name_;
  std::uint64_t count_ = 0;
  std::uint64_t failed_ = 0;
};

using Bytes = std::vector<std::uint8_t>;

// splitmix64: small, seeded, the same everywhere.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() {
    state_ += 0x9E3779B97F4A7C15;
    std::uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
  }
  std::uint64_t below(std::uint64_t bound) { return bound == 0 ? 0 : next() % bound; }
  Bytes bytes(std::size_t count) {
    Bytes data(count);
    for (std::uint8_t& byte : data) {
      byte = static_cast<std::uint8_t>(next());
    }
    return data;
  }

 private:
  std::uint64_t state_;
};

// One function per test file; those that depend on the variant take its table.
void test_additive(Checks& checks, const Kernels& kernels);
void test_threads(Checks& checks, const Kernels& kernels);
void test_loops(Checks& checks, const Kernels& kernels);
void test_delta(Checks& checks, const Kernels& kernels);
void test_frame(Checks& checks);
void test_header(Checks& checks);

// Replays every corpus file, then mutates for `seconds` per target.
void fuzz(Checks& checks, const Kernels& kernels, const std::string& corpus, double seconds,
          std::uint64_t seed);

}  // namespace stitch::test
