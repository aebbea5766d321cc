"""The engine's HTTP application: routes, read-only pages, life cycle."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web

from stitch import __version__
from stitch.engines.embedded import control, native, openai
from stitch.engines.embedded.http_face import error_middleware, json_response
from stitch.engines.embedded.metrics import render_metrics
from stitch.engines.embedded.service import Service
from stitch.engines.embedded.wire import label_to_wire
from stitch.errors import EngineUnavailable

__all__ = ["build_app"]

Handler = Callable[[Service, web.Request], Awaitable[web.StreamResponse]]


def build_app(service: Service) -> web.Application:
    """All routes of one engine."""
    app = web.Application(
        middlewares=[error_middleware], client_max_size=service.config.body_bytes_max
    )
    for method, path, handler in _HANDLERS:
        app.router.add_route(method, path, functools.partial(_call, handler, service))
    return app


async def _call(handler: Handler, service: Service, request: web.Request) -> web.StreamResponse:
    return await handler(service, request)


async def health(service: Service, request: web.Request) -> web.Response:
    """200 while the scheduler lives, paused or not."""
    if not service.scheduler.is_alive():
        raise EngineUnavailable("the scheduler has ended; restart the engine")
    return json_response({"status": "ok", "paused": service.scheduler.paused})


async def models(service: Service, request: web.Request) -> web.Response:
    """`GET /v1/models`."""
    card = {
        "id": service.model_name,
        "object": "model",
        "created": service.started_wall_s,
        "owned_by": "stitch",
        "max_model_len": service.scheduler.context_tokens_max,
    }
    return json_response({"object": "list", "data": [card]})


async def model_info(service: Service, request: web.Request) -> web.Response:
    """`GET /model_info`. `weight_version` is the text of the last update from disk."""
    return json_response(
        {
            "model_path": str(service.config.model),
            "tokenizer_path": str(service.config.model),
            "is_generation": True,
            "weight_version": service.weight_version_text,
            "model_type": service.model.architecture,
        }
    )


async def server_info(service: Service, request: web.Request) -> web.Response:
    """`GET /server_info`: configuration and present state."""
    scheduler, config = service.scheduler, service.config
    return json_response(
        {
            "engine": "stitch-embedded",
            "version": __version__,
            "boot_id": service.boot_id,
            "model_path": str(config.model),
            "device": "cpu",
            "dtype": config.compute_dtype,
            "threads": config.threads,
            "batch_invariant": service.batch_invariant,
            "context_length": scheduler.context_tokens_max,
            "max_running_requests": config.running_max,
            "max_queued_requests": config.queued_max,
            "paused": scheduler.paused,
            "label": label_to_wire(scheduler.label),
            "weights_generation": scheduler.weights_generation,
            "running": scheduler.running_count,
            "waiting": scheduler.waiting_count,
            "cached_pages": scheduler.cached_pages,
            "free_pages": scheduler.free_pages,
        }
    )


async def metrics(service: Service, request: web.Request) -> web.Response:
    """`GET /metrics`."""
    headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
    return web.Response(body=render_metrics(service).encode(), headers=headers)


_HANDLERS: Final[tuple[tuple[str, str, Handler], ...]] = (
    ("POST", "/generate", native.handle_generate),
    ("POST", "/v1/completions", openai.handle_completion),
    ("POST", "/v1/chat/completions", openai.handle_chat),
    ("GET", "/v1/models", models),
    ("GET", "/model_info", model_info),
    ("GET", "/get_model_info", model_info),
    ("GET", "/server_info", server_info),
    ("GET", "/get_server_info", server_info),
    ("GET", "/health", health),
    ("GET", "/metrics", metrics),
    ("POST", "/pause_generation", control.pause_generation),
    ("POST", "/continue_generation", control.continue_generation),
    ("GET", "/flush_cache", control.flush_cache),
    ("POST", "/flush_cache", control.flush_cache),
    ("POST", "/abort_request", control.abort_request),
    ("POST", "/update_weights_from_disk", control.update_from_disk),
    ("POST", "/stitch/rank", control.rank_order),
    ("POST", "/stitch/pause", control.pause),
    ("POST", "/stitch/resume", control.resume),
    ("GET", "/stitch/describe", control.describe),
    ("GET", "/stitch/health", health),
)
