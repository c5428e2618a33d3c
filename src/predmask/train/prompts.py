"""Questions as the tokens of prompts, and responses as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from predmask.tasks import Problem
from predmask.train.config import ConfigError, PromptConfig

_QUESTION = "{question}"


class Prompts:
    """Turns problems into prompts as configured: template first, then the chat template of the tokenizer.

    Without a chat template, the text is given to the tokenizer as it is, a system message before it. Raises
    ConfigError where `chat` is asked of a tokenizer that has no chat template.
    """

    def __init__(self, tokenizer: Any, config: PromptConfig) -> None:
        if config.chat and not tokenizer.chat_template:
            raise ConfigError(
                "prompt.chat is on, but the model's tokenizer has no chat template; leave it off, and write into "
                "prompt.template what a prompt should look like"
            )
        self._tokenizer = tokenizer
        self._config = config

    def encode(self, problems: Sequence[Problem]) -> list[list[int]]:
        """The prompts as token ids."""
        texts = [self._text(problem) for problem in problems]
        # A chat template writes the special tokens itself.
        return self._tokenizer(texts, add_special_tokens=not self._config.chat)["input_ids"] if texts else []

    def decode(self, responses: Sequence[Sequence[int]]) -> list[str]:
        """Responses as text, for verifier and reader only: training uses the ids."""
        return self._tokenizer.batch_decode(responses, skip_special_tokens=True)

    def fitting(self, problems: Sequence[Problem]) -> list[Problem]:
        """The problems whose prompt has at most `max_tokens` tokens."""
        limit = self._config.max_tokens
        if limit is None:
            return list(problems)
        return [problem for problem, ids in zip(problems, self.encode(problems), strict=True) if len(ids) <= limit]

    def _text(self, problem: Problem) -> str:
        # Not str.format: braces are common in mathematics.
        text = self._config.template.replace(_QUESTION, problem.prompt)
        if not self._config.chat:
            return f"{problem.system}\n\n{text}" if problem.system else text
        messages = [{"role": "system", "content": problem.system}] if problem.system else []
        messages.append({"role": "user", "content": text})
        return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
