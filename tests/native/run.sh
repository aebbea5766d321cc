#!/usr/bin/env bash
# Builds and runs the native tests. usage: tests/native/run.sh [address|thread|none] [FUZZ_SECONDS]
# address includes the undefined-behaviour sanitizer. Warnings are errors here.
# RECORD=1 writes the passing run of every variant that this machine runs to oracle-runs.txt; a
# variant is chosen by default only while such a record of its sources exists.
set -euo pipefail

sanitizer=${1:-address}
fuzz_seconds=${2:-5}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
build="$root/build/native-$sanitizer"
case "$sanitizer" in
  address | thread) option=$sanitizer ;;
  none) option="" ;;
  *)
    echo "unknown sanitizer '$sanitizer'; use address, thread or none" >&2
    exit 2
    ;;
esac

generator=()
if command -v ninja >/dev/null; then
  generator=(-G Ninja)
fi
cmake -S "$root" -B "$build" "${generator[@]}" -DSTITCH_PYTHON=OFF -DSTITCH_NATIVE_TESTS=ON \
  -DSTITCH_WERROR=ON -DSTITCH_SANITIZE="$option" -DCMAKE_BUILD_TYPE=RelWithDebInfo >/dev/null
cmake --build "$build" --parallel 2 >"$build/build.log" 2>&1 || {
  cat "$build/build.log" >&2
  exit 1
}
# A file built with wide-vector flags may export its table and nothing else: an inline function that
# it exports could be the copy that the linker keeps for every machine.
if [[ $sanitizer == none ]]; then
  while IFS= read -r object; do
    if nm -C --defined-only --extern-only "$object" | grep -v "Kernels$"; then
      echo "$object exports more than its kernel table" >&2
      exit 1
    fi
  done < <(find "$build" -name 'avx*.o')
fi
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=1:allocator_may_return_null=1}
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}
record() {
  local variant=$1 records="$root/tests/native/oracle-runs.txt" digest cpu compiler
  digest=$(cd "$root/csrc" && cat "cpu/$variant.cpp" cpu/variants.hpp cpu/xxh3_variant.inc \
    core/kernels.hpp | sha256sum | cut -d' ' -f1)
  cpu=$(grep -m1 '^model name' /proc/cpuinfo | cut -d: -f2- | xargs)
  compiler=$("${CXX:-c++}" --version | sed -n 1p)
  touch "$records"
  sed -i "/^$variant |/d" "$records"
  echo "$variant | $digest | $cpu | $compiler" >>"$records"
  sort -o "$records" "$records"
}

cd "$build"
echo "native tests, sanitizer: $sanitizer"
./tests/native/stitch_native_tests "$root/tests/native/corpus" "$fuzz_seconds" | tee run.log
if [[ ${RECORD:-} == 1 ]]; then
  for variant in $(sed -n 's/^variants covered: //p' run.log | tr -d ,); do
    record "$variant"
  done
fi
