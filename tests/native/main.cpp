// Runs the native tests for every variant that this machine can run, then the fuzzers.
// usage: stitch_native_tests CORPUS_FOLDER [FUZZ_SECONDS_PER_TARGET [SEED]]
#include <cstdlib>

#include "check.hpp"
#include "cpu/dispatch.hpp"

int main(int argc, char** argv) {
  using namespace stitch;
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s CORPUS_FOLDER [FUZZ_SECONDS_PER_TARGET [SEED]]\n", argv[0]);
    return 2;
  }
  const double seconds = argc > 2 ? std::strtod(argv[2], nullptr) : 5.0;
  const std::uint64_t seed = argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 1;
  const auto active = active_kernels();
  if (!active.ok()) {
    std::fprintf(stderr, "%s\n", active.status().message().c_str());
    return 2;
  }
  test::Checks checks;
  std::string covered;
  for (const Kernels* kernels : runnable_kernels()) {
    const std::string variant = kernels->name;
    covered += (covered.empty() ? "" : ", ") + variant;
    checks.begin("additive/" + variant);
    test::test_additive(checks, *kernels);
    checks.begin("threads/" + variant);
    test::test_threads(checks, *kernels);
    checks.begin("loops/" + variant);
    test::test_loops(checks, *kernels);
    checks.begin("delta/" + variant);
    test::test_delta(checks, *kernels);
  }
  checks.begin("frame");
  test::test_frame(checks);
  checks.begin("header");
  test::test_header(checks);
  checks.begin("fuzz");
  test::fuzz(checks, *active.value(), argv[1], seconds, seed);
  std::printf("variants covered: %s\n%llu checks, %llu failed\n", covered.c_str(),
              static_cast<unsigned long long>(checks.count()),
              static_cast<unsigned long long>(checks.failed()));
  return checks.failed() == 0 ? 0 : 1;
}
