# Finds zstd and defines the imported target stitch::zstd.
# STITCH_ZSTD_STATIC takes the archive, which must hold position-independent code.
find_path(STITCH_ZSTD_INCLUDE_DIR zstd.h)
if(STITCH_ZSTD_STATIC)
  find_library(STITCH_ZSTD_LIBRARY NAMES libzstd.a)
else()
  find_library(STITCH_ZSTD_LIBRARY NAMES zstd)
endif()
if(STITCH_ZSTD_INCLUDE_DIR)
  file(STRINGS "${STITCH_ZSTD_INCLUDE_DIR}/zstd.h" _zstd_version
       REGEX "^#define ZSTD_VERSION_(MAJOR|MINOR|RELEASE) +[0-9]+")
  string(REGEX REPLACE "[^0-9]+([0-9]+)[^0-9]+([0-9]+)[^0-9]+([0-9]+)" "\\1.\\2.\\3"
         StitchZstd_VERSION "${_zstd_version}")
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  StitchZstd
  REQUIRED_VARS STITCH_ZSTD_LIBRARY STITCH_ZSTD_INCLUDE_DIR
  VERSION_VAR StitchZstd_VERSION
  REASON_FAILURE_MESSAGE "install the zstd headers and library (Debian: libzstd-dev)")

if(StitchZstd_FOUND AND NOT TARGET stitch::zstd)
  add_library(stitch::zstd UNKNOWN IMPORTED)
  set_target_properties(
    stitch::zstd PROPERTIES IMPORTED_LOCATION "${STITCH_ZSTD_LIBRARY}"
                            INTERFACE_INCLUDE_DIRECTORIES "${STITCH_ZSTD_INCLUDE_DIR}")
endif()
