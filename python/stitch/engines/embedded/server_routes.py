"""The live server's own list of its routes, for `describe` and for the test that walks it."""

from __future__ import annotations

from aiohttp import web

__all__ = ["live_routes"]


def live_routes(app: web.Application) -> list[list[str]]:
    """[method, path] of every route the application answers, sorted."""
    found = set()
    for route in app.router.routes():
        resource = route.resource
        found.add((route.method, "" if resource is None else resource.canonical))
    return [list(pair) for pair in sorted(found)]
