// How the native core reports failure: a frozen code plus a sentence. Nothing in core throws.
// Thread-safety: values; share them as you would a std::string.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace stitch {

// Numbers are frozen: bindings and logs may keep them. Never renumber, only append.
enum class StatusCode : std::uint8_t {
  kOk = 0,
  kInvalidInput = 1,  // the caller's mistake
  kCorruptData = 2,   // bytes from outside that break their format
  kUnsupported = 3,   // well-formed, but not something this build can do
  kOutOfMemory = 4,   // an allocation was refused
  kInternal = 5,      // a bug in Stitch; becomes AssertionError at the edge
};

class [[nodiscard]] Status {
 public:
  Status() = default;

  static Status invalid_input(std::string message) {
    return {StatusCode::kInvalidInput, std::move(message)};
  }
  static Status corrupt(std::string message) {
    return {StatusCode::kCorruptData, std::move(message)};
  }
  static Status unsupported(std::string message) {
    return {StatusCode::kUnsupported, std::move(message)};
  }
  static Status out_of_memory(std::string message) {
    return {StatusCode::kOutOfMemory, std::move(message)};
  }
  static Status internal(std::string message) {
    return {StatusCode::kInternal, std::move(message)};
  }

  bool ok() const noexcept { return code_ == StatusCode::kOk; }
  StatusCode code() const noexcept { return code_; }
  const std::string& message() const noexcept { return message_; }

 private:
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

// A value or the reason there is none. `value()` may be called only when `ok()`.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}          // NOLINT(google-explicit-constructor)
  Result(Status status) : status_(std::move(status)) {}  // NOLINT(google-explicit-constructor)

  bool ok() const noexcept { return value_.has_value(); }
  const Status& status() const noexcept { return status_; }
  T& value() noexcept { return *value_; }
  const T& value() const noexcept { return *value_; }

 private:
  Status status_;
  std::optional<T> value_;
};

}  // namespace stitch
