// stitch._core: the Python face of the native core. python/stitch/_core.pyi states its contract
// and changes with it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

#include "bind/edge.hpp"
#include "core/additive.hpp"
#include "core/delta.hpp"
#include "core/digest.hpp"
#include "core/frame.hpp"
#include "core/safetensors.hpp"
#include "cpu/dispatch.hpp"

namespace stitch::bind {
namespace {

using PySums = std::pair<std::uint64_t, std::uint64_t>;

const Kernels& kernels() { return *value_or_raise(active_kernels()); }

py::bytes to_bytes(const ByteBuffer& buffer) {
  return {reinterpret_cast<const char*>(buffer.data()), buffer.size()};
}

py::object to_optional_bytes(const std::optional<ByteBuffer>& buffer) {
  return buffer.has_value() ? py::object(to_bytes(*buffer)) : py::object(py::none());
}

// Sizes and lane numbers arrive as signed so that a negative one is InvalidInput, not TypeError.
std::uint64_t non_negative(std::int64_t value, const char* argument) {
  if (value < 0) {
    raise_status(Status::invalid_input(std::string(argument) + " is " + std::to_string(value) +
                                       "; it must not be negative"));
  }
  return static_cast<std::uint64_t>(value);
}

VerifyPlan plan_from(const std::string& digest, std::int64_t lane_bytes) {
  return {value_or_raise(parse_digest_kind(digest)), non_negative(lane_bytes, "lane_bytes")};
}

py::tuple to_tuple(const Verified& verified, const VerifyPlan& plan) {
  const py::object digest = plan.digest == DigestKind::kNone
                                ? py::object(py::none())
                                : py::object(py::str(verified.digest_hex));
  const py::object sums = plan.lane_bytes == 0
                              ? py::object(py::none())
                              : py::cast(PySums(verified.sums.s0, verified.sums.s1));
  return py::make_tuple(digest, sums);
}

std::string digest_of(const py::object& data, DigestKind kind) {
  const InputView view(data, "data");
  Digester digester(kernels(), kind);
  unlocked([&] { digester.update(view.span()); });
  return digester.hex();
}

class PyHasher {
 public:
  explicit PyHasher(const std::string& kind)
      : digester_(kernels(), value_or_raise(parse_digest_kind(kind))) {
    if (digester_.kind() == DigestKind::kNone) {
      raise_status(Status::invalid_input("a Hasher needs xxh3-128 or adler32, not none"));
    }
  }

  void update(const py::object& data) {
    const InputView view(data, "data");
    if (busy_) {
      raise_status(Status::invalid_input("this Hasher is being updated by another thread"));
    }
    busy_ = true;
    unlocked([&] { digester_.update(view.span()); });
    busy_ = false;
  }

  std::string hexdigest() const {
    if (busy_) {
      raise_status(Status::invalid_input("this Hasher is being updated by another thread"));
    }
    return digester_.hex();
  }

 private:
  Digester digester_;
  bool busy_ = false;  // guarded by the GIL
};

PySums py_additive(const py::object& data, std::int64_t lane_bytes, std::int64_t first_lane,
                   std::int64_t threads) {
  const InputView view(data, "data");
  const std::uint64_t lane = non_negative(lane_bytes, "lane_bytes");
  const std::uint64_t first = non_negative(first_lane, "first_lane");
  if (threads < 1) {
    raise_status(Status::invalid_input("threads must be at least 1"));
  }
  raise_if_error(check_lanes(view.span().size(), lane, first));
  const Kernels& table = kernels();
  const auto thread_count = static_cast<unsigned>(std::min<std::int64_t>(threads, 1 << 16));
  const Sums sums = unlocked(
      [&] { return additive_sums_threaded(table, view.span(), lane, first, thread_count); });
  return {sums.s0, sums.s1};
}

PySums py_additive_update(const PySums& sums, const py::object& old_data,
                          const py::object& new_data, std::int64_t lane_bytes,
                          std::int64_t first_lane) {
  const InputView before(old_data, "old");
  const InputView after(new_data, "new");
  const std::uint64_t lane = non_negative(lane_bytes, "lane_bytes");
  const std::uint64_t first = non_negative(first_lane, "first_lane");
  if (before.span().size() != after.span().size()) {
    raise_status(Status::invalid_input("old and new must be equally long"));
  }
  raise_if_error(check_lanes(before.span().size(), lane, first));
  const Kernels& table = kernels();
  const Sums updated = unlocked([&] {
    return additive_updated(table, {sums.first, sums.second}, before.span(), after.span(), lane,
                            first);
  });
  return {updated.s0, updated.s1};
}

py::bytes py_zstd_compress(const py::object& data, int level) {
  const InputView view(data, "data");
  FrameWriter writer;
  raise_if_error(unlocked([&] {
    Status opened = writer.open(level, view.span().size());
    return opened.ok() ? writer.write(view.span(), true) : opened;
  }));
  return to_bytes(writer.output());
}

py::bytes py_zstd_decompress(const py::object& blob, std::int64_t size_max) {
  const InputView view(blob, "blob");
  const std::uint64_t limit = non_negative(size_max, "size_max");
  const auto claimed = value_or_raise(frame_content_size(view.span(), limit));
  if (!claimed.has_value()) {
    return to_bytes(value_or_raise(unlocked([&] { return decode_frame(view.span(), limit); })));
  }
  // The size is known and plausible: decode straight into the result.
  const auto result = py::reinterpret_steal<py::bytes>(
      PyBytes_FromStringAndSize(nullptr, static_cast<py::ssize_t>(*claimed)));
  if (!result) {
    throw py::error_already_set();
  }
  auto* const target = reinterpret_cast<std::uint8_t*>(PyBytes_AS_STRING(result.ptr()));
  raise_if_error(unlocked([&] {
    return decode_frame_into(view.span(), {target, static_cast<std::size_t>(*claimed)});
  }));
  return result;
}

py::object py_xor_encode(const py::object& base, const py::object& target, int level) {
  const InputView before(base, "base");
  const InputView after(target, "target");
  const Kernels& table = kernels();
  return to_optional_bytes(value_or_raise(
      unlocked([&] { return xor_encode(table, before.span(), after.span(), level); })));
}

py::object py_overwrite_encode(const py::object& base, const py::object& target, int level) {
  const InputView before(base, "base");
  const InputView after(target, "target");
  return to_optional_bytes(value_or_raise(
      unlocked([&] { return overwrite_encode(before.span(), after.span(), level); })));
}

using Applier = Result<Verified> (*)(const Kernels&, std::span<const std::uint8_t>,
                                     std::span<const std::uint8_t>, std::span<std::uint8_t>,
                                     const VerifyPlan&);

template <Applier kApply>
py::tuple py_apply(const py::object& blob, const py::object& base, const py::object& out,
                   const std::string& digest, std::int64_t lane_bytes) {
  const InputView payload(blob, "blob");
  const InputView source(base, "base");
  const OutputView target(out, "out");
  const VerifyPlan plan = plan_from(digest, lane_bytes);
  const Kernels& table = kernels();
  const Verified verified = value_or_raise(
      unlocked([&] { return kApply(table, payload.span(), source.span(), target.span(), plan); }));
  return to_tuple(verified, plan);
}

py::tuple py_copy_digest(const py::object& source, const py::object& out, const std::string& digest,
                         std::int64_t lane_bytes) {
  const InputView view(source, "source");
  const VerifyPlan plan = plan_from(digest, lane_bytes);
  const Kernels& table = kernels();
  if (out.is_none()) {
    return to_tuple(
        value_or_raise(unlocked([&] { return digest_verify(table, view.span(), plan); })), plan);
  }
  const OutputView target(out, "out");
  return to_tuple(value_or_raise(unlocked(
                      [&] { return copy_verify(table, view.span(), target.span(), plan); })),
                  plan);
}

py::tuple py_parse_header(const py::object& head, std::int64_t file_size) {
  const InputView view(head, "head");
  const std::uint64_t size = non_negative(file_size, "file_size");
  const SafetensorsHeader header =
      value_or_raise(unlocked([&] { return parse_safetensors_header(view.span(), size); }));
  py::list entries(header.entries.size());
  for (std::size_t i = 0; i < header.entries.size(); ++i) {
    const TensorEntry& entry = header.entries[i];
    py::tuple shape(entry.shape.size());
    for (std::size_t dim = 0; dim < entry.shape.size(); ++dim) {
      shape[dim] = entry.shape[dim];
    }
    entries[i] = py::make_tuple(entry.name, entry.dtype, shape, entry.begin, entry.end);
  }
  py::dict metadata;
  for (const auto& [key, value] : header.metadata) {
    metadata[py::str(key)] = value;
  }
  return py::make_tuple(entries, metadata, header.data_offset);
}

std::uint64_t py_header_size(const py::object& first8, std::int64_t file_size) {
  const InputView view(first8, "first8");
  return value_or_raise(safetensors_header_size(view.span(), non_negative(file_size, "file_size")));
}

void bind_checksums(py::module_& module) {
  using namespace py::literals;
  module.attr("ADDITIVE_VERSION") = kAdditiveVersion;
  module.def(
      "xxh3_128", [](const py::object& data) { return digest_of(data, DigestKind::kXxh3); },
      "data"_a);
  module.def(
      "adler32", [](const py::object& data) { return digest_of(data, DigestKind::kAdler32); },
      "data"_a);
  py::class_<PyHasher>(module, "Hasher")
      .def(py::init<const std::string&>(), "kind"_a)
      .def("update", &PyHasher::update, "data"_a)
      .def("hexdigest", &PyHasher::hexdigest);
  module.def("additive", &py_additive, "data"_a, "lane_bytes"_a, "first_lane"_a = 0,
             "threads"_a = 1);
  module.def("additive_update", &py_additive_update, "sums"_a, "old"_a, "new"_a, "lane_bytes"_a,
             "first_lane"_a = 0);
}

void bind_deltas(py::module_& module) {
  using namespace py::literals;
  module.def("zstd_compress", &py_zstd_compress, "data"_a, "level"_a = 1);
  module.def("zstd_decompress", &py_zstd_decompress, "blob"_a, "size_max"_a);
  module.def("xor_encode", &py_xor_encode, "base"_a, "target"_a, "level"_a = 1);
  module.def("overwrite_encode", &py_overwrite_encode, "base"_a, "target"_a, "level"_a = 1);
  module.def("xor_apply", &py_apply<&xor_apply>, "blob"_a, "base"_a, "out"_a, "digest"_a,
             "lane_bytes"_a);
  module.def("overwrite_apply", &py_apply<&overwrite_apply>, "blob"_a, "base"_a, "out"_a,
             "digest"_a, "lane_bytes"_a);
  module.def("copy_digest", &py_copy_digest, "source"_a, "out"_a, "digest"_a, "lane_bytes"_a);
}

void bind_isa(py::module_& module) {
  using namespace py::literals;
  module.def("isa", [] { return std::string(kernels().name); });
  module.def("isa_available", [] {
    std::vector<std::string> names;
    for (const Kernels* table : runnable_kernels()) {
      names.emplace_back(table->name);
    }
    return names;
  });
  module.def(
      "set_isa", [](const std::string& name) { raise_if_error(force_kernels(name)); }, "name"_a);
}

}  // namespace
}  // namespace stitch::bind

PYBIND11_MODULE(_core, module) {
  using namespace pybind11::literals;
  namespace bind = stitch::bind;
  module.doc() = "Native core of Stitch: digests, interop deltas, safetensors headers.";
  bind::bind_isa(module);
  bind::bind_checksums(module);
  bind::bind_deltas(module);
  module.def("parse_safetensors_header", &bind::py_parse_header, "head"_a, "file_size"_a);
  module.def("header_size", &bind::py_header_size, "first8"_a, "file_size"_a);
}
