"""What token ids look like to people."""

from __future__ import annotations

from typing import Any


def token_texts(tokenizer: Any, size: int) -> dict[int, str]:
    """What each token adds to a text that it continues."""
    size = min(size, len(tokenizer))
    # After a token: alone, some tokenizers drop the space that a token begins with.
    before = next((i for i in range(size) if tokenizer.decode([i]).strip().isalnum()), 0)
    start = len(tokenizer.decode([before]))
    texts = tokenizer.batch_decode([[before, i] for i in range(size)], clean_up_tokenization_spaces=False)
    return {i: text[start:] or str(tokenizer.convert_ids_to_tokens(i)) for i, text in enumerate(texts)}
