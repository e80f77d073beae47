"""A tokenizer behind the API: chats and prompts -> token ids, ids -> text.

Knows the tokenizer and the model's limits. Knows no HTTP and no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import TemplateError

from .openai_types import ApiError, Message, bad_value

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Prompter:
    """Wraps one tokenizer. `vocabulary` is the number of token ids that the model has an embedding for.

    `encode_*` may take milliseconds on a long text: call them off the event loop.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> None:
        self._tokenizer: Any = tokenizer
        self._vocabulary = vocabulary

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; special tokens have none."""
        text = self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def encode_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The ids of a chat by the model's own template. Raises `ApiError` 400 where that cannot be done."""
        if not getattr(self._tokenizer, "chat_template", None):
            message = "This model has no chat template. Use /v1/completions with a prompt instead."
            raise ApiError(400, message, param="messages", error_code="unsupported_value")
        chat = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise bad_value("messages", f"the model's chat template refuses them: {error}") from None
        return self._not_empty(self._encode(text, special=False), "messages")

    def encode_prompt(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """The ids of a prompt, which may be ids already. Raises `ApiError` 400 for an id out of range."""
        if isinstance(prompt, str):
            return self._not_empty(self._encode(prompt, special=True), "prompt")
        for token in prompt:
            if not 0 <= token < self._vocabulary:
                raise bad_value("prompt", f"token id {token} is not from 0 to {self._vocabulary - 1}.")
        return tuple(prompt)

    def _encode(self, text: str, *, special: bool) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

    def _not_empty(self, ids: tuple[int, ...], param: str) -> tuple[int, ...]:
        """An empty prompt starts the model at its beginning-of-text token, as the API reference says."""
        if ids:
            return ids
        begin = self._tokenizer.bos_token_id
        if begin is None:
            raise bad_value(param, "it is empty, and this model has no beginning-of-text token.")
        return (int(begin),)
