// The tables that the variant files export. Private to csrc/cpu; plain declarations only, because
// files built with wide-vector flags include it.
#pragma once

#include "core/kernels.hpp"

namespace stitch {

// Runs of zero delta this long are not written in place. Shorter runs would be skipped more often,
// but at 1 % changed elements a branch per cache line is mispredicted so much that it costs more
// than the stores it saves (measured on Zen 5: 3.1 against 4.2 GB/s for the whole apply).
enum : size_t { kXorSkipBytes = 512 };

extern const Kernels kScalarKernels;
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;

}  // namespace stitch
