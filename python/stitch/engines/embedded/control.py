"""Control routes: SGLang's and Stitch's own. A sidecar blocks them for clients."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

import torch
from aiohttp import web

from stitch import __version__
from stitch.engines.embedded.generation import Ask
from stitch.engines.embedded.http_face import json_response, read_object
from stitch.engines.embedded.server_routes import live_routes
from stitch.engines.embedded.service import Service
from stitch.engines.embedded.weights import Mismatch
from stitch.engines.embedded.wire import order_from_wire, replies_to_wire
from stitch.errors import InvalidInput, StitchError
from stitch.format.checkpoint import Checkpoint
from stitch.types import ActivationMode

__all__ = [
    "abort_request",
    "continue_generation",
    "describe",
    "flush_cache",
    "pause",
    "pause_generation",
    "rank_order",
    "resume",
    "update_from_disk",
]

FLUSHED: Final = "Cache flushed."


async def describe(service: Service, request: web.Request) -> web.Response:
    """`GET /stitch/describe`: who runs, what it holds, which routes exist."""
    return json_response(
        {
            "name": "stitch-embedded",
            "version": __version__,
            "boot_id": service.boot_id,
            "model_path": str(service.config.model),
            "architecture": service.model.architecture,
            "rank_count": 1,
            "batch_invariant": service.batch_invariant,
            "tensors": [
                {"name": t.name, "dtype": t.dtype, "shape": list(t.shape), "nbytes": t.nbytes}
                for t in service.model.weights.tensors.values()
            ],
            "aliases": service.model.weights.aliases,
            "routes": live_routes(request.app),
        }
    )


async def rank_order(service: Service, request: web.Request) -> web.Response:
    """`POST /stitch/rank`: one order to the one rank."""
    order = order_from_wire(await read_object(request))
    # Shielded: an order that began is finished, whether or not the sidecar still listens.
    work = asyncio.ensure_future(service.on_rank_thread(lambda: service.rank.obey(order)))
    return json_response(replies_to_wire([await asyncio.shield(work)]))


async def pause(service: Service, request: web.Request) -> web.Response:
    """`POST /stitch/pause`."""
    body = await read_object(request)
    try:
        mode = ActivationMode(str(body.get("mode")))
    except ValueError as error:
        modes = ", ".join(m.value for m in ActivationMode)
        raise InvalidInput(f"mode must be one of {modes}", param="mode") from error
    in_flight = await _pause(service, mode)
    return json_response({"paused": True, "in_flight": in_flight})


async def resume(service: Service, request: web.Request) -> web.Response:
    """`POST /stitch/resume`."""
    body = await read_object(request)
    if not isinstance(body.get("recompute"), bool):
        raise InvalidInput("recompute must be true or false", param="recompute")
    return json_response({"recompute_s": await _resume(service, recompute=body["recompute"])})


async def pause_generation(service: Service, request: web.Request) -> web.Response:
    """`POST /pause_generation {mode: abort|retract|in_place}`; abort is SGLang's default."""
    mode = (await read_object(request)).get("mode", "abort")
    if mode not in ("abort", "retract", "in_place"):
        raise InvalidInput("mode must be abort, retract or in_place", param="mode")
    await _pause(service, ActivationMode.IN_PLACE)
    service.pause_recomputes = mode != "in_place"
    if mode == "abort":
        await asyncio.wrap_future(
            service.scheduler.abort(lambda _: True, "aborted by pause_generation")
        )
    return json_response({"status": "ok", "message": f"Generation paused ({mode})."})


async def continue_generation(service: Service, request: web.Request) -> web.Response:
    """`POST /continue_generation`: after `retract` the state is computed anew."""
    recompute_s = await _resume(service, recompute=service.pause_recomputes)
    return json_response(
        {"status": "ok", "message": "Generation continued.", "recompute_s": recompute_s}
    )


async def flush_cache(service: Service, request: web.Request) -> web.Response:
    """`GET|POST /flush_cache`: refused while requests run unpaused, as SGLang does."""

    def flush() -> int:
        scheduler = service.scheduler
        pending = scheduler.running_count + scheduler.waiting_count
        if pending and not scheduler.paused:
            return pending
        scheduler.flush()
        return 0

    pending = await asyncio.wrap_future(service.scheduler.call(flush))
    if pending:
        raise InvalidInput(f"Cache not flushed: {pending} requests are in flight; pause first")
    return json_response({"success": True, "flushed": True, "message": FLUSHED})


async def abort_request(service: Service, request: web.Request) -> web.Response:
    """`POST /abort_request {rid | abort_all, whole}`. A rid names a request or one of its samples,
    with `whole` a request only."""
    body = await read_object(request)
    rid = body.get("rid") or ""
    if not isinstance(rid, str):
        raise InvalidInput("rid must be text", param="rid")
    everything, whole = body.get("abort_all") is True, body.get("whole") is True
    if not everything and not rid:
        raise InvalidInput("give rid, or abort_all: true", param="rid")

    def chosen(ask: Ask) -> bool:
        return everything or rid == ask.group or (not whole and rid == ask.rid)

    aborted = await asyncio.wrap_future(service.scheduler.abort(chosen, "aborted by request"))
    return json_response({"success": True, "aborted": aborted})


async def update_from_disk(service: Service, request: web.Request) -> web.Response:
    """`POST /update_weights_from_disk {model_path, weight_version, …}`.

    Everything is checked and read before the first live byte changes. Unpaused, requests in
    flight wait and have their state computed anew. The label becomes unknown: only the rank
    channel can prove a version.
    """
    body = await read_object(request)
    path, version = body.get("model_path"), body.get("weight_version")
    if not isinstance(path, str) or not path:
        raise InvalidInput("model_path must be text", param="model_path")
    if not isinstance(version, (str, type(None))):
        raise InvalidInput("weight_version must be text", param="weight_version")
    # One update at a time, paused or not; shielded as rank orders are.
    work = asyncio.ensure_future(_update(service, Path(path), body))
    try:
        in_flight = await asyncio.shield(work)
    except StitchError as error:
        return json_response({"success": False, "message": error.message}, status=400)
    message = "Succeeded to update model weights."
    if version is not None:
        service.weight_version_text = version
        message += f" Weight version updated to {version}."
    return json_response({"success": True, "message": message, "num_paused_requests": in_flight})


async def _update(service: Service, path: Path, body: dict[str, Any]) -> int:
    async with service.update_lock:
        images = await service.on_rank_thread(lambda: _read_images(service, path))
        scheduler = service.scheduler
        if body.get("abort_all_requests") is True:
            await asyncio.wrap_future(scheduler.abort(lambda _: True, "aborted by an update"))
        was_paused = scheduler.paused
        in_flight = await _pause(service, ActivationMode.IN_PLACE)
        await service.on_rank_thread(lambda: service.rank.reload(images))
        if not was_paused:
            await _resume(service, recompute=True)
        return in_flight if was_paused else 0


def _read_images(service: Service, path: Path) -> list[tuple[str, torch.Tensor]]:
    weights = service.model.weights
    with Checkpoint.open(path) as checkpoint:
        for name, stored in checkpoint.tensors.items():
            weights.canonical(name, stored.dtype, stored.shape)
            for twin in weights.twins(name):
                if twin == name or twin not in checkpoint.tensors:
                    continue
                if checkpoint.read(twin) != checkpoint.read(name):
                    raise Mismatch(f"{name} and {twin} are tied but differ", tensor=name)
        covered = {weights.aliases.get(name, name) for name in checkpoint.tensors}
        missing = sorted(set(weights.tensors) - covered)
        if missing:
            raise Mismatch(f"{path} lacks tensor {missing[0]}", tensor=missing[0])
        return [(name, weights.image(name, checkpoint.read(name))) for name in checkpoint.tensors]


async def _pause(service: Service, mode: ActivationMode) -> int:
    return await asyncio.wrap_future(service.scheduler.call(lambda: service.scheduler.pause(mode)))


async def _resume(service: Service, *, recompute: bool) -> float:
    return await asyncio.wrap_future(service.scheduler.resume(recompute=recompute))
