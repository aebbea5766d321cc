// The JSON half of the safetensors header: text to entries, structure checked, spans not yet.
// Private to csrc/core. Thread-safety: pure function.
#pragma once

#include <string_view>

#include "core/safetensors.hpp"

namespace stitch {

// Fills entries (in file order) and metadata. `text` starts with '{'.
Status parse_header_json(std::string_view text, SafetensorsHeader& header);

}  // namespace stitch
