"""Text in and out: the checkpoint's tokenizer, and text that grows token by token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from transformers import AutoTokenizer

from stitch.errors import InvalidInput

__all__ = ["TextCodec", "TextStream"]

_UNFINISHED: Final = "\N{REPLACEMENT CHARACTER}"
DEFAULT_CHAT_TEMPLATE: Final = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


class TextCodec:
    """One tokenizer. Safe to use from several threads."""

    def __init__(self, directory: Path) -> None:
        """Raises: InvalidInput if the directory has no tokenizer that loads offline."""
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                str(directory), local_files_only=True
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise InvalidInput(f"{directory} has no usable tokenizer: {first}") from error
        self._fast = getattr(self._tokenizer, "backend_tokenizer", None)

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own end token."""
        found: int | None = self._tokenizer.eos_token_id
        return found

    def encode(self, text: str) -> list[int]:
        """Token ids, with the special tokens the tokenizer adds by itself."""
        ids: list[int] = self._tokenizer(text)["input_ids"]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of ids; ids without a token give nothing."""
        if self._fast is not None:
            text: str = self._fast.decode(list(ids), skip_special_tokens=skip_special_tokens)
            return text
        known = [i for i in ids if i < len(self._tokenizer)]
        return str(self._tokenizer.decode(known, skip_special_tokens=skip_special_tokens))

    def render_chat(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation under the checkpoint's chat template, or a plain one.

        Raises: InvalidInput if the template refuses the messages.
        """
        template = None if self._tokenizer.chat_template else DEFAULT_CHAT_TEMPLATE
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages,
                chat_template=template,
                add_generation_prompt=True,
                tokenize=False,
                **options,
            )
        except Exception as error:
            # Templates are programs of the checkpoint: any exception is about the messages.
            raise InvalidInput(f"the chat template refused: {error}", param="messages") from error
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


class TextStream:
    """The text of a growing list of tokens, decoded once per token.

    `text` never holds half a character, and `settled` leaves out what could still turn out to
    be the start of a stop string.
    """

    __slots__ = ("_codec", "_from", "_hold", "_ids", "_shown", "_skip", "settled_length", "text")

    def __init__(
        self, codec: TextCodec, *, skip_special_tokens: bool, stops: Sequence[str]
    ) -> None:
        self._codec = codec
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._from = 0  # decoding starts here: a boundary whose text was complete
        self._shown = 0  # ids before this are in `text`
        self._hold = max((len(s) for s in stops), default=1) - 1
        self.text = ""
        self.settled_length = 0

    def push(self, token: int) -> None:
        """Add one token."""
        self._ids.append(token)
        whole = self._decode(self._from, len(self._ids))
        if not whole.endswith(_UNFINISHED):
            self._append(whole)

    def find_stop(self, stops: Sequence[str], since: int) -> tuple[int, str] | None:
        """The earliest stop string that ends after character `since`: its place and itself."""
        best: tuple[int, str] | None = None
        for stop in stops:
            at = self.text.find(stop, max(0, since - len(stop) + 1))
            if at >= 0 and (best is None or at < best[0]):
                best = (at, stop)
        return best

    def finish(self, *, cut_at: int | None = None) -> None:
        """The end: add an unfinished character as it is, cut at a stop string, settle all."""
        if cut_at is not None:
            self.text = self.text[:cut_at]
        elif self._shown < len(self._ids):
            self._append(self._decode(self._from, len(self._ids)))
        self.settled_length = len(self.text)

    def _append(self, whole: str) -> None:
        before = self._decode(self._from, self._shown)
        self.text += whole[len(before) :]
        self._from, self._shown = self._shown, len(self._ids)
        self.settled_length = max(self.settled_length, len(self.text) - self._hold)

    def _decode(self, start: int, end: int) -> str:
        if start == end:
            return ""
        return self._codec.decode(self._ids[start:end], skip_special_tokens=self._skip)
