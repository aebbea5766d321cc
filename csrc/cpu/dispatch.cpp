#include "cpu/dispatch.hpp"

#include <array>
#include <atomic>
#include <cstdlib>
#include <string>

#include "cpu/variants.hpp"

namespace stitch {
namespace {

// GCC's and Clang's feature test reads CPUID and XGETBV, so the operating system's say counts.
bool machine_runs(const Kernels& kernels) {
#if defined(STITCH_X86_VARIANTS)
  __builtin_cpu_init();
  if (&kernels == &kAvx2Kernels) {
    return __builtin_cpu_supports("avx2") != 0;
  }
  if (&kernels == &kAvx512Kernels) {
    return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
           __builtin_cpu_supports("avx512vl") != 0 && __builtin_cpu_supports("avx512dq") != 0;
  }
#endif
  return &kernels == &kScalarKernels;
}

// Best first.
constexpr std::array kBuilt = {
#if defined(STITCH_X86_VARIANTS)
    &kAvx512Kernels,
    &kAvx2Kernels,
#endif
    &kScalarKernels,
};

std::string known_names(bool runnable_only) {
  std::string names;
  for (const Kernels* kernels : kBuilt) {
    if (!runnable_only || machine_runs(*kernels)) {
      names += (names.empty() ? "" : ", ") + std::string(kernels->name);
    }
  }
  return names;
}

Result<const Kernels*> find_kernels(std::string_view name) {
  for (const Kernels* kernels : kBuilt) {
    if (name != kernels->name) {
      continue;
    }
    if (!machine_runs(*kernels)) {
      return Status::invalid_input("instruction set '" + std::string(name) +
                                   "' does not run on this machine; it runs " + known_names(true));
    }
    return kernels;
  }
  return Status::invalid_input("unknown instruction set '" + std::string(name.substr(0, 40)) +
                               "'; this build has " + known_names(false));
}

Result<const Kernels*> choose_kernels() {
  const char* const forced = std::getenv("STITCH_ISA");
  if (forced == nullptr || *forced == '\0') {
    return runnable_kernels().front();
  }
  auto found = find_kernels(forced);
  if (!found.ok()) {
    return Status::invalid_input("STITCH_ISA: " + found.status().message());
  }
  return found;
}

// The one mutable cell: tests force a variant through it. Null until the first use.
std::atomic<const Kernels*>& forced_kernels() {
  static std::atomic<const Kernels*> cell = nullptr;
  return cell;
}

}  // namespace

Result<const Kernels*> active_kernels() {
  if (const Kernels* const forced = forced_kernels().load(std::memory_order_relaxed)) {
    return forced;
  }
  static const Result<const Kernels*> chosen = choose_kernels();
  return chosen;
}

Status force_kernels(std::string_view name) {
  const auto found = find_kernels(name);
  if (found.ok()) {
    forced_kernels().store(found.value(), std::memory_order_relaxed);
  }
  return found.status();
}

std::vector<const Kernels*> runnable_kernels() {
  std::vector<const Kernels*> runnable;
  for (const Kernels* kernels : kBuilt) {
    if (machine_runs(*kernels)) {
      runnable.push_back(kernels);
    }
  }
  return runnable;
}

}  // namespace stitch
