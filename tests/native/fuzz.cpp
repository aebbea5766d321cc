// Time-bounded mutation fuzzing of the three parsers of untrusted bytes. An input that crashes is
// written to ./crash-<target> by the sanitizer's death callback; move it into corpus/.
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>

#include "check.hpp"
#include "core/delta.hpp"
#include "core/safetensors.hpp"

#if defined(__SANITIZE_ADDRESS__)
extern "C" void __sanitizer_set_death_callback(void (*callback)());
#endif

namespace stitch::test {
namespace {

constexpr std::size_t kTensorBytes = 3000;

struct Target {
  std::string name;
  std::vector<Bytes> seeds;
  std::function<bool(const Bytes&)> run;  // false breaks an invariant
};

// The input in flight, for the death callback.
struct InFlight {
  const Target* target = nullptr;
  const Bytes* input = nullptr;
};
InFlight& in_flight() {
  static InFlight cell;
  return cell;
}

void save_in_flight() {
  const auto [target, input] = in_flight();
  if (target != nullptr && input != nullptr) {
    std::ofstream file("crash-" + target->name, std::ios::binary);
    file.write(reinterpret_cast<const char*>(input->data()),
               static_cast<std::streamsize>(input->size()));
  }
}

const Bytes& base_tensor() {
  static const Bytes base = Random(6).bytes(kTensorBytes);
  return base;
}

template <typename Apply>
bool apply_holds(const Kernels& kernels, Apply apply, const Bytes& blob) {
  const VerifyPlan plan{DigestKind::kXxh3, 4};
  Bytes in_place = base_tensor();
  const auto applied = apply(kernels, blob, in_place, in_place, plan);
  if (!applied.ok()) {
    return applied.status().code() == StatusCode::kCorruptData && in_place == base_tensor();
  }
  const auto again = digest_verify(kernels, in_place, plan);
  Bytes out(kTensorBytes);
  const auto apart = apply(kernels, blob, base_tensor(), out, plan);
  return again.ok() && apart.ok() && out == in_place &&
         again.value().digest_hex == applied.value().digest_hex &&
         apart.value().digest_hex == applied.value().digest_hex &&
         again.value().sums == applied.value().sums;
}

bool header_holds(const Bytes& input) {
  const auto parsed = parse_safetensors_header(input, input.size() + 24);
  if (!parsed.ok()) {
    return parsed.status().code() == StatusCode::kCorruptData ||
           parsed.status().code() == StatusCode::kInvalidInput;
  }
  std::uint64_t next = 0;
  for (const TensorEntry& entry : parsed.value().entries) {
    if (entry.begin != next) {
      return false;
    }
    next = entry.end;
  }
  return next == input.size() + 24 - parsed.value().data_offset;
}

Bytes frame_of(const Bytes& data) {
  FrameWriter writer;
  if (!writer.open(1, data.size()).ok() || !writer.write(data, true).ok()) {
    return {};
  }
  const auto span = writer.output().span();
  return {span.begin(), span.end()};
}

Bytes header_seed(std::string_view json) {
  Bytes head(8 + json.size());
  const std::uint64_t length = json.size();
  std::memcpy(head.data(), &length, sizeof length);
  std::memcpy(head.data() + 8, json.data(), json.size());
  return head;
}

std::vector<Target> make_targets(const Kernels& kernels) {
  Random random(7);
  Bytes delta(kTensorBytes, 0);
  Bytes payload = {40, 0, 0, 0};
  for (std::uint32_t i = 0; i < 40; ++i) {
    delta[i * 70] = static_cast<std::uint8_t>(random.next());
    const std::uint32_t position = i * 70;
    payload.resize(payload.size() + sizeof position);
    std::memcpy(payload.data() + payload.size() - sizeof position, &position, sizeof position);
  }
  payload.resize(payload.size() + 40, 3);
  return {
      {"header",
       {header_seed(R"({"__metadata__":{"k":"v"},"a":{"dtype":"U8","shape":[2,4],)"
                    R"("data_offsets":[0,8]},"b":{"dtype":"F32","shape":[4],)"
                    R"("data_offsets":[8,24]}})")},
       header_holds},
      {"xor",
       {frame_of(delta), frame_of(random.bytes(kTensorBytes))},
       [&kernels](const Bytes& input) { return apply_holds(kernels, xor_apply, input); }},
      {"overwrite",
       {frame_of(payload)},
       [&kernels](const Bytes& input) { return apply_holds(kernels, overwrite_apply, input); }},
      // Mutated before it is compressed, so that mutations reach the payload's own rules.
      {"overwrite-payload",
       {payload},
       [&kernels](const Bytes& input) {
         return apply_holds(kernels, overwrite_apply, frame_of(input));
       }},
  };
}

void mutate(Bytes& input, const Bytes& other, Random& random) {
  const std::uint64_t rounds = 1 + random.below(6);
  for (std::uint64_t round = 0; round < rounds; ++round) {
    const std::size_t at = random.below(input.size() + 1);
    const auto place = input.begin() + static_cast<std::ptrdiff_t>(at);
    switch (random.below(7)) {
      case 0:
        if (at < input.size()) {
          input[at] ^= static_cast<std::uint8_t>(1U << random.below(8));
        }
        break;
      case 1:
        if (at < input.size()) {
          input[at] = static_cast<std::uint8_t>(random.next());
        }
        break;
      case 2:
        input.insert(place, static_cast<std::uint8_t>(random.next()));
        break;
      case 3:
        input.resize(at);
        break;
      case 4: {
        const std::size_t count = std::min<std::size_t>(random.below(9), input.size() - at);
        input.erase(place, place + static_cast<std::ptrdiff_t>(count));
        break;
      }
      case 5: {  // a piece of another seed
        const std::size_t from = random.below(other.size());
        const std::size_t count = std::min<std::size_t>(random.below(30), other.size() - from);
        const Bytes piece(other.begin() + static_cast<std::ptrdiff_t>(from),
                          other.begin() + static_cast<std::ptrdiff_t>(from + count));
        input.insert(place, piece.begin(), piece.end());
        break;
      }
      default: {  // an extreme number
        constexpr std::uint64_t kExtremes[] = {0, 1, 0x7FFFFFFF, 0xFFFFFFFF, ~std::uint64_t{0}};
        const std::uint64_t value = kExtremes[random.below(5)];
        const std::size_t count = std::min<std::size_t>(sizeof value, input.size() - at);
        if (count > 0) {
          std::memcpy(input.data() + at, &value, count);
        }
        break;
      }
    }
  }
}

bool run_one(const Target& target, const Bytes& input) {
  in_flight() = {&target, &input};
  const bool holds = target.run(input);
  in_flight() = {};
  return holds;
}

void replay(Checks& checks, std::vector<Target>& targets, const std::string& corpus) {
  for (const auto& file : std::filesystem::directory_iterator(corpus)) {
    const std::string name = file.path().filename().string();
    std::ifstream stream(file.path(), std::ios::binary);
    const Bytes input((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());
    bool claimed = false;
    for (Target& target : targets) {
      if (name.starts_with(target.name + ".")) {
        checks.that(run_one(target, input), "corpus " + name);
        target.seeds.push_back(input);
        claimed = true;
      }
    }
    checks.that(claimed, "corpus file " + name + " is named <target>.<what>");
  }
}

}  // namespace

void fuzz(Checks& checks, const Kernels& kernels, const std::string& corpus, double seconds,
          std::uint64_t seed) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_set_death_callback(save_in_flight);
#endif
  std::vector<Target> targets = make_targets(kernels);
  replay(checks, targets, corpus);
  using Clock = std::chrono::steady_clock;
  for (const Target& target : targets) {
    Random random(seed);
    std::uint64_t runs = 0;
    const auto end = Clock::now() + std::chrono::duration<double>(seconds);
    while (Clock::now() < end) {
      Bytes input = target.seeds[random.below(target.seeds.size())];
      mutate(input, target.seeds[random.below(target.seeds.size())], random);
      ++runs;
      if (!run_one(target, input)) {
        in_flight() = {&target, &input};
        save_in_flight();
        in_flight() = {};
        checks.that(false, "invariant broken; input saved as crash-" + target.name);
        break;
      }
    }
    std::printf("fuzz %-18s %8llu inputs, seed %llu\n", target.name.c_str(),
                static_cast<unsigned long long>(runs), static_cast<unsigned long long>(seed));
  }
}

}  // namespace stitch::test
