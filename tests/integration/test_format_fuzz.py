"""Random damage: every mutation is refused, or changes nothing; never wrong bytes, no crash."""

from __future__ import annotations

import contextlib
import itertools
import random
import shutil
import time
from pathlib import Path

import pytest
from manifest_damages import DIGEST_KEY, KEY
from publication_forge import edit_metadata, version_dir
from stitch_tree import State, changed_state, publish_delta, small_state, write_base, write_chain

from stitch import _core
from stitch.errors import CorruptData, NotVisibleYet, Unsupported
from stitch.format.checkpoint import Checkpoint
from stitch.format.materialize import open_chain
from stitch.format.rebuild import RebuiltTensor, rebuild
from stitch.types import Ref

MUTATIONS = 2000
Chain = tuple[Path, list[State]]


def stitch_chain(root: Path) -> Chain:
    return root, write_chain(root)


def foreign_chain(root: Path) -> Chain:
    """Deltas without manifests, so that digests and structure alone must hold."""
    states = [small_state()]
    write_base(root / "base", states[0])
    for version, encoding in enumerate(("xor", "overwrite", "xor"), 1):
        states.append(changed_state(states[-1], version))
        publish_delta(
            root / "updates", Ref("run-s", version), states[-2], states[-1], encoding=encoding
        )
        edit_metadata(root / "updates", version, **{KEY: ..., DIGEST_KEY: ...})
        for path in version_dir(root / "updates", version).glob("stitch-*.json"):
            path.unlink()
    return root, states


def mutate(raw: bytes, chance: random.Random) -> bytes:
    data = bytearray(raw)
    at = chance.randrange(len(data) + 1)
    span = chance.choice((1, 1, 2, 4, 8, 64))
    kind = chance.randrange(8)
    if kind == 0 and at < len(data):
        data[at] ^= 1 << chance.randrange(8)
    elif kind == 1 and at < len(data):
        data[at] = chance.randrange(256)
    elif kind == 2:
        del data[at:]
    elif kind == 3:
        del data[at : at + span]
    elif kind == 4:
        data[at:at] = chance.randbytes(span)
    elif kind == 5:
        data[at : at + span] = bytes(min(span, len(data) - at))
    elif kind == 6:
        other = chance.randrange(len(data) + 1)
        data[at : at + span] = data[other : other + span]
    else:
        digits = [i for i, byte in enumerate(data[:2000]) if 48 <= byte <= 57]
        if digits:
            data[chance.choice(digits)] = 48 + chance.randrange(10)
    return bytes(data)


def check(root: Path, version: int, expected: State) -> bool:
    """Whether the version was accepted, in which case every byte must be right."""
    found: dict[str, bytes] = {}

    def keep(tensor: RebuiltTensor) -> None:
        found[tensor.name] = bytes(tensor.data)

    try:
        with contextlib.ExitStack() as stack:
            base = stack.enter_context(Checkpoint.open(root / "base"))
            chain = open_chain(root / "updates", version, 0, None, stack)
            rebuild(base, chain, on_tensor=keep, base_version=0, everything=True)
    except (CorruptData, NotVisibleYet, Unsupported):
        return False
    assert found == {name: bytes(tensor.data) for name, tensor in expected.items()}
    return True


@pytest.mark.parametrize(("make", "seed"), [(stitch_chain, 11), (foreign_chain, 12)])
def test_random_mutations(make: object, seed: int, tmp_path: Path) -> None:
    root, states = stitch_chain(tmp_path) if make is stitch_chain else foreign_chain(tmp_path)
    shutil.copytree(root / "updates", tmp_path / "whole")
    chance = random.Random(seed)
    version_max = len(states) - 1
    files = [path for path in sorted((root / "updates").rglob("*")) if path.is_file()]
    assert check(root, version_max, states[-1])
    accepted, slowest = 0, 0.0
    for _ in range(MUTATIONS // 2):
        path = chance.choice(files)
        whole = path.read_bytes()
        damaged = mutate(whole, chance)
        # Every mutated version is on the way to the one that is asked for.
        mutated = int(path.parent.name.removeprefix("weight_v"))
        below_anchor = make is stitch_chain and mutated < 2
        version = mutated if below_anchor else chance.randint(mutated, version_max)
        path.write_bytes(damaged)
        started = time.monotonic()
        try:
            accepted += check(root, version, states[version])
        finally:
            path.write_bytes(whole)
        slowest = max(slowest, time.monotonic() - started)
    print(f"\n{accepted} of {MUTATIONS // 2} mutations changed nothing, the rest were refused")
    assert accepted < MUTATIONS // 8
    assert slowest < 5


def test_ten_thousand_damaged_headers(tmp_path: Path) -> None:
    """B55: each is refused by name of damage, or describes spans that lie inside the file."""
    write_base(tmp_path / "base", small_state(), files=1)
    raw = (tmp_path / "base" / "model-00001-of-00001.safetensors").read_bytes()
    head_size = 8 + int.from_bytes(raw[:8], "little")
    chance = random.Random(13)
    refused = 0
    for _ in range(10_000):
        damaged = mutate(raw[:head_size], chance) + raw[head_size:]
        try:
            size = _core.header_size(damaged[:8], len(damaged))
            entries, _, at = _core.parse_safetensors_header(damaged[:size], len(damaged))
        except (CorruptData, Unsupported):
            refused += 1
            continue
        spans = sorted((begin, end) for _, _, _, begin, end in entries)
        assert at == size
        assert spans[0][0] == 0
        assert spans[-1][1] == len(damaged) - at
        assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(spans))
    print(f"\n{refused} of 10000 damaged headers refused")
    assert refused > 7_000
