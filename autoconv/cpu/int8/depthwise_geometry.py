"""How `int8.depthwise` cuts its work: sets of rows of outputs, whose pixels are packed into words of several rows.

A depthwise layer adds nothing over channels, so that a word, which is multiplied and added up as a whole, holds what
one channel has in neighbouring rows of one column. A few words, one below the other, hold all rows that the filter sees
from one row of outputs, and mostly one or two more: then `shared` rows of outputs read the same words, each with its
taps moved down by so many places. Lanes of a vector are whatever lies together in memory: channels in NHWC, columns in
NCHW, where words are dealt out to components by their column modulo the stride.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from autoconv.cpu.codegen.ir import LINE
from autoconv.cpu.codegen.words import CHANNELS
from autoconv.cpu.common.correlation import Correlation, correlations
from autoconv.cpu.int8.geometry import WORD
from autoconv.layer import ConvLayer


@dataclass(frozen=True)
class DepthwisePanel:
    """Where things are: in a panel of words, among the packed filters, in a thread's memory.

    A `product` multiplies words, in vectors of so many `lanes`; `TP` vectors of neighbouring outputs of each shared row
    are in registers; in NHWC a panel holds up to `NV` vectors of channels.
    """

    layer: ConvLayer
    product: str
    TP: int
    NV: int
    lanes: int
    threads: int

    @functools.cached_property
    def correlation(self) -> Correlation:
        """The layer's."""
        return correlations(self.layer)[0]

    @functools.cached_property
    def channels_last(self) -> bool:
        """Whether lanes are channels."""
        return self.layer.layout == "NHWC"

    @functools.cached_property
    def rows(self) -> int:
        """Of the image, in a word."""
        return CHANNELS[self.product]

    @functools.cached_property
    def words(self) -> int:
        """One below the other."""
        return math.ceil(self.layer.R / self.rows)

    @functools.cached_property
    def shared(self) -> int:
        """Rows of outputs that see these words only."""
        if self.layer.dilation[0] > 1:
            return 1
        return min(1 + (self.words * self.rows - self.layer.R) // self.layer.stride[0], self.layer.P)

    @functools.cached_property
    def sets(self) -> int:
        """Of so many rows of outputs, in an image."""
        return math.ceil(self.layer.P / self.shared)

    @functools.cached_property
    def width(self) -> int:
        """Lanes of a vector that are used: fewer than all only where there are no more channels, or columns."""
        return min(self.lanes, self.layer.C if self.channels_last else self.layer.Q)

    @functools.cached_property
    def together(self) -> int:
        """Vectors of outputs in registers, of each shared row."""
        return min(self.TP, self.layer.Q if self.channels_last else max(self.layer.Q // self.lanes, 1))

    @functools.cached_property
    def advance(self) -> int:
        """Outputs of a row from one register tile to the next."""
        return self.together * (1 if self.channels_last else self.width)

    @functools.cached_property
    def across(self) -> int:
        """Words of one column: as many as a panel has channels."""
        return min(self.NV, self.vectors) * self.lanes if self.channels_last else 1

    @functools.cached_property
    def seen(self) -> int:
        """Columns that the outputs of a row see, those of padding too; of fewer outputs than lanes, what lanes see."""
        outputs = self.layer.Q if self.channels_last else max(self.layer.Q, self.lanes)
        return (outputs - 1) * self.layer.stride[1] + self.layer.filter_extent[1]

    @functools.cached_property
    def component(self) -> int:
        """Words of one residue of the columns modulo the stride, in whole vectors; in NHWC all columns are of one."""
        columns = self.seen if self.channels_last else math.ceil(self.seen / self.layer.stride[1])
        return math.ceil(columns * self.across / self.lanes) * self.lanes

    @functools.cached_property
    def components(self) -> int:
        """Of the columns."""
        return 1 if self.channels_last else self.layer.stride[1]

    @functools.cached_property
    def pitch(self) -> int:
        """Words from the first ones to those below them."""
        return self.component * self.components

    @functools.cached_property
    def skips(self) -> tuple[int, ...]:
        """Words to skip for each column of taps, of the first words and then of those below."""
        columns = (s * self.layer.dilation[1] for s in range(self.layer.S))
        found = [
            c * self.across if self.channels_last else c % self.components * self.component + c // self.components
            for c in columns
        ]
        return tuple(word * self.pitch + skip for word in range(self.words) for skip in found)

    @functools.cached_property
    def step(self) -> int:
        """Words from what one vector of outputs sees to what the next one does."""
        return self.layer.stride[1] * self.across if self.channels_last else self.lanes

    def tap(self, word: int, row: int, shared: int) -> int | None:
        """The filter's row that a row of a word meets, for one of the shared rows of outputs; None where none does."""
        r = word * self.rows + row - shared * self.layer.stride[0]
        return r if 0 <= r < self.layer.R else None

    @functools.cached_property
    def vectors(self) -> int:
        """Of channels, the last of which begins so that it ends with them; in NCHW every filter is one by itself."""
        return math.ceil(self.layer.C / self.lanes) if self.channels_last else self.layer.K

    @functools.cached_property
    def filter_lanes(self) -> int:
        """Words of the filters for one of the image's vectors: in NCHW, all lanes meet the same."""
        return self.lanes if self.channels_last else 1

    @functools.cached_property
    def filter_words(self) -> int:
        """Words for one vector: `[words and columns of taps][shared][lanes]`, and the sums of each filter `[lanes]`."""
        return (len(self.skips) * self.shared + 1) * self.filter_lanes

    @functools.cached_property
    def packed_bytes(self) -> int:
        """Of all filters."""
        return self.vectors * self.filter_words * WORD

    @functools.cached_property
    def units(self) -> int:
        """Of an image: blocks of up to NV vectors of channels, or channels."""
        return math.ceil(self.vectors * self.lanes / self.across) if self.channels_last else self.layer.C

    @functools.cached_property
    def unit_vectors(self) -> int:
        """Vectors of filters that a unit meets, at most."""
        return self.across // self.lanes if self.channels_last else self.layer.K // self.layer.C

    @functools.cached_property
    def units_together(self) -> int:
        """Units of a task: several where they are small, as each costs little more than its beginning."""
        return 1 if self.channels_last else max(1, min(16, self.layer.N * self.units // (8 * self.threads)))

    @functools.cached_property
    def chunks(self) -> int:
        """Of the sets of a unit: as many as leave every thread several tasks."""
        tasks = self.layer.N * math.ceil(self.units / self.units_together)
        return min(self.sets, math.ceil(4 * self.threads / tasks))

    @functools.cached_property
    def tasks(self) -> int:
        """Of the layer."""
        return self.layer.N * math.ceil(self.units / self.units_together) * self.chunks

    @functools.cached_property
    def meanings(self) -> int:
        """Words that hold what is added to a unit's sums, and their scales."""
        return math.ceil(2 * self.unit_vectors * self.filter_lanes / self.lanes) * self.lanes

    @functools.cached_property
    def own(self) -> int:
        """Bytes of a thread: offsets and scales, the panel, and a row of words that are not yet dealt out."""
        undealt = self.pitch if self.components > 1 else 0
        return math.ceil((self.meanings + self.words * self.pitch + undealt) * WORD / LINE) * LINE
