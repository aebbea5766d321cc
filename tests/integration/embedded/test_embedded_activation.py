"""Pauses, weight changes and labels: what each token says about the weights that made it."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stitch.checksum import additive_lanes, lane_bytes_for
from stitch.engines.embedded import EngineProcess
from stitch.env import Env
from stitch.errors import ActivationFailed, EngineUnavailable
from stitch.types import ActivationMode, Label, Ref

pytestmark = pytest.mark.engine

# Enough tokens that a pause meant for the middle of a request finds it running.
LONG = 1200
GREEDY = {"temperature": 0, "ignore_eos": True}


def _spans(answer: dict[str, Any]) -> list[tuple[int, int, int, str]]:
    spans = answer["meta_info"]["weight_versions"]
    assert all(s["run_id"] == "run-a" for s in spans)
    return [(s["version"], s["start"], s["end"], s["prefix"]) for s in spans]


def _triples(answer: dict[str, Any]) -> list[Any]:
    return list(answer["meta_info"]["output_token_logprobs"])


async def _pause_midway(live: Any, task: asyncio.Task[Any], mode: ActivationMode) -> None:
    await live.until(lambda i: i["running"] == 1, "the request runs")
    await asyncio.sleep(0.03)
    await live.engine.pause(mode)
    assert not task.done(), "paused too late: lengthen the request"


@pytest.mark.parametrize("sampling", [GREEDY, {"seed": 4, "ignore_eos": True}])
async def test_recompute_makes_the_tail_that_of_a_fresh_run(live: Any, sampling: Any) -> None:
    prompt = list(range(40, 77))
    task = asyncio.create_task(live.generate(prompt, max_new_tokens=LONG, **sampling))
    assert (await live.stage(2, undo=1)).ok
    await _pause_midway(live, task, ActivationMode.RECOMPUTE)
    await live.must("commit")
    await live.label(2)
    assert await live.engine.resume(recompute=True) > 0
    answer = await task
    (_, start, cut, first), (_, at, end, second) = _spans(answer)
    assert [s[0] for s in _spans(answer)] == [1, 2]
    assert (start, at, end, first, second) == (0, cut, LONG, "exact", "exact")
    assert answer["meta_info"]["weight_version_start"] == 1
    assert answer["meta_info"]["weight_version_end"] == 2
    assert answer["meta_info"]["weight_version"] == "1"
    if sampling is GREEDY:
        # Tail: bit for bit what the new weights alone say about prompt + tokens so far.
        so_far = prompt + answer["output_ids"][:cut]
        fresh = await live.generate(
            so_far, max_new_tokens=LONG - cut, **GREEDY, extra={"extra_key": "fresh"}
        )
        assert fresh["meta_info"]["cached_tokens"] == 0
        assert _triples(fresh) == _triples(answer)[cut:]
    await live.activate(1, undo=2)
    old = await live.generate(prompt, max_new_tokens=cut, **sampling)
    assert _triples(old) == _triples(answer)[:cut]


async def test_carried_state_is_marked_and_never_cached(live: Any) -> None:
    prompt = list(range(40, 77))
    task = asyncio.create_task(live.generate(prompt, max_new_tokens=LONG, **GREEDY))
    assert (await live.stage(2, undo=1)).ok
    await _pause_midway(live, task, ActivationMode.IN_PLACE)
    await live.must("commit")
    await live.label(2)
    await live.engine.resume(recompute=False)
    answer = await task
    (v1, _, cut, first), (v2, _, end, second) = _spans(answer)
    assert (v1, first, v2, second, end) == (1, "exact", 2, "carried", LONG)
    so_far = prompt + answer["output_ids"][:cut]
    fresh = await live.generate(so_far, max_new_tokens=LONG - cut, **GREEDY)
    assert fresh["meta_info"]["cached_tokens"] == 0
    assert _triples(fresh) != _triples(answer)[cut:], "the weights changed too little to tell"


async def test_sixteen_streams_cross_three_versions_and_none_is_cut(live: Any) -> None:
    async def follow(i: int) -> Any:
        params = {"max_new_tokens": 700, "ignore_eos": True, "seed": i}
        last: Any = None
        body = {"text": f"stream {i}", "sampling_params": params}
        async for event in live.events("/generate", body):
            if event == "[DONE]":
                return last
            last = event
        raise AssertionError("the stream ended without its terminator")

    tasks = [asyncio.create_task(follow(i)) for i in range(16)]
    await live.until(lambda i: i["running"] == 16, "all run")
    await _until_output(live, 16 * 3)
    await live.activate(2, undo=1, mode=ActivationMode.RECOMPUTE)
    await _until_output(live, 16 * 3)
    await live.activate(3, undo=2, mode=ActivationMode.IN_PLACE)
    await _until_output(live, 16 * 3)
    await live.engine.pause(ActivationMode.RECOMPUTE)
    assert await live.engine.resume(recompute=True) > 0
    for answer in await asyncio.gather(*tasks):
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 700}
        spans = _spans(answer)
        assert [(v, prefix) for v, _, _, prefix in spans] == [
            (1, "exact"),
            (2, "exact"),
            (3, "carried"),
            (3, "exact"),
        ]
        assert answer["meta_info"]["weight_version_start"] == 1
        assert answer["meta_info"]["weight_version_end"] == 3


async def _output_tokens(live: Any) -> int:
    async with live.http.get("/metrics") as response:
        page = await response.text()
    name = "stitch_engine_output_tokens_total "
    return int(next(line for line in page.splitlines() if line.startswith(name)).split()[1])


async def test_no_commit_slips_in_while_a_resume_recomputes(live: Any) -> None:
    tasks = [
        asyncio.create_task(live.generate([i + 1] * 700, max_new_tokens=LONG, **GREEDY))
        for i in range(8)
    ]
    await live.until(lambda i: i["running"] == 8, "all run")
    await _until_output(live, 16)
    assert (await live.stage(2, undo=1)).ok
    await live.engine.pause(ActivationMode.RECOMPUTE)
    await live.must("commit")
    await live.label(2)
    resuming = asyncio.create_task(live.engine.resume(recompute=True))
    await live.until(lambda i: not i["paused"], "it recomputes")
    assert not resuming.done(), "too quick to try: lengthen the prompts"
    assert (await live.order("undo")).code == "refused"
    # A pause in the middle ends that resume; the next one does the rest.
    await live.engine.pause(ActivationMode.RECOMPUTE)
    with pytest.raises(EngineUnavailable):
        await resuming
    assert await live.engine.resume(recompute=True) > 0
    await live.post("/abort_request", {"abort_all": True})
    for answer in await asyncio.gather(*tasks):
        if not answer["output_ids"]:
            continue  # still in its prompt when all were aborted
        assert [s[0] for s in _spans(answer)] in ([1], [2], [1, 2])
        assert {s[3] for s in _spans(answer)} == {"exact"}


async def _until_output(live: Any, count: int) -> None:
    before = await _output_tokens(live)
    while await _output_tokens(live) < before + count:
        await asyncio.sleep(0.002)


async def test_undo_restores_outputs_and_leaves_no_stale_prefix(live: Any) -> None:
    prompt = "the same prompt again and again " * 3
    before = await live.generate(prompt, max_new_tokens=30, **GREEDY)
    again = await live.generate(prompt, max_new_tokens=30, **GREEDY)
    assert again["meta_info"]["cached_tokens"] > 0
    assert (await live.stage(2, undo=1)).ok
    await live.engine.pause(ActivationMode.RECOMPUTE)
    await live.must("commit")
    await live.label(2)
    await live.engine.resume(recompute=True)
    under_2 = await live.generate(prompt, max_new_tokens=30, **GREEDY)
    assert under_2["meta_info"]["cached_tokens"] == 0
    assert _triples(under_2) != _triples(before)
    await live.engine.pause(ActivationMode.RECOMPUTE)
    await live.must("undo")
    assert (await live.order("state")).data["label"] is None
    sums = (await live.must("verify", scope="full")).data["checksums"]
    assert sums == {t.name: t.checksum for t in live.slices(1)}
    await live.label(1)
    await live.engine.resume(recompute=True)
    after = await live.generate(prompt, max_new_tokens=30, **GREEDY)
    assert after["meta_info"]["cached_tokens"] == 0
    assert _triples(after) == _triples(before)


async def test_activated_weights_speak_like_a_fresh_process(
    live: Any, models: dict[int, Path], tmp_path: Path
) -> None:
    for version, undo in ((2, 1), (3, 2), (2, 3)):
        await live.activate(version, undo=undo)
    here = await live.generate("probe", max_new_tokens=40, **GREEDY)
    fresh = await EngineProcess.spawn(models[2], work_dir=tmp_path, env=Env())
    try:
        other = type(live)(fresh, models)
        there = await other.generate("probe", max_new_tokens=40, **GREEDY)
        assert "weight_version" not in there["meta_info"]
        assert _triples(here) == _triples(there)
        await other.close()
    finally:
        assert await fresh.terminate() == 0


async def test_orders_are_idempotent_and_late_ones_do_nothing(live: Any) -> None:
    assert (await live.stage(2, undo=1)).ok
    tensors = {"tensors": live.slices(2), "undo_tensors": live.slices(1)}
    await live.must("stage", **tensors)
    assert (await live.order("stage", tensors=live.slices(3))).code == "refused"
    assert (await live.order("commit")).code == "refused", "not paused"
    await live.engine.pause(ActivationMode.RECOMPUTE)
    await live.engine.pause(ActivationMode.RECOMPUTE)
    for _ in range(2):
        await live.must("commit")
    generation = (await live.info())["weights_generation"]
    await live.must("commit")
    assert (await live.info())["weights_generation"] == generation, "a repeat does not act"
    assert (await live.order("stage", **tensors)).code == "refused"
    assert (await live.order("commit", attempt=live.attempt - 1)).code == "stale"
    assert (await live.order("commit", incarnation="stranger")).code == "refused"
    state = (await live.order("state", incarnation="stranger")).data
    assert (state["step"], state["label"]) == ("committed", None)
    for _ in range(2):
        await live.must("undo")
    assert (await live.order("commit")).code == "refused", "an undone attempt never commits"
    await live.must("discard")
    assert (await live.order("undo")).code == "refused"
    # A higher attempt forgets the older stage.
    assert (await live.stage(2, undo=1)).ok
    live.attempt += 1
    await live.must("label", label=Label(Ref("run-a", 1), 99))
    assert (await live.order("commit")).code == "refused"
    assert (await live.order("verify")).code == "refused"
    former = live.incarnation
    live.incarnation, live.attempt = former + "-next", 0
    await live.take_over()
    assert (await live.order("state")).data["label"] is None
    for op in ("discard", "label", "stage"):
        assert (await live.order(op, incarnation=former, attempt=99)).code == "refused"


async def test_undo_of_a_commit_that_never_came_blocks_the_late_commit(live: Any) -> None:
    assert (await live.stage(2, undo=1)).ok
    await live.engine.pause(ActivationMode.RECOMPUTE)
    await live.must("undo")
    assert (await live.order("commit")).code == "refused"
    sums = (await live.must("verify", scope="full")).data["checksums"]
    assert sums == {t.name: t.checksum for t in live.slices(1)}


async def test_what_does_not_fit_is_refused_before_anything_changes(live: Any) -> None:
    good = live.slices(2)
    first = good[0]
    bad = {
        "name": replace(first, name="mtp.lm_head.weight"),
        "dtype": replace(first, dtype="F32"),
        "shape": replace(first, shape=(first.shape[0] + 1, *first.shape[1:])),
        "size": replace(first, nbytes=first.nbytes - 2),
    }
    for field, tensor in bad.items():
        live.attempt += 1
        reply = await live.order("stage", tensors=(*good[1:], tensor), undo_tensors=())
        assert reply.code == "mismatch", field
        assert (await live.order("state")).data["step"] == "none"
    live.attempt += 1
    twice = await live.order("stage", tensors=(first, first), undo_tensors=())
    assert twice.code == "mismatch"
    for field, tensor in {
        "checksum": replace(first, checksum=good[1].checksum),
        "path": replace(first, path=first.path + ".gone"),
        "offset": replace(first, offset=first.offset + 2**40),
    }.items():
        live.attempt += 1
        assert (await live.order("stage", tensors=(tensor,))).code == "failed", field
    sums = (await live.must("verify", scope="full")).data["checksums"]
    assert sums == {t.name: t.checksum for t in live.slices(1)}


async def test_a_commit_that_breaks_half_way_can_be_undone(live: Any, tmp_path: Path) -> None:
    for shard in live.models[2].glob("*.safetensors*"):
        shutil.copy(shard, tmp_path)
    target = [replace(t, path=str(tmp_path / Path(t.path).name)) for t in live.slices(2)]
    live.attempt += 1
    await live.must("stage", tensors=tuple(target), undo_tensors=live.slices(1), via="disk")
    last = target[-1]
    with Path(last.path).open("r+b") as file:
        file.seek(last.offset)
        file.write(b"\x11" * 8)
    await live.engine.pause(ActivationMode.RECOMPUTE)
    reply = await live.order("commit")
    assert reply.code == "failed"
    assert last.name in reply.message
    sums = (await live.must("verify")).data["checksums"]
    expected = {t.name: t.checksum for t in live.slices(1)}
    assert sums != expected, "some bytes did change"
    assert (await live.order("commit")).code == "refused"
    await live.must("undo")
    assert (await live.must("verify", scope="full")).data["checksums"] == expected


async def test_weights_of_nans_fail_loudly_and_leave_no_trace(live: Any, tmp_path: Path) -> None:
    prompt = list(range(40, 56))  # 16 tokens: a first pass without padding rows
    before = await live.generate(prompt, max_new_tokens=30, **GREEDY)
    names = ["model.norm.weight", "model.layers.0.self_attn.v_proj.weight"]
    old = live.slices(1, names)
    broken = []
    for i, part in enumerate(old):
        data = b"\xc0\x7f" * (part.nbytes // 2)  # quiet NaNs in bfloat16
        path = tmp_path / f"{i}.bin"
        path.write_bytes(data)
        lane = lane_bytes_for(part.shape, 16)
        text = additive_lanes(data, lane_bytes=lane).to_text()
        broken.append(replace(part, path=str(path), offset=0, checksum=text))
    live.attempt += 1
    await live.must("stage", tensors=tuple(broken), undo_tensors=old)
    await live.engine.pause(ActivationMode.QUIESCE)
    await live.must("commit")
    sums = (await live.must("verify")).data["checksums"]
    assert sums == {t.name: t.checksum for t in broken}, "NaN bits arrive as they are"
    await live.engine.resume(recompute=False)
    bodies = [{"text": "x" * n, "sampling_params": {"max_new_tokens": 3}} for n in range(1, 17)]
    answers = await asyncio.gather(*(live.post("/generate", body) for body in bodies))
    assert {status for status, _ in answers} == {503}
    assert all("not finite" in answer["error"]["message"] for _, answer in answers)
    last: Any = None
    async for event in live.events("/generate", {"text": "x"}):
        last = event
    assert "not finite" in last["error"]["message"], "an error event and no terminator"
    await live.engine.pause(ActivationMode.QUIESCE)
    await live.must("undo")
    await live.label(1)
    await live.engine.resume(recompute=False)
    after = await live.generate(prompt, max_new_tokens=30, **GREEDY)
    assert _triples(after) == _triples(before)


async def test_a_partial_stage_changes_those_tensors_alone(live: Any) -> None:
    names = ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"]
    live.attempt += 1
    await live.must(
        "stage", tensors=live.slices(3, names), undo_tensors=live.slices(1, names), via="disk"
    )
    await live.engine.pause(ActivationMode.QUIESCE)
    await live.must("commit")
    changed = (await live.must("verify")).data["checksums"]
    assert set(changed) == set(names)
    full = (await live.must("verify", scope="full")).data["checksums"]
    expected = {t.name: t.checksum for t in live.slices(1)}
    expected |= {t.name: t.checksum for t in live.slices(3, names)}
    assert full == expected
    await live.must("undo")


async def test_while_paused_aborts_answer_at_once_and_arrivals_wait(live: Any) -> None:
    task = asyncio.create_task(
        live.generate("running", max_new_tokens=LONG, **GREEDY, extra={"rid": "run"})
    )
    await _pause_midway(live, task, ActivationMode.RECOMPUTE)
    held = asyncio.create_task(
        live.generate("held", max_new_tokens=5, **GREEDY, extra={"rid": "held"})
    )
    late = asyncio.create_task(live.generate("late", max_new_tokens=5, **GREEDY))
    await live.until(lambda i: i["waiting"] == 2, "they are held")
    await live.engine.abort("run")
    await live.engine.abort("held")
    ended = await asyncio.wait_for(asyncio.gather(task, held), 5)
    assert [a["meta_info"]["finish_reason"]["type"] for a in ended] == ["abort", "abort"]
    assert ended[0]["meta_info"]["weight_version_start"] == 1
    assert "weight_version_start" not in ended[1]["meta_info"], "no token, nothing to tell"
    assert (await live.engine.health()).value == "healthy"
    async with live.http.get("/health") as response:
        assert response.status == 200
    assert not late.done()
    # A request admitted under one version and first scheduled under another says the latter.
    assert (await live.stage(2, undo=1)).ok
    await live.must("commit")
    await live.label(2)
    await live.engine.resume(recompute=True)
    assert _spans(await late) == [(2, 0, 5, "exact")]


async def test_quiesce_refuses_to_cut_running_requests(live: Any) -> None:
    task = asyncio.create_task(live.generate("running", max_new_tokens=LONG, **GREEDY))
    await live.until(lambda i: i["running"] == 1, "it runs")
    with pytest.raises(ActivationFailed):
        await live.engine.pause(ActivationMode.QUIESCE)
    assert (await task)["meta_info"]["completion_tokens"] == LONG
    await live.engine.pause(ActivationMode.QUIESCE)


async def test_a_relabel_of_equal_bytes_keeps_prefixes_exact(live: Any) -> None:
    task = asyncio.create_task(live.generate("relabel", max_new_tokens=LONG, **GREEDY))
    await _pause_midway(live, task, ActivationMode.IN_PLACE)
    await live.label(2)
    await live.engine.resume(recompute=False)
    spans = _spans(await task)
    assert [(s[0], s[3]) for s in spans] == [(1, "exact"), (2, "exact")]
    await live.label(None)
    unknown = await live.generate("relabel", max_new_tokens=3)
    assert not any(key.startswith("weight") for key in unknown["meta_info"])


async def test_two_hundred_pauses_leak_nothing(live: Any) -> None:
    stop = asyncio.Event()
    done = 0

    async def client(i: int) -> None:
        nonlocal done
        n = 0
        while not stop.is_set():
            n += 1
            rid = f"c{i}-{n}"
            body = {
                "text": f"client {i} " * 3,
                "rid": rid,
                "sampling_params": {"max_new_tokens": 12},
            }
            task = asyncio.create_task(live.post("/generate", body))
            if n % 3 == 0:
                await asyncio.sleep(0.002)
                await live.engine.abort(rid)
            status, _ = await task
            assert status == 200
            done += 1

    clients = [asyncio.create_task(client(i)) for i in range(6)]
    assert (await live.stage(2, undo=1)).ok
    for cycle in range(200):
        mode = ActivationMode.RECOMPUTE if cycle % 2 else ActivationMode.IN_PLACE
        await live.engine.pause(mode)
        if cycle == 100:
            await live.must("commit")
            await live.label(2)
        await live.engine.resume(recompute=mode is ActivationMode.RECOMPUTE)
    before = done
    await live.until(lambda _: done > before + 12, "requests still end")
    stop.set()
    await asyncio.gather(*clients)
    info = await live.info()
    assert (info["running"], info["waiting"], info["paused"]) == (0, 0, False)


async def test_update_from_disk_checks_first_and_runs_one_at_a_time(
    live: Any, tmp_path: Path
) -> None:
    reference = await live.generate("disk", max_new_tokens=20, **GREEDY)
    path = "/update_weights_from_disk"
    for broken in (tmp_path / "absent", _other_shape(tmp_path / "shape")):
        status, answer = await live.post(path, {"model_path": str(broken)})
        assert (status, answer["success"]) == (400, False), answer
        assert answer["message"]
    assert _triples(await live.generate("disk", max_new_tokens=20, **GREEDY)) == _triples(reference)
    await live.post("/pause_generation", {"mode": "retract"})
    updates = [
        live.post(path, {"model_path": str(live.models[v]), "weight_version": f"v{v}"})
        for v in (2, 3, 2, 3)
    ]
    assert [status for status, _ in await asyncio.gather(*updates)] == [200] * 4
    await live.post(path, {"model_path": str(live.models[2]), "weight_version": "final"})
    await live.post("/continue_generation", {})
    async with live.http.get("/model_info") as response:
        assert (await response.json())["weight_version"] == "final"
    answer = await live.generate("disk", max_new_tokens=20, **GREEDY)
    assert "weight_version" not in answer["meta_info"], "only the rank channel proves a version"
    assert answer["meta_info"]["cached_tokens"] == 0
    sums = (await live.must("verify", scope="full")).data["checksums"]
    assert sums == {t.name: t.checksum for t in live.slices(2)}


def _other_shape(target: Path) -> Path:
    from stitch.engines.embedded.tiny import write_tiny_model

    write_tiny_model(target, hidden_size=64, layers=2, intermediate_size=80)
    return target


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_sglang_pause_modes(live: Any, mode: str) -> None:
    task = asyncio.create_task(live.generate("modes", max_new_tokens=LONG, **GREEDY))
    await live.until(lambda i: i["running"] == 1, "it runs")
    status, answer = await live.post("/flush_cache", {})
    assert status == 400
    assert "in flight" in answer["error"]["message"]
    assert (await live.post("/pause_generation", {"mode": mode}))[0] == 200
    status, answer = await live.post("/flush_cache", {})
    assert status == 200
    assert answer["message"].startswith("Cache flushed")
    if mode == "abort":
        assert (await task)["meta_info"]["finish_reason"]["type"] == "abort"
    update = {"model_path": str(live.models[2]), "flush_cache": True}
    assert (await live.post("/update_weights_from_disk", update))[0] == 200
    assert (await live.post("/continue_generation", {}))[0] == 200
    if mode != "abort":
        assert (await task)["meta_info"]["completion_tokens"] == LONG
