"""`Candidate`: the name of one way to compute a layer, as people, plans and records write it."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from autoconv.errors import RecordError

_CANDIDATE = re.compile(r"(?P<algorithm>[a-z][a-z0-9_.]*)(\[(?P<params>[A-Za-z0-9_=,.x-]+)\])?")


def text_of(params: Mapping[str, int | str]) -> str:
    """Parameters as a candidate's name has them.

    >>> text_of({"TK": 16, "filters": "packed"})
    'TK=16,filters=packed'
    """
    return ",".join(f"{name}={value}" for name, value in params.items())


@dataclass(frozen=True)
class Candidate:
    """An algorithm and its parameters; prints and parses as `gemm[BM=128,BN=64,BK=16]`.

    Parameters
    ----------
    algorithm : str
        The name of an algorithm.
    items : tuple of (name, value)
        Its parameters in the algorithm's order, the values integers or words.

    Examples
    --------
    >>> candidate = Candidate.parse("gemm[BM=128,BN=64]")
    >>> candidate.algorithm, candidate.params
    ('gemm', {'BM': 128, 'BN': 64})
    """

    algorithm: str
    items: tuple[tuple[str, int | str], ...] = ()

    @property
    def params(self) -> dict[str, int | str]:
        """The parameters by name."""
        return dict(self.items)

    def __str__(self) -> str:
        if not self.items:
            return self.algorithm
        return f"{self.algorithm}[{','.join(f'{name}={value}' for name, value in self.items)}]"

    @classmethod
    @functools.lru_cache(4096)  # a network asks for the same ones again and again
    def parse(cls, text: str) -> Candidate:
        """The candidate a text names.

        Parameters
        ----------
        text : str
            An algorithm's name, with its parameters in brackets if it has any, as `str` prints it.

        Returns
        -------
        Candidate
            The candidate; whether there is such an algorithm is not asked here.

        Raises
        ------
        RecordError
            When the text does not read like `name` or `name[NAME=value,...]`.
        """
        match = _CANDIDATE.fullmatch(text) if len(text) <= 200 else None
        pairs = [pair.split("=") for pair in match["params"].split(",")] if match and match["params"] else []
        if match is None or any(len(pair) != 2 or not all(pair) for pair in pairs):
            raise RecordError(f"{text[:80]!r} does not name a candidate: they read like gemm[BM=128,BN=64]")
        return cls(match["algorithm"], tuple((n, int(v) if v.isdigit() else v) for n, v in pairs))
