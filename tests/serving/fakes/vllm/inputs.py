from typing import Any


def tokens_input(prompt_token_ids: list[int]) -> dict[str, Any]:
    return {"type": "token", "prompt_token_ids": prompt_token_ids}
