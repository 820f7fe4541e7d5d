"""Multi-turn workloads: who asks what, how often, and in which tokens.

A workload is the traffic only; the simulated system that it meets in virtual time is in `system`.
"""

from __future__ import annotations

import enum
import hashlib
import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hicache.errors import ConfigError
from hicache.types import TOKEN_BYTES


class ReadyQueue(str, enum.Enum):
    """Which of the clients that may speak is sent next."""

    FIFO = "fifo"
    RANDOM = "random"


class Pacing(str, enum.Enum):
    """Whether a client may begin its next round before every client has ended this one."""

    BARRIER = "barrier"
    FREE = "free"


@dataclass(frozen=True, slots=True)
class Workload:
    """Clients that each extend one conversation. Lengths are in tokens, the rate in requests a second."""

    name: str
    num_clients: int
    num_rounds: int
    request_length: int  # new prompt tokens of the first round
    output_length: int  # tokens of each reply that join the conversation
    sub_question_length: int = 0  # new prompt tokens of later rounds; 0: as request_length
    max_parallel: int = 16
    request_rate: float = 64.0  # Poisson; inf sends at once
    seed: int = 1
    ready_queue: ReadyQueue = ReadyQueue.FIFO
    pacing: Pacing = Pacing.BARRIER
    vocab_size: int = 32_000
    churn: float = 0.0  # share of the conversations that end, and are replaced, each round
    churn_later: float | None = None  # the same from half-way on, where every conversation is replaced
    shared_prefix_length: int = 0  # tokens in front of every conversation, from one of so many prefixes
    num_shared_prefixes: int = 1  # drawn by Zipf's law
    sessions: bool = False  # each conversation has a session_id, which is closed behind its last turn

    def __post_init__(self) -> None:
        positive = {
            "--num-clients": self.num_clients,
            "--num-rounds": self.num_rounds,
            "--request-length": self.request_length,
            "--output-length": self.output_length,
            "--max-parallel": self.max_parallel,
            "--vocab-size": self.vocab_size,
            "--num-shared-prefixes": self.num_shared_prefixes,
        }
        for flag, value in positive.items():
            if value < 1:
                raise ConfigError(f"{flag} {value}: must be at least 1")
        if self.sub_question_length < 0:
            raise ConfigError(f"--sub-question-input-length {self.sub_question_length}: must not be negative")
        if self.shared_prefix_length < 0:
            raise ConfigError(f"--shared-prefix-length {self.shared_prefix_length}: must not be negative")
        for flag, share in (("--churn", self.churn), ("--churn-later", self.churn_later or 0.0)):
            if not 0 <= share <= 1:
                raise ConfigError(f"{flag} {share}: must be in [0, 1]")
        if math.isnan(self.request_rate) or self.request_rate <= 0:
            raise ConfigError(f"--request-rate {self.request_rate}: must be above 0 (inf sends at once)")
        if self.seed < 0:
            raise ConfigError(f"--seed {self.seed}: must not be negative")

    @property
    def num_requests(self) -> int:
        return self.num_clients * self.num_rounds

    def question_length(self, round_: int) -> int:
        """Tokens that a client adds in a round."""
        return self.sub_question_length if round_ and self.sub_question_length else self.request_length

    def history_length(self, round_: int) -> int:
        """Tokens of a conversation that began with the first round, before another round."""
        if not round_:
            return self.shared_prefix_length
        later = (round_ - 1) * self.question_length(1)
        return self.shared_prefix_length + self.request_length + later + round_ * self.output_length

    def prompt_length(self, round_: int) -> int:
        return self.history_length(round_) + self.question_length(round_)

    @property
    def longest_prompt(self) -> int:
        return self.prompt_length(self.num_rounds - 1)

    @property
    def prompt_tokens(self) -> int:
        """Full prompt tokens of all requests, if no conversation ends."""
        return self.num_clients * sum(map(self.prompt_length, range(self.num_rounds)))

    def ceiling(self, round_: int) -> float:
        """Hit rate of a round if nothing said before were ever lost."""
        return self.history_length(round_) / self.prompt_length(round_)

    def question(self, client: int, round_: int) -> array[int]:
        """Return the tokens a client adds in a round; the same for the same seed, on every machine."""
        return self._tokens(f"{client}/{round_}", self.question_length(round_))

    def begins(self, client: int, round_: int) -> bool:
        """Tell whether a client begins a new conversation with a round."""
        share, half_way = self.churn, self.num_rounds // 2
        if self.churn_later is not None and round_ >= half_way:
            share = 1.0 if round_ == half_way else self.churn_later
        if round_ == 0:
            return True
        return share > 0 and self._draw(f"end/{client}/{round_}") < share

    def ends(self, client: int, round_: int) -> bool:
        """Tell whether a conversation ends with a round of a client."""
        return round_ + 1 == self.num_rounds or self.begins(client, round_ + 1)

    def opening(self, client: int, round_: int) -> array[int]:
        """Return the shared prefix of the conversation that a client begins with a round."""
        if not self.shared_prefix_length:
            return array("I")
        weights = [1 / rank for rank in range(1, self.num_shared_prefixes + 1)]
        left = self._draw(f"prefix/{client}/{round_}") * sum(weights)
        number = 0
        while number < len(weights) - 1 and left >= weights[number]:
            left -= weights[number]
            number += 1
        return self._tokens(f"prefix/{number}", self.shared_prefix_length)

    def _draw(self, label: str) -> float:
        """Return a number in [0, 1) for a label."""
        return int.from_bytes(hashlib.shake_256(f"{self.seed}/{label}".encode()).digest(6), "big") / 2**48

    def _tokens(self, label: str, count: int) -> array[int]:
        drawn = hashlib.shake_256(f"{self.seed}/{label}".encode()).digest(TOKEN_BYTES * count)
        return array("I", (np.frombuffer(drawn, dtype="<u4") % self.vocab_size).astype("<u4").tobytes())


WORKLOADS: Mapping[str, Workload] = {
    "deepseek-v4-flash": Workload(
        name="deepseek-v4-flash",
        num_clients=48,
        num_rounds=60,
        request_length=4096,
        output_length=16,
        seed=20260626,
    ),
    "inkling-small": Workload(
        name="inkling-small",
        num_clients=64,
        num_rounds=30,
        request_length=1216,
        output_length=64,
        seed=20260626,
    ),
}
