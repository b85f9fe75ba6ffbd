"""A model that knows four passages by heart, so that the demo can show text without downloading weights.

The layers are random. The head is fitted: ridge regression from the last hidden states of the passages to the words that
follow. It solves one system of a few hundred equations, which takes a moment. A word then has a logit near `SCALE` and all others
are near 0, so tokens agree if the hidden states do. They depend on every layer: a wrong kernel recites something else.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

PASSAGES: Final = (
    "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my purse, and nothing particular "
    "to interest me on shore, I thought I would sail about a little and see the watery part of the world. It is a way I have",
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or twice she had "
    "peeped into the book her sister was reading, but it had no pictures or conversations in it, and what is the use of a book,",
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a wife. However "
    "little known the feelings or views of such a man may be on his first entering a neighbourhood, this truth is so well fixed",
    "Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in Liberty, and dedicated to "
    "the proposition that all men are created equal. Now we are engaged in a great civil war, testing whether that nation, or "
    "any nation so conceived",
)
"""The beginnings of Moby-Dick, Alice's Adventures in Wonderland, Pride and Prejudice, and the Gettysburg Address."""
SCALE: Final = 10.0
RIDGE: Final = 1e-4
"""Of the largest eigenvalue. Less fits more exactly, and makes more of roundings."""
FIRST: Final = 2
"""The id of the first word; 0 and 1 are the tokens for padding and the beginning."""


class Passages:
    """The first words of each passage, as tokens."""

    def __init__(self, prompt: int, new: int) -> None:
        self.prompt, self.words = prompt, list[str]()
        rows = [[self._id(word) for word in text.split()[: prompt + new]] for text in PASSAGES]
        self.ids = torch.tensor(rows)

    def _id(self, word: str) -> int:
        if word not in self.words:
            self.words.append(word)
        return FIRST + self.words.index(word)

    def text(self, tokens: Tensor) -> str:
        """Tokens as words."""
        return " ".join(self.words[i - FIRST] if 0 <= i - FIRST < len(self.words) else "?" for i in tokens.tolist())

    def fit(self, model: Any) -> None:
        """Replace the head by one that continues the passages."""
        ids, head = self.ids.to(model.device), model.get_output_embeddings().weight
        with torch.no_grad():
            hidden = model.base_model(ids, use_cache=False).last_hidden_state[:, self.prompt - 1 : -1].float()
            x, following = hidden.flatten(0, 1), ids[:, self.prompt :].flatten()
            products = x @ x.T
            ridge = RIDGE * torch.linalg.eigvalsh(products)[-1] * torch.eye(len(x), device=x.device)
            wanted = SCALE * F.one_hot(following, head.shape[0]).float()
            head.copy_(torch.linalg.solve(products + ridge, wanted).T @ x)
