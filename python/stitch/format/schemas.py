"""JSON Schemas of the stored documents, made from the models in `wire.py`.

The files in `docs/schemas/` are their printed form; a test says when they are out of date, and
`write_schemas(Path("docs/schemas"))` brings them up to date.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from pydantic import BaseModel

from stitch.format.wire import Manifest, RunRecord

__all__ = ["document_schemas", "write_schemas"]

_DOCUMENTS: Final[dict[str, type[BaseModel]]] = {
    "manifest.schema.json": Manifest,
    "run.schema.json": RunRecord,
}


def document_schemas() -> dict[str, str]:
    """File name -> text of the schema, for every stored document."""
    found = {}
    for name, model in _DOCUMENTS.items():
        schema = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            **model.model_json_schema(mode="serialization"),
        }
        found[name] = json.dumps(schema, indent=2, sort_keys=True) + "\n"
    return found


def write_schemas(directory: Path) -> None:
    """Write every schema into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in document_schemas().items():
        (directory / name).write_text(text, encoding="utf-8")
