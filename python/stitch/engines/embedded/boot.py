"""Puts one engine together: model, pages, runner, scheduler, rank."""

from __future__ import annotations

import torch

from stitch.engines.embedded.config import EngineConfig
from stitch.engines.embedded.kv import PAGE_TOKENS, PagePool
from stitch.engines.embedded.model import load_model
from stitch.engines.embedded.rank import Rank
from stitch.engines.embedded.runner import Runner
from stitch.engines.embedded.scheduler import Scheduler
from stitch.engines.embedded.service import Service
from stitch.engines.embedded.text import TextCodec
from stitch.env import Env
from stitch.errors import InvalidInput

__all__ = ["build_service"]

_PROBE_PAGES = 16  # what the boot probe needs
# Bounds of the default pool: eight full contexts within them, and one context in any case.
_KV_TOKENS_MIN = 8192
_KV_TOKENS_MAX = 65536


def build_service(config: EngineConfig, env: Env) -> Service:
    """Load everything; the scheduler is not started yet. Blocking.

    Raises: InvalidInput, Unsupported or CorruptData if the model directory cannot be served.
    """
    torch.set_num_threads(config.threads)
    dtype = torch.float32 if config.compute_dtype == "float32" else torch.bfloat16
    model = load_model(config.model, compute_dtype=dtype)
    codec = TextCodec(config.model)
    context = config.context_tokens_max or model.context_tokens_max
    if not 2 <= context <= model.context_tokens_max:
        raise InvalidInput(
            f"context length {context} is not from 2 to the model's {model.context_tokens_max}",
            param="context_length",
        )
    kv_tokens = config.kv_tokens or max(context, _KV_TOKENS_MIN, min(8 * context, _KV_TOKENS_MAX))
    pages = -(-kv_tokens // PAGE_TOKENS)
    if pages * PAGE_TOKENS < context or pages < _PROBE_PAGES:
        raise InvalidInput(
            f"kv_tokens {kv_tokens} holds no full context of {context} tokens", param="kv_tokens"
        )
    pool = PagePool(
        pages=pages, layers=model.layers, kv_heads=model.kv_heads, head_dim=model.head_dim
    )
    runner = Runner(model, pool)
    scheduler = Scheduler(model, runner, codec, config, clock=env.clock, context_tokens_max=context)
    return Service(
        config=config,
        model=model,
        codec=codec,
        scheduler=scheduler,
        rank=Rank(model.weights, scheduler),
        env=env,
        boot_id=env.random.nonce(),
        batch_invariant=runner.batch_invariant,
        started_wall_s=int(env.clock.wall()),
    )
