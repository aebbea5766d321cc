#include "bind/edge.hpp"

#include <string>

namespace stitch::bind {
namespace {

[[noreturn]] void raise_stitch_error(const char* name, const std::string& message) {
  const py::object type = py::module_::import("stitch.errors").attr(name);
  const py::object error = type(py::str(message));
  PyErr_SetObject(type.ptr(), error.ptr());
  throw py::error_already_set();
}

}  // namespace

void raise_status(const Status& status) {
  switch (status.code()) {
    case StatusCode::kInvalidInput:
      raise_stitch_error("InvalidInput", status.message());
    case StatusCode::kCorruptData:
      raise_stitch_error("CorruptData", status.message());
    case StatusCode::kUnsupported:
      raise_stitch_error("Unsupported", status.message());
    case StatusCode::kOutOfMemory:
      PyErr_SetString(PyExc_MemoryError, status.message().c_str());
      throw py::error_already_set();
    case StatusCode::kOk:
    case StatusCode::kInternal:
      break;
  }
  PyErr_SetString(PyExc_AssertionError, status.message().c_str());
  throw py::error_already_set();
}

template <bool kWritable>
ByteView<kWritable>::ByteView(const py::object& object, const char* argument) {
  // PyBUF_SIMPLE asks for contiguous bytes whatever the element type or rank.
  const int flags = kWritable ? PyBUF_SIMPLE | PyBUF_WRITABLE : PyBUF_SIMPLE;
  if (PyObject_GetBuffer(object.ptr(), &view_, flags) == 0) {
    return;
  }
  if (PyErr_ExceptionMatches(PyExc_MemoryError) != 0) {
    throw py::error_already_set();
  }
  const std::string message = std::string(argument) + " must be a " +
                              (kWritable ? "writable, " : "") + "C-contiguous buffer, got " +
                              Py_TYPE(object.ptr())->tp_name;
  py::raise_from(PyExc_TypeError, message.c_str());
  throw py::error_already_set();
}

template class ByteView<false>;
template class ByteView<true>;

}  // namespace stitch::bind
