// Which instruction-set variant runs: chosen once by CPU and OS support, or by STITCH_ISA.
// Thread-safety: all functions may be called from any thread.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "core/kernels.hpp"
#include "core/status.hpp"

namespace stitch {

// The variant in use. InvalidInput if STITCH_ISA names one that is unknown or can't run here.
Result<const Kernels*> active_kernels();

// Forces a variant for the process; InvalidInput as above.
Status force_kernels(std::string_view name);

// Variants that this build has and this machine can run, best first; "scalar" is last.
std::vector<const Kernels*> runnable_kernels();

}  // namespace stitch
