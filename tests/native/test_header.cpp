// The safetensors header parser on its own: the Python tests hold the long list of damage, this
// file runs the main kinds under the sanitizers.
#include <cstring>

#include "check.hpp"
#include "core/safetensors.hpp"

namespace stitch::test {
namespace {

Bytes file_head(std::string_view json) {
  Bytes head(kHeaderLengthBytes + json.size());
  const std::uint64_t length = json.size();
  std::memcpy(head.data(), &length, sizeof length);
  std::memcpy(head.data() + sizeof length, json.data(), json.size());
  return head;
}

Result<SafetensorsHeader> parse(std::string_view json, std::uint64_t data_size) {
  const Bytes head = file_head(json);
  return parse_safetensors_header(head, head.size() + data_size);
}

}  // namespace

void test_header(Checks& checks) {
  const auto good =
      parse(R"({"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},"__metadata__":{"k":"v"},)"
            R"("a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}})",
            16);
  checks.that(good.ok() && good.value().entries.size() == 2 &&
                  good.value().entries[0].name == "a" && good.value().metadata.size() == 1,
              "a good header");
  const auto refuse = [&](std::string_view json, std::uint64_t size, std::string_view words) {
    checks.corrupt(parse(json, size).status(), words);
  };
  refuse("", 0, "start with");
  refuse("[]", 0, "start with");
  refuse("{", 0, "JSON");
  refuse(std::string(200'000, '{'), 0, "JSON");
  refuse("{\"a\":" + std::string(200'000, '['), 0, "array");
  refuse("{\"\xff\":1}", 0, "JSON");
  refuse(std::string_view("{}\0{}", 5), 0, "NUL");
  refuse(R"({"a":{"dtype":"F4_X","shape":[4],"data_offsets":[0,2]}})", 2, "F4_X");
  refuse(R"({"a":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}})", 2, "inside a byte");
  refuse(R"({"a":{"dtype":"U8","shape":[9223372036854775807,3],"data_offsets":[0,1]}})", 1,
         "overflow");
  refuse(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[18446744073709551615,0]}})", 1,
         "begins after");
  refuse(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,18446744073709551616]}})", 1,
         "no 64-bit integer");
  refuse(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})", 1, "past");
  refuse(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})", 3, "trailing");
  refuse(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})", 3, "gap");
  Bytes huge(8, 0xFF);
  checks.corrupt(safetensors_header_size(huge, ~std::uint64_t{0}).status(), "100 MiB");
  checks.that(
      safetensors_header_size({huge.data(), 3}, 100).status().code() == StatusCode::kInvalidInput,
      "too few bytes given");
  checks.that(quote_name(std::string(1000, 'x')).size() < 200, "names are shown bounded");
}

}  // namespace stitch::test
