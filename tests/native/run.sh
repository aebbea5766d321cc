#!/usr/bin/env bash
# Builds and runs the native tests. usage: tests/native/run.sh [address|thread|none] [FUZZ_SECONDS]
# address includes the undefined-behaviour sanitizer. Warnings are errors here.
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
cd "$build"
echo "native tests, sanitizer: $sanitizer"
./tests/native/stitch_native_tests "$root/tests/native/corpus" "$fuzz_seconds"
