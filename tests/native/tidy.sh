#!/usr/bin/env bash
# Checks the native sources: layout with clang-format, warnings of Clang, and clang-tidy.
# usage: tests/native/tidy.sh   (CLANG_VERSION=14 picks clang-format-14 and so on)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
suffix=${CLANG_VERSION:+-$CLANG_VERSION}
if ! command -v "clang-tidy$suffix" >/dev/null; then
  suffix=-14
fi
build="$root/build/native-tidy"
cd "$root"
clang-format"$suffix" --dry-run -Werror csrc/*/*.[ch]pp tests/native/*.[ch]pp
cmake -S "$root" -B "$build" -DCMAKE_CXX_COMPILER="clang++$suffix" -DSTITCH_PYTHON=OFF \
  -DSTITCH_NATIVE_TESTS=ON -DSTITCH_WERROR=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo >/dev/null
cmake --build "$build" --parallel 2 | grep -E "warning|error" && exit 1
clang-tidy"$suffix" --quiet -p "$build" csrc/core/*.cpp csrc/cpu/*.cpp 2>/dev/null
echo "native sources are clean"
