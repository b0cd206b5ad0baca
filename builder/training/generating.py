"""The data of a decoder's tenant: prompts and what is to be written behind them. Nothing is learned from the prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from builder.learning.causal import ROWS, NextTokens
from builder.learning.loop import products_dtype
from builder.store.store import Store
from builder.tasks.examples import Example
from builder.tasks.lookup import LookedUp, Reader, Texts
from builder.tasks.scores import Scores
from builder.tasks.tasks import TrainingTask
from builder.training.data import Data
from hplm.errors import InvalidInput
from hplm.model.prompts import Prompts


class PromptReader(Reader):
    """Looks prompts and targets up in one domain's chain, as one text."""

    def __init__(self, store: Store, domain: str, version: int) -> None:
        super().__init__(store, domain, version)
        self.prompts = Prompts.load(store.folder / "tokenizer.json", store.config)

    def __reduce__(self) -> tuple[type[PromptReader], tuple[Store, str, int]]:
        return PromptReader, (self.store, *self.branch)

    def prompt_of(self, example: Example) -> np.ndarray:
        """Returns the tokens of the prompt, the start id first."""
        try:
            return (self.prompts.of_messages if example.is_chat else self.prompts.encode)(example.text)
        except InvalidInput as error:
            raise InvalidInput(f"{example.where}: {error}") from None

    def _encode(self, task: TrainingTask, example: Example) -> tuple[LookedUp, np.ndarray, bool]:
        """Returns prompt and target as one text. A span is the token before one of the target, and that one."""
        config, prompts, prompt = self.store.config, self.prompts, self.prompt_of(example)
        target = np.array([*prompts.ids_of(example.target), *config.end_ids[:1]], dtype=np.int64)
        is_cut = len(prompt) + len(target) > config.positions
        target = target[: config.positions - 1]
        prompt = prompts.end_of(prompt, config.positions - len(target))
        tokens = np.concatenate([prompt, target])
        before = np.arange(len(prompt) - 1, len(tokens) - 1)
        spans = np.stack([before, target, target], 1)
        return LookedUp(tokens, np.array([len(tokens)]), np.zeros_like(tokens)), spans, is_cut


@dataclass(frozen=True)
class NextTokenLoss:
    """The loss of targets, from what the decoder's matrix makes logits from."""

    matrix: Tensor

    def __call__(self, read: Tensor, targets: Tensor, rows_of: list[int], scale: float = 1.0) -> tuple[Tensor, int]:
        loss: Tensor = NextTokens.apply(read.to(self.matrix.device), self.matrix, targets.to(self.matrix.device), None)
        return loss * len(targets), len(targets)

    def likeliest(self, read: np.ndarray) -> list[int]:
        rows = torch.from_numpy(read).to(self.matrix).split(ROWS)
        return torch.cat([(part @ self.matrix.T).argmax(1) for part in rows]).tolist()


@dataclass(frozen=True)
class WrittenData(Data):
    """The prompts and targets of a training. Its rows are those of the targets' tokens."""

    @classmethod
    def of(cls, data: Data, next_token: Tensor) -> WrittenData:
        """`next_token`: the decoder's matrix, which makes logits."""
        matrix = next_token.detach().to(data.device, products_dtype(data.device))
        own = {field.name: getattr(data, field.name) for field in fields(Data)}
        return cls(**{**own, "task": replace(data.task, loss=NextTokenLoss(matrix))})

    def answers(self, texts: Texts, logits: Sequence[np.ndarray]) -> list[list[str]]:
        """Returns of each text the likeliest tokens, each behind those of the target before it."""
        assert isinstance(self.reader, PromptReader)
        return [[self.reader.prompts.decode(likeliest)] for likeliest in self._likeliest(logits)]

    def scored(self, texts: Texts, logits: Sequence[np.ndarray]) -> Scores:
        """Returns the share of the targets' tokens that are the likeliest ones behind those before them."""
        pairs = zip(self._likeliest(logits), (text.targets.tolist() for text in texts.texts), strict=True)
        right = [own == wanted for one in pairs for own, wanted in zip(*one, strict=True)]
        return Scores(len(right), "right_tokens", {"right_tokens": sum(right) / len(right)})

    def _likeliest(self, logits: Sequence[np.ndarray]) -> list[list[int]]:
        assert isinstance(self.task.loss, NextTokenLoss)
        return [self.task.loss.likeliest(read) for read in logits]
