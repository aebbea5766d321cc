#include "core/safetensors_sax.hpp"

#include <algorithm>
#include <exception>
#include <new>
#include <nlohmann/json.hpp>

namespace stitch {
namespace {

using Json = nlohmann::json;

// Where in the document the parser stands. Anything deeper is refused, so nesting is bounded.
enum class Place : std::uint8_t {
  kOutside,
  kTop,       // inside the outer object
  kMetadata,  // inside "__metadata__"
  kTensor,    // inside one tensor's object
  kShape,
  kOffsets,
  kDone,
};

// Streams the document into entries. Returning false stops the parse; `failure()` says why.
class HeaderSax final : public nlohmann::json_sax<Json> {
 public:
  explicit HeaderSax(SafetensorsHeader& header) : header_(header) {}

  const Status& failure() const { return failure_; }

  bool null() override { return refuse_value("null"); }
  bool boolean(bool /*value*/) override { return refuse_value("a boolean"); }
  bool number_integer(number_integer_t /*value*/) override {
    return refuse_value("a negative number");
  }
  bool number_float(number_float_t /*value*/, const string_t& /*text*/) override {
    return refuse_value("a number that is no 64-bit integer");
  }
  bool binary(binary_t& /*value*/) override { return refuse_value("binary"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (place_ == Place::kShape) {
      if (header_.entries.back().shape.size() == kRankMax) {
        return fail(tensor() + ": shape has more than " + std::to_string(kRankMax) + " dimensions");
      }
      header_.entries.back().shape.push_back(value);
      return true;
    }
    if (place_ != Place::kOffsets) {
      return refuse_value("a number");
    }
    if (offset_count_ == 0) {
      header_.entries.back().begin = value;
    } else if (offset_count_ == 1) {
      header_.entries.back().end = value;
    } else {
      return fail(tensor() + ": data_offsets has more than 2 numbers");
    }
    ++offset_count_;
    return true;
  }

  bool string(string_t& value) override {
    if (place_ == Place::kMetadata) {
      header_.metadata.back().second = std::move(value);
      return true;
    }
    if (place_ != Place::kTensor || field_ != "dtype") {
      return refuse_value("a string");
    }
    header_.entries.back().dtype = std::move(value);
    return true;
  }

  bool start_object(std::size_t /*count*/) override {
    if (place_ == Place::kOutside) {
      place_ = Place::kTop;
      return true;
    }
    if (place_ != Place::kTop) {
      return refuse_value("an object");
    }
    if (field_ == "__metadata__") {
      place_ = Place::kMetadata;
      return true;
    }
    place_ = Place::kTensor;
    header_.entries.emplace_back().name = field_;
    has_dtype_ = has_shape_ = has_offsets_ = false;
    return true;
  }

  bool key(string_t& name) override {
    if (name.find('\0') != std::string::npos) {
      return fail("a name contains a NUL character: " + quote_name(name));
    }
    if (place_ == Place::kMetadata) {
      header_.metadata.emplace_back(std::move(name), std::string());
      return true;
    }
    field_ = std::move(name);
    if (place_ == Place::kTop) {
      if (field_ == "__metadata__") {
        if (has_metadata_) {
          return fail("duplicate name '__metadata__'");
        }
        has_metadata_ = true;
      }
      return true;
    }
    bool* const seen = field_ == "dtype"          ? &has_dtype_
                       : field_ == "shape"        ? &has_shape_
                       : field_ == "data_offsets" ? &has_offsets_
                                                  : nullptr;
    if (seen == nullptr) {
      return fail(tensor() + ": unexpected key " + quote_name(field_));
    }
    if (*seen) {
      return fail(tensor() + ": duplicate name " + quote_name(field_));
    }
    *seen = true;
    return true;
  }

  bool end_object() override {
    if (place_ == Place::kTensor) {
      if (!has_dtype_ || !has_shape_ || !has_offsets_) {
        return fail(tensor() + ": lacks " +
                    (!has_dtype_   ? "dtype"
                     : !has_shape_ ? "shape"
                                   : "data_offsets"));
      }
      place_ = Place::kTop;
    } else {
      place_ = place_ == Place::kMetadata ? Place::kTop : Place::kDone;
    }
    return true;
  }

  bool start_array(std::size_t /*count*/) override {
    if (place_ == Place::kTensor && field_ == "shape") {
      place_ = Place::kShape;
      return true;
    }
    if (place_ == Place::kTensor && field_ == "data_offsets") {
      place_ = Place::kOffsets;
      offset_count_ = 0;
      return true;
    }
    return refuse_value("an array");
  }

  bool end_array() override {
    if (place_ == Place::kOffsets && offset_count_ != 2) {
      return fail(tensor() + ": data_offsets has " + std::to_string(offset_count_) +
                  " numbers, it needs 2");
    }
    place_ = Place::kTensor;
    return true;
  }

  bool parse_error(std::size_t position, const std::string& /*last_token*/,
                   const nlohmann::detail::exception& /*error*/) override {
    // Covers invalid UTF-8, lone surrogates, and text after the document as well.
    return fail("header is not valid UTF-8 JSON at byte " + std::to_string(position));
  }

 private:
  bool fail(std::string message) {
    failure_ = Status::corrupt("safetensors " + std::move(message));
    return false;
  }

  bool refuse_value(const char* what) {
    switch (place_) {
      case Place::kMetadata:
        return fail("__metadata__ " + quote_name(header_.metadata.back().first) + " is " + what +
                    ", it must be a string");
      case Place::kTensor:
        return fail(tensor() + ": " + field_ + " is " + what);
      case Place::kShape:
        return fail(tensor() + ": shape holds " + what);
      case Place::kOffsets:
        return fail(tensor() + ": data_offsets holds " + what);
      case Place::kTop:
        return fail("entry " + quote_name(field_) + " is " + what + ", it must be an object");
      case Place::kOutside:
      case Place::kDone:
        break;
    }
    return fail(std::string("header is ") + what + ", it must be an object");
  }

  std::string tensor() const { return "tensor " + quote_name(header_.entries.back().name); }

  SafetensorsHeader& header_;
  Status failure_;
  Place place_ = Place::kOutside;
  std::string field_;
  unsigned offset_count_ = 0;
  bool has_metadata_ = false;
  bool has_dtype_ = false;
  bool has_shape_ = false;
  bool has_offsets_ = false;
};

// Sorting, not hashing: names chosen to collide cost nothing extra.
template <typename Items, typename NameOf>
Status check_unique(const Items& items, const char* kind, NameOf name_of) {
  std::vector<std::string_view> names;
  names.reserve(items.size());
  for (const auto& item : items) {
    names.push_back(name_of(item));
  }
  std::sort(names.begin(), names.end());
  const auto twin = std::adjacent_find(names.begin(), names.end());
  if (twin != names.end()) {
    return Status::corrupt(std::string("safetensors ") + kind + ": duplicate name " +
                           quote_name(*twin));
  }
  return {};
}

}  // namespace

Status parse_header_json(std::string_view text, SafetensorsHeader& header) {
  // The JSON library takes a NUL for the end of the text and would not look at what follows.
  if (const std::size_t nul = text.find('\0'); nul != std::string_view::npos) {
    return Status::corrupt("safetensors header is not valid JSON: NUL at byte " +
                           std::to_string(nul));
  }
  HeaderSax sax(header);
  try {
    if (!Json::sax_parse(text, &sax)) {
      return sax.failure();
    }
  } catch (const std::bad_alloc&) {
    return Status::out_of_memory("no memory to parse a safetensors header");
  } catch (const std::exception& error) {
    return Status::internal(std::string("safetensors header parser: ") + error.what());
  }
  if (Status status = check_unique(header.entries, "tensors",
                                   [](const TensorEntry& e) { return std::string_view(e.name); });
      !status.ok()) {
    return status;
  }
  return check_unique(header.metadata, "__metadata__",
                      [](const auto& pair) { return std::string_view(pair.first); });
}

}  // namespace stitch
