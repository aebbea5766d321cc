"""Log lines of the long-running commands: time, level, event, and the event's fields."""

from __future__ import annotations

import json
import logging
import os
from typing import Final

from stitch.errors import InvalidInput

__all__ = ["FieldFormatter", "configure_logging"]

_OWN: Final = frozenset(
    {*vars(logging.LogRecord("", 0, "", 0, "", (), None)), "message", "asctime", "taskName"}
)


class FieldFormatter(logging.Formatter):
    """`TIME LEVEL LOGGER EVENT field=value …`; values as JSON where they are not plain words."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = [
            f"{name}={_field(value)}" for name, value in vars(record).items() if name not in _OWN
        ]
        return " ".join([super().formatMessage(record), *fields])


def _field(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value) if isinstance(value, int) else json.dumps(value, default=str)


def configure_logging(default: str = "INFO") -> None:
    """Log to standard error, at the level in `STITCH_LOG`, else at `default`.

    Raises: InvalidInput for a level that does not exist.
    """
    level = os.environ.get("STITCH_LOG", default).upper()
    handler = logging.StreamHandler()
    handler.setFormatter(FieldFormatter())
    try:
        logging.basicConfig(level=level, handlers=[handler])
    except ValueError as error:
        raise InvalidInput(
            f"STITCH_LOG={level} is not DEBUG, INFO, WARNING or ERROR", param="STITCH_LOG"
        ) from error
