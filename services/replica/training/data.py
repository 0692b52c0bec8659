"""Chats to token batches: which tokens are learnt, and in which order examples come.

Only assistant tokens carry loss, the end token included: padding is masked by position, never
by token id, so a model whose padding token is its end token still learns to stop.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.chat import ChatTokenizer
from shared.training_data import Chat, DataError

log = logging.getLogger(__name__)

IGNORED = -100
WINDOW = 64  # examples that are sorted by length together


@dataclass(frozen=True)
class Example:
    """Token ids of one chat; ``learnt[i]`` says whether predicting ``ids[i]`` counts."""

    ids: tuple[int, ...]
    learnt: tuple[bool, ...]


@dataclass(frozen=True)
class Encoded:
    """Examples of a data set, with what the length limit cost."""

    examples: tuple[Example, ...]
    truncated: int = 0  # cut at the limit, still learnt from
    dropped: int = 0  # nothing to learn was left before the limit

    @property
    def tokens(self) -> int:
        return sum(len(e.ids) for e in self.examples)


@dataclass(frozen=True)
class MicroBatch:
    """Right-padded tensors: ids, mask (1 = token) and labels (IGNORED = no loss), [B, length]."""

    ids: Tensor
    mask: Tensor
    labels: Tensor

    @property
    def tokens(self) -> int:
        return int(self.mask.sum())

    def to(self, device: torch.device) -> MicroBatch:
        return MicroBatch(self.ids.to(device), self.mask.to(device), self.labels.to(device))


@dataclass(frozen=True)
class Cursor:
    """Where in the stream of examples training stands: enough to go on after a restart."""

    epoch: int = 0
    position: int = 0


def encode_chat(chat: Chat, tokenizer: ChatTokenizer) -> Example:
    """One chat as the model will see it when asked: each prompt is tokenised as the gateway
    does it, each answer apart from it, and each learnt answer ends with an end token.

    Raises ValueError when the template rewrites earlier turns as a chat grows.
    """
    messages, ids, learnt, done = chat.messages, list[int](), list[bool](), ""
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        asked = tokenizer.render(messages[:i], add_generation_prompt=True)
        answered = tokenizer.render(messages[: i + 1], add_generation_prompt=False)
        if not asked.startswith(done) or not answered.startswith(asked):
            raise ValueError(
                "the model's chat template changes earlier turns as the chat grows; "
                "give one answer a chat"
            )
        prompt = tokenizer.encode(asked[len(done) :])
        answer = tokenizer.encode(answered[len(asked) :])
        ids += prompt + answer
        learnt += [False] * len(prompt) + _learnt(answer, message, tokenizer)
        if not any(token in tokenizer.eos_ids for token in answer) and i == len(messages) - 1:
            ids.append(min(tokenizer.eos_ids))
            learnt.append(message.get("weight", 1) == 1)
        done = answered
    return Example(tuple(ids), tuple(learnt))


def _learnt(answer: Sequence[int], message: dict[str, object], chat: ChatTokenizer) -> list[bool]:
    """True up to and including the first end token (what the template adds after it is not
    the model's to say); all False for an answer of weight 0."""
    if message.get("weight", 1) == 0:
        return [False] * len(answer)
    ends = [i for i, token in enumerate(answer) if token in chat.eos_ids]
    last = ends[0] if ends else len(answer) - 1
    return [i <= last for i in range(len(answer))]


def encode(chats: Sequence[Chat], tokenizer: ChatTokenizer, max_length: int, name: str) -> Encoded:
    """All chats as examples of at most ``max_length`` tokens; logs how many were cut.

    ``name`` is the file, for messages. Raises DataError with the line at fault.
    """
    examples, truncated, dropped = [], 0, 0
    for chat in chats:
        try:
            example = encode_chat(chat, tokenizer)
        except ValueError as e:
            raise DataError(name, chat.line, str(e)) from e
        if len(example.ids) > max_length:
            example = Example(example.ids[:max_length], example.learnt[:max_length])
            if any(example.learnt[1:]):
                truncated += 1
            else:
                dropped += 1
        if any(example.learnt[1:]):
            examples.append(example)
    if truncated or dropped:
        log.warning(
            "%s: of %d examples %d were cut at %d tokens and %d left out, because their answers "
            "begin after it",
            name,
            len(chats),
            truncated,
            max_length,
            dropped,
        )
    return Encoded(tuple(examples), truncated, dropped)


def collate(examples: Sequence[Example]) -> MicroBatch:
    """Pad to the longest example on the right; padding has mask 0 and no loss."""
    longest = max(len(e.ids) for e in examples)
    ids = torch.zeros(len(examples), longest, dtype=torch.long)
    mask = torch.zeros(len(examples), longest, dtype=torch.long)
    labels = torch.full((len(examples), longest), IGNORED, dtype=torch.long)
    for row, example in enumerate(examples):
        n = len(example.ids)
        ids[row, :n] = torch.tensor(example.ids)
        mask[row, :n] = 1
        learnt = torch.tensor(example.learnt)
        labels[row, :n] = torch.where(learnt, ids[row, :n], IGNORED)
    return MicroBatch(ids, mask, labels)


class Stream:
    """An endless, reproducible sequence of micro-batches whose size may change at any time.

    Each epoch is a permutation that depends on seed and epoch alone; within windows examples
    are sorted by length, so that a micro-batch pads little.
    """

    def __init__(self, examples: Sequence[Example], seed: int, cursor: Cursor | None = None):
        if not examples:
            raise ValueError("no examples to train on")
        self._examples, self._seed = examples, seed
        self.cursor = cursor or Cursor()
        self._order = self._permutation(self.cursor.epoch)

    def take(self, count: int) -> MicroBatch:
        """The next ``count`` examples (fewer at the end of an epoch) as one micro-batch."""
        if self.cursor.position >= len(self._order):
            self.cursor = Cursor(self.cursor.epoch + 1, 0)
            self._order = self._permutation(self.cursor.epoch)
        start = self.cursor.position
        chosen = self._order[start : start + count]
        self.cursor = Cursor(self.cursor.epoch, start + len(chosen))
        return collate([self._examples[i] for i in chosen])

    def at(self, cursor: Cursor) -> Stream:
        """The same sequence from another place on."""
        return Stream(self._examples, self._seed, cursor)

    def _permutation(self, epoch: int) -> list[int]:
        rng = random.Random(f"{self._seed}:{epoch}")
        order = list(range(len(self._examples)))
        rng.shuffle(order)
        windows = []
        for start in range(0, len(order), WINDOW):
            window = sorted(order[start : start + WINDOW], key=self._length)
            turn = rng.randrange(len(window))  # no window begins with its shortest by rule
            windows += window[turn:] + window[:turn]
        return windows

    def _length(self, index: int) -> int:
        return len(self._examples[index].ids)
