"""The Store conformance suite: named cases that any store must pass.

A case gets `open_client`, which opens one more client of the same fresh root. Backends plug in:

    @pytest.mark.parametrize("case", STORE_CASES, ids=lambda case: case.__name__)
    async def test_my_store(case, root): await case(lambda: MyStore(root))

Cases raise AssertionError with what was promised and what happened.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from stitch.errors import Conflict, InvalidInput, NotVisibleYet, StitchError, Unavailable
from stitch.stores.base import INDEX_NAME, Lost, Store, Won

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["STORE_CASES", "OpenClient", "StoreCase"]

OpenClient = Callable[[], Store]
StoreCase = Callable[[OpenClient], Awaitable[None]]

V1: Final = "updates/weight_v000001"
_READ_MAX: Final = 1 << 20


@asynccontextmanager
async def _expect(error: type[StitchError], promise: str) -> AsyncIterator[None]:
    try:
        yield
    except error:
        return
    raise AssertionError(f"{promise}: nothing was raised")


async def _won(store: Store, expect: str | None, text: str) -> str:
    result = await store.swap_pointer(expect, text)
    assert isinstance(result, Won), f"a swap with the current token must win, got {result}"
    return result.token


async def _seal(store: Store, prefix: str, files: dict[str, bytes], attempt: str) -> bool:
    staging = await store.begin(prefix, attempt=attempt)
    for name, data in files.items():
        await staging.put(name, [data])
    return (await staging.seal(b'{"attempt": "%s"}' % attempt.encode())).created


async def absent_pointer_reads_as_empty(open_client: OpenClient) -> None:
    """No pointer: empty text and no token; and a first swap expects exactly that."""
    store = open_client()
    found = await store.read_pointer()
    assert (found.text, found.token) == ("", None), f"an absent pointer read as {found}"
    result = await store.swap_pointer("made-up", "a/weight_v000000")
    assert isinstance(result, Lost), "a swap with a token won where there is no pointer"
    assert (await store.read_pointer()).token is None, "a lost swap left a pointer"


async def swap_is_visible_and_names_its_state(open_client: OpenClient) -> None:
    """After Won every client reads the text, under the token that Won gave."""
    one, two = open_client(), open_client()
    token = await _won(one, None, "a/weight_v000000")
    for client in (one, two):
        found = await client.read_pointer()
        assert found.text == "a/weight_v000000", f"after Won a client read {found.text!r}"
        assert found.token == token, "the token read is not the one that Won gave"


async def swap_compares(open_client: OpenClient) -> None:
    """A swap with an old token loses, changes nothing, and says what stands there."""
    one, two = open_client(), open_client()
    first = await _won(one, None, "a/weight_v000000")
    second = await _won(two, first, "a/weight_v000001")
    result = await one.swap_pointer(first, "a/weight_v000002")
    assert isinstance(result, Lost), "a swap with an outdated token won"
    assert (result.text, result.token) == ("a/weight_v000001", second), f"Lost said {result}"
    result = await one.swap_pointer(None, "b/weight_v000000")
    assert isinstance(result, Lost), "a swap that expects no pointer replaced one"
    assert (await two.read_pointer()).text == "a/weight_v000001", "a lost swap changed the pointer"


async def one_of_many_swaps_wins(open_client: OpenClient) -> None:
    """Of concurrent swaps on one token exactly one wins, and its text stands."""
    clients = [open_client() for _ in range(8)]
    token = await _won(clients[0], None, "a/weight_v000000")
    texts = [f"a/weight_v{number:06d}" for number in range(1, 9)]
    results = await asyncio.gather(
        *(client.swap_pointer(token, text) for client, text in zip(clients, texts, strict=True))
    )
    winners = [t for t, result in zip(texts, results, strict=True) if isinstance(result, Won)]
    assert len(winners) == 1, f"{len(winners)} of 8 swaps on one token won"
    assert (await clients[3].read_pointer()).text == winners[0], "not the winner's text stands"


async def tokens_are_not_used_again(open_client: OpenClient) -> None:
    """Every pointer text has its own token, so an old token never matches a later state."""
    store = open_client()
    seen: set[str] = set()
    token: str | None = None
    for number in range(5):
        token = await _won(store, token, f"a/weight_v{number:06d}")
        assert token not in seen, f"the token of version {number} named an earlier state too"
        seen.add(token)


async def pointer_never_rewinds_for_a_reader(open_client: OpenClient) -> None:
    """Each read shows the newest Won, also to a client that read before."""
    writer, reader = open_client(), open_client()
    token: str | None = None
    for number in range(4):
        text = f"a/weight_v{number:06d}"
        token = await _won(writer, token, text)
        for _ in range(2):
            found = (await reader.read_pointer()).text
            assert found == text, f"after {text} was written a reader saw {found!r}"


async def create_is_create_only(open_client: OpenClient) -> None:
    """The second create of a key returns False and the first bytes stay."""
    one, two = open_client(), open_client()
    assert await one.create("runs/a/run.json", b"first"), "a create on a free key returned False"
    assert not await two.create("runs/a/run.json", b"second"), "a taken key was created again"
    found = await two.read("runs/a/run.json", size_max=_READ_MAX)
    assert found == b"first", f"create-only bytes became {found!r}"


async def one_of_many_creates_wins(open_client: OpenClient) -> None:
    """Of concurrent creates exactly one returns True, and its bytes are there, whole."""
    clients = [open_client() for _ in range(8)]
    bodies = [b"%d" % number * 1000 for number in range(8)]
    results = await asyncio.gather(
        *(c.create("runs/a/run.json", d) for c, d in zip(clients, bodies, strict=True))
    )
    assert sum(results) == 1, f"{sum(results)} of 8 creates won"
    found = await clients[0].read("runs/a/run.json", size_max=_READ_MAX)
    assert found == bodies[results.index(True)], "not the winner's bytes are there"


async def read_gives_all_bytes_or_none(open_client: OpenClient) -> None:
    """read: the bytes, None if absent, InvalidInput above size_max."""
    store = open_client()
    data = bytes(range(256)) * 40
    await store.create("runs/a/big", data)
    assert await store.read("runs/a/big", size_max=len(data)) == data, "read changed bytes"
    assert await store.read("runs/a/none", size_max=9) is None, "an absent object was read"
    async with _expect(InvalidInput, "an object above size_max is refused"):
        await store.read("runs/a/big", size_max=len(data) - 1)


async def read_into_reads_ranges(open_client: OpenClient) -> None:
    """read_into: the asked range, short only at the end, NotVisibleYet if absent."""
    store = open_client()
    data = bytes(range(200))
    await store.create("runs/a/x", data)
    for offset, count in ((0, 10), (190, 20), (37, 100), (200, 5)):
        buffer = bytearray(count)
        got = await store.read_into("runs/a/x", offset, memoryview(buffer))
        want = data[offset : offset + count]
        assert (got, bytes(buffer[:got])) == (len(want), want), f"range {offset}+{count} is wrong"
    async with _expect(NotVisibleYet, "an absent object is NotVisibleYet"):
        await store.read_into("runs/a/none", 0, memoryview(bytearray(1)))


async def read_into_checks_the_token(open_client: OpenClient) -> None:
    """A range of an object that was replaced since the stat is a Conflict, never other bytes."""
    store = open_client()
    await store.create("runs/a/x", b"one")
    before = await store.stat("runs/a/x")
    assert before is not None, "stat of an object gave None"
    assert before.size == 3, f"stat says {before.size} bytes of 3"
    buffer = memoryview(bytearray(3))
    assert await store.read_into("runs/a/x", 0, buffer, expect_token=before.token) == 3
    await store.delete("runs/a/x")
    assert await store.stat("runs/a/x") is None, "a deleted object has a stat"
    await store.create("runs/a/x", b"two")
    async with _expect(Conflict, "another object under the key is a Conflict"):
        await store.read_into("runs/a/x", 0, buffer, expect_token=before.token)


async def nothing_is_visible_before_the_seal(open_client: OpenClient) -> None:
    """Staged files are in no list, stat or read, for no client."""
    one, two = open_client(), open_client()
    staging = await one.begin(V1, attempt="aa")
    await staging.put("model-aa-00000-of-00001.safetensors", [b"12", b"34"])
    for client in (one, two):
        listed = list(await client.list(""))
        assert listed == [], f"before the seal the list shows {listed}"
        assert await client.stat(f"{V1}/{INDEX_NAME}") is None, "an index before the seal"
    await staging.abandon()
    assert list(await two.list("")) == [], "an abandoned attempt left something visible"


async def seal_shows_all_files_whole(open_client: OpenClient) -> None:
    """After the seal every file is there with its bytes, chunks joined, and the index."""
    one, two = open_client(), open_client()
    staging = await one.begin(V1, attempt="aa")
    chunks: list[bytes | bytearray | memoryview] = [b"head", memoryview(b"payload"), b"tail", b""]
    size = await staging.put("f.safetensors", chunks)
    assert size == 15, f"put said {size} bytes of 15"
    await staging.put("stitch-aa.json", [b"{}"])
    sealed = await staging.seal(b'{"index": 1}')
    assert sealed.created, "the first seal of a name says it was there before"
    names = [f"{V1}/{n}" for n in ("f.safetensors", INDEX_NAME, "stitch-aa.json")]
    assert list(await two.list("updates")) == sorted(names), "the sealed files are not listed"
    for name, data in zip(names, (b"headpayloadtail", b'{"index": 1}', b"{}"), strict=True):
        found = await two.read(name, size_max=_READ_MAX)
        assert found == data, f"{name} holds {found!r}, not {data!r}"


async def seal_is_create_only(open_client: OpenClient) -> None:
    """A second attempt at a sealed name changes no byte and says created=False."""
    one, two = open_client(), open_client()
    assert await _seal(one, V1, {"f.safetensors": b"first"}, "aa"), "the first seal failed"
    assert not await _seal(two, V1, {"f.safetensors": b"other"}, "bb"), "a name was sealed twice"
    assert await two.read(f"{V1}/f.safetensors", size_max=99) == b"first", "sealed bytes changed"
    assert await two.read(f"{V1}/{INDEX_NAME}", size_max=99) == b'{"attempt": "aa"}', (
        "a sealed index changed"
    )


async def a_seal_can_be_repeated(open_client: OpenClient) -> None:
    """A second seal of the same attempt, as after a lost reply, says created=False."""
    store = open_client()
    staging = await store.begin(V1, attempt="aa")
    await staging.put("f.safetensors", [b"1"])
    assert (await staging.seal(b"{}")).created
    assert not (await staging.seal(b"{}")).created, "a repeated seal claims to be the first"
    assert await store.read(f"{V1}/f.safetensors", size_max=9) == b"1"


async def one_of_two_open_attempts_seals(open_client: OpenClient) -> None:
    """Attempts side by side: the loser's files are nowhere, the winner's are whole."""
    one, two = open_client(), open_client()
    first = await one.begin(V1, attempt="aa")
    second = await two.begin(V1, attempt="bb")
    await first.put("f-aa.safetensors", [b"a" * 100])
    await second.put("f-bb.safetensors", [b"b" * 100])
    results = await asyncio.gather(first.seal(b'"aa"'), second.seal(b'"bb"'))
    assert sum(result.created for result in results) == 1, "not exactly one attempt sealed"
    winner = "aa" if results[0].created else "bb"
    listed = list(await one.list("updates"))
    assert listed == sorted([f"{V1}/f-{winner}.safetensors", f"{V1}/{INDEX_NAME}"]), (
        f"after {winner} sealed, the version holds {listed}"
    )


async def ranks_share_an_attempt(open_client: OpenClient) -> None:
    """Clients that begin the same attempt write into one version; leaving changes nothing."""
    one, two = open_client(), open_client()
    first = await one.begin(V1, attempt="aa")
    second = await two.begin(V1, attempt="aa")
    await second.put("f-1.safetensors", [b"1"])
    await first.put("f-0.safetensors", [b"0"])
    await second.leave()
    assert (await first.seal(b"{}")).created
    assert len(await two.list("updates")) == 3, "a file of one of the clients is missing"


async def a_file_is_put_once(open_client: OpenClient) -> None:
    """The same name twice in one attempt is a Conflict; the index is not a file to put."""
    staging = await open_client().begin(V1, attempt="aa")
    await staging.put("f.safetensors", [b"1"])
    async with _expect(Conflict, "the second put of a name is refused"):
        await staging.put("f.safetensors", [b"2"])
    async with _expect(InvalidInput, "the index is written by the seal alone"):
        await staging.put(INDEX_NAME, [b"{}"])
    async with _expect(InvalidInput, "a file name with a folder is refused"):
        await staging.put("../f.safetensors", [b"1"])
    await staging.abandon()


async def abandon_is_safe_at_any_time(open_client: OpenClient) -> None:
    """Twice, and after a seal, it does nothing; the name can be begun again."""
    store = open_client()
    staging = await store.begin(V1, attempt="aa")
    await staging.put("f.safetensors", [b"1"])
    await staging.abandon()
    await staging.abandon()
    staging = await store.begin(V1, attempt="bb")
    await staging.put("f.safetensors", [b"2"])
    assert (await staging.seal(b"{}")).created, "an abandoned attempt blocks the name"
    await staging.abandon()
    assert await store.read(f"{V1}/f.safetensors", size_max=9) == b"2", "abandon undid a seal"


async def confirm_tells_sealed_from_not(open_client: OpenClient) -> None:
    """confirm is True for a sealed version alone, for every client."""
    one, two = open_client(), open_client()
    staging = await one.begin(V1, attempt="aa")
    await staging.put("f.safetensors", [b"1"])
    assert not await two.confirm(V1), "an unsealed version was confirmed"
    await staging.seal(b"{}")
    assert await two.confirm(V1), "a sealed version was not confirmed"
    assert not await two.confirm("updates/weight_v000002"), "an absent version was confirmed"


async def an_index_is_never_deleted(open_client: OpenClient) -> None:
    """Payloads go, the index stays; deleting what is absent is fine."""
    store = open_client()
    await _seal(store, V1, {"f.safetensors": b"1"}, "aa")
    await store.delete(f"{V1}/f.safetensors")
    await store.delete(f"{V1}/f.safetensors")
    assert await store.stat(f"{V1}/f.safetensors") is None, "a deleted file is still there"
    async with _expect(InvalidInput, "the index of a sealed version is kept for ever"):
        await store.delete(f"{V1}/{INDEX_NAME}")
    assert not await _seal(store, V1, {"f.safetensors": b"2"}, "bb"), "a deleted name was reused"


async def list_is_by_folder(open_client: OpenClient) -> None:
    """list(prefix) holds what lies below that folder, sorted, and nothing beside it."""
    store = open_client()
    for key in ("runs/b/run.json", "runs/a/run.json", "runs/ab/run.json"):
        await store.create(key, b"{}")
    await _won(store, None, "a/weight_v000000")
    await store.write_lease("r1", b"{}")
    assert list(await store.list("runs/a")) == ["runs/a/run.json"], "list takes prefixes for names"
    listed = list(await store.list(""))
    assert listed == ["runs/a/run.json", "runs/ab/run.json", "runs/b/run.json"], (
        f"the root lists {listed}"
    )
    assert list(await store.list("runs/none")) == [], "an absent folder has entries"


async def leases_are_kept_and_replaced(open_client: OpenClient) -> None:
    """Every client sees the newest lease of each name; dropping one leaves the others."""
    one, two = open_client(), open_client()
    await one.write_lease("replica-1", b"1")
    await two.write_lease("replica-2", b"1")
    await one.write_lease("replica-1", b"2")
    found = await two.read_leases()
    assert found == {"replica-1": b"2", "replica-2": b"1"}, f"the leases are {found}"
    await two.drop_lease("replica-2")
    await two.drop_lease("replica-2")
    assert await one.read_leases() == {"replica-1": b"2"}, "dropping one lease touched another"


async def keys_cannot_leave_the_root(open_client: OpenClient) -> None:
    """Absolute keys, `..`, empty segments and NUL are InvalidInput in every method."""
    store = open_client()
    for key in ("/etc/x", "../x", "runs/../../x", "runs//x", "runs/a\0b", ".", "", "a\\..\\b"):
        async with _expect(InvalidInput, f"key {key!r} is refused by create"):
            await store.create(key, b"x")
        async with _expect(InvalidInput, f"key {key!r} is refused by read"):
            await store.read(key, size_max=9)
        async with _expect(InvalidInput, f"key {key!r} is refused by begin"):
            await store.begin(key, attempt="aa")
    for name in ("../x", "a/b", "", "x" * 129):
        async with _expect(InvalidInput, f"lease name {name!r} is refused"):
            await store.write_lease(name, b"x")


async def a_closed_store_is_unavailable(open_client: OpenClient) -> None:
    """After close every call raises Unavailable, and other clients go on."""
    one, two = open_client(), open_client()
    await one.close()
    async with _expect(Unavailable, "a closed store refuses reads"):
        await one.read_pointer()
    async with _expect(Unavailable, "a closed store refuses writes"):
        await one.create("runs/a/run.json", b"x")
    assert await two.create("runs/a/run.json", b"x"), "closing one client closed another"


STORE_CASES: Final[tuple[StoreCase, ...]] = (
    absent_pointer_reads_as_empty,
    swap_is_visible_and_names_its_state,
    swap_compares,
    one_of_many_swaps_wins,
    tokens_are_not_used_again,
    pointer_never_rewinds_for_a_reader,
    create_is_create_only,
    one_of_many_creates_wins,
    read_gives_all_bytes_or_none,
    read_into_reads_ranges,
    read_into_checks_the_token,
    nothing_is_visible_before_the_seal,
    seal_shows_all_files_whole,
    seal_is_create_only,
    a_seal_can_be_repeated,
    one_of_two_open_attempts_seals,
    ranks_share_an_attempt,
    a_file_is_put_once,
    abandon_is_safe_at_any_time,
    confirm_tells_sealed_from_not,
    an_index_is_never_deleted,
    list_is_by_folder,
    leases_are_kept_and_replaced,
    keys_cannot_leave_the_root,
    a_closed_store_is_unavailable,
)
