# Finds the xxHash headers and defines the imported target stitch::xxhash (header only: every
# variant compiles the library into itself).
find_path(STITCH_XXHASH_INCLUDE_DIR xxhash.h)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  StitchXxhash
  REQUIRED_VARS STITCH_XXHASH_INCLUDE_DIR
  REASON_FAILURE_MESSAGE "install the xxHash headers (Debian: libxxhash-dev)")

if(StitchXxhash_FOUND AND NOT TARGET stitch::xxhash)
  add_library(stitch::xxhash INTERFACE IMPORTED)
  set_target_properties(stitch::xxhash PROPERTIES INTERFACE_INCLUDE_DIRECTORIES
                                                  "${STITCH_XXHASH_INCLUDE_DIR}")
endif()
