"""Callers of an engine that take turns: two streams side by side, or a batch while a stream pauses."""

from __future__ import annotations

from dflash_jax.engine.host.sequence import Sequence


class Callers:
    """Those who advance sequences in turns; each hears of its own, whoever runs the steps."""

    def __init__(self) -> None:
        self._news: dict[int, dict[int, Sequence]] = {}  # of a caller, by its sequences

    def begin(self, sequences: list[Sequence]) -> dict[int, Sequence]:
        """A caller's news: which of its sequences have changed, by identity; it clears what it has heard."""
        news: dict[int, Sequence] = {}
        self._news |= {id(sequence): news for sequence in sequences}
        return news

    def tell(self, changed: list[Sequence]) -> None:
        """Tell callers what a step has changed."""
        for sequence in changed:
            if (news := self._news.get(id(sequence))) is not None:
                news[id(sequence)] = sequence

    def end(self, sequences: list[Sequence]) -> None:
        """Forget a caller."""
        for sequence in sequences:
            del self._news[id(sequence)]
