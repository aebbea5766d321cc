// The edge between Python and the core: buffer exports, the unlocked region, and the one mapping
// from Status to Python exceptions.
// Thread-safety: everything here needs the GIL unless it says otherwise.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <span>
#include <utility>

#include "core/status.hpp"

namespace stitch::bind {

namespace py = pybind11;

// Raises the class of `stitch.errors` that fits; MemoryError and AssertionError for the rest.
[[noreturn]] void raise_status(const Status& status);

inline void raise_if_error(const Status& status) {
  if (!status.ok()) {
    raise_status(status);
  }
}

// Runs `work` without the GIL and returns its Status or Result.
template <typename Work>
auto unlocked(Work&& work) {
  const py::gil_scoped_release released;
  return std::forward<Work>(work)();
}

template <typename T>
T value_or_raise(Result<T>&& result) {
  raise_if_error(result.status());
  return std::move(result.value());
}

// One C-contiguous buffer export, held until the view dies, so the bytes outlive the unlocked
// region. TypeError for non-buffers, strided ones, and read-only ones where kWritable.
template <bool kWritable>
class ByteView {
 public:
  using Byte = std::conditional_t<kWritable, std::uint8_t, const std::uint8_t>;

  ByteView(const py::object& object, const char* argument);
  ~ByteView() { PyBuffer_Release(&view_); }
  ByteView(const ByteView&) = delete;
  ByteView& operator=(const ByteView&) = delete;
  ByteView(ByteView&&) = delete;
  ByteView& operator=(ByteView&&) = delete;

  // May be called without the GIL.
  std::span<Byte> span() const noexcept {
    return {static_cast<Byte*>(view_.buf), static_cast<std::size_t>(view_.len)};
  }

 private:
  Py_buffer view_{};
};

using InputView = ByteView<false>;
using OutputView = ByteView<true>;

}  // namespace stitch::bind
