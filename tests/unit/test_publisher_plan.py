"""The pure parts of a publish: who writes what, and what a failure does to the layers above."""

from __future__ import annotations

import pytest

from stitch.checksum import Checksum, model_digest
from stitch.errors import Conflict, InvalidInput, Unavailable
from stitch.publisher.plan import Offer, Offered, assign_files, check_names, merge_offers
from stitch.publisher.state import Layer, SealedState, TensorFacts, TensorState, digest_after
from stitch.types import Kind, Ref


def facts(value: int, count: int = 4) -> TensorFacts:
    return TensorFacts("F32", (count,), Checksum(4, value, value + 1))


def given(value: int, *, changed: bool = True, blob: int = 10, count: int = 4) -> Offered:
    return Offered(facts(value, count), True, changed, blob)


def held(value: int) -> Offered:
    return Offered(facts(value), False, False, 0)


def offer(version: int = 1, replaces: bool = False, **tensors: Offered) -> Offer:
    return Offer(version, tensors, False, replaces)


def test_disjoint_offers_are_joined() -> None:
    merged = merge_offers([offer(a=given(1), b=given(2, changed=False)), offer(c=given(3))])
    assert merged == {"a": facts(1), "c": facts(3)}


def test_an_equal_tensor_on_two_ranks_is_written_by_the_lower() -> None:
    offers = [offer(z=given(9)), offer(a=given(1), z=given(9)), offer(a=given(1), c=given(3))]
    assert set(merge_offers(offers)) == {"a", "c", "z"}
    assert assign_files(offers, kind=Kind.DELTA, file_bytes_max=10**9) == [
        [["z"]],
        [["a"]],
        [["c"]],
    ]


@pytest.mark.parametrize("other", [given(2), given(1, changed=False), given(1, count=8)])
def test_differing_tensors_on_two_ranks_are_refused(other: Offered) -> None:
    with pytest.raises(InvalidInput, match="'a'"):
        merge_offers([offer(a=given(1)), offer(a=other)])


def test_ranks_must_speak_of_one_version() -> None:
    with pytest.raises(Conflict, match="different versions"):
        merge_offers([offer(1), offer(2)])
    with pytest.raises(Conflict, match="rebase"):
        merge_offers([offer(1), offer(1, replaces=True)])


def test_the_first_error_of_a_rank_is_everybodys() -> None:
    broken = Offer(1, {}, False, False, Unavailable("disk full", file="x"))
    with pytest.raises(Unavailable, match="rank 1: disk full") as caught:
        merge_offers([offer(a=given(1)), broken])
    assert caught.value.fields["file"] == "x"
    bug = Offer(1, {}, False, False, KeyError("a"))
    with pytest.raises(KeyError):
        merge_offers([offer(), bug])


def test_an_anchor_takes_what_nobody_gives_from_who_holds_it() -> None:
    offers = [offer(a=given(1), v=held(7)), offer(b=given(2, changed=False), v=held(7))]
    assert assign_files(offers, kind=Kind.ANCHOR, file_bytes_max=10**9) == [[["a", "v"]], [["b"]]]
    assert assign_files(offers, kind=Kind.DELTA, file_bytes_max=10**9) == [[["a"]], []]


def test_files_are_split_by_size_and_never_empty() -> None:
    tensors = {name: given(1, blob=60) for name in "abcde"}
    split = assign_files([offer(**tensors)], kind=Kind.DELTA, file_bytes_max=130)
    assert split == [[["a", "b"], ["c", "d"], ["e"]]]
    assert assign_files([offer(**tensors)], kind=Kind.DELTA, file_bytes_max=1) == [
        [["a"], ["b"], ["c"], ["d"], ["e"]]
    ]
    assert assign_files([offer()], kind=Kind.DELTA, file_bytes_max=1) == [[]]


def test_a_lost_name_is_named() -> None:
    check_names(["a", "b", "c"], ["a", "b"])
    with pytest.raises(InvalidInput, match="'b'"):
        check_names(["a"], ["a", "b", "c"])


def state(name: str, value: int) -> TensorState:
    return TensorState(
        name, "F32", (4,), memoryview(bytes([value]) * 16), Checksum(4, value, value)
    )


def layer(below: Layer | None = None, *, replaces: bool = False, **values: int) -> Layer:
    return Layer({name: state(name, value) for name, value in values.items()}, below, replaces)


def values(tensors: dict[str, TensorState]) -> dict[str, int]:
    return {name: tensor.data[0] for name, tensor in tensors.items()}


def shown(top: Layer) -> dict[str, int]:
    merged: dict[str, TensorState] = {}
    for changes in reversed(top.visible()):
        merged.update(changes)
    return values(merged)


def test_a_failed_layers_changes_go_to_the_next() -> None:
    first = layer(a=1, b=1)
    second = layer(first, b=2)
    third = layer(second, c=3)
    assert shown(third) == {"a": 1, "b": 2, "c": 3}
    first.failed = True
    assert second.on_failed()
    assert values(second.effective()) == {"a": 1, "b": 2}
    second.sealed, second.below = True, None
    assert not third.on_failed()
    assert values(third.effective()) == {"c": 3}, "what is sealed is not a change any more"


def test_a_replacing_layer_hides_what_is_below() -> None:
    below = layer(a=1, b=1)
    top = layer(layer(below, replaces=True, x=5), x=6)
    assert shown(top) == {"x": 6}
    assert top.opaque
    assert top.replaces_all()
    below.failed = True
    assert values(top.effective()) == {"x": 6}


def test_the_digest_is_updated_by_what_changed() -> None:
    catalog = {"a": facts(1), "b": facts(2)}
    whole = model_digest(found.term(name) for name, found in catalog.items())
    sealed = SealedState(Ref("r", 1), {}, catalog, whole, None)
    after = digest_after(sealed, {"b": facts(3)}, replaces=False)
    assert after == model_digest([facts(1).term("a"), facts(3).term("b")])
    alone = digest_after(sealed, {"b": facts(3)}, replaces=True)
    assert alone == model_digest([facts(3).term("b")])
    assert digest_after(sealed, {}, replaces=False) == whole
