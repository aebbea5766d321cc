// The tables that the variant files export. Private to csrc/cpu; plain declarations only, because
// files built with wide-vector flags include it.
#pragma once

#include "core/kernels.hpp"

namespace stitch {

extern const Kernels kScalarKernels;
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;

}  // namespace stitch
