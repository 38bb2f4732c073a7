"""Transforms read no rows past an image, not even behind masks that leave out all of them."""

from __future__ import annotations

import mmap
import sys
import weakref
from typing import Any

import numpy as np
import pytest
from forked import exit_code
from guards import allowed, guarded, some_runnable
from layers import operands

from autoconv.algorithm import Algorithm
from autoconv.cpu import pool
from autoconv.cpu.codegen import compiler
from autoconv.cpu.codegen.ir import Value, i8
from autoconv.cpu.codegen.memory import Memory
from autoconv.cpu.device import CPU
from autoconv.cpu.fft.algorithm import TiledFFT
from autoconv.cpu.winograd.algorithm import Winograd
from autoconv.layer import ConvLayer
from autoconv.tuning import reference

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="memory is protected as on Linux"),
    pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor"),
]
# AlexNet's first, whose rows are longer than a page here; and one whose channels are of one subfilter each.
LAYERS = {
    "mixed": ConvLayer(N=1, C=3, H=19, W=1800, K=4, R=11, S=11, stride=4, padding=2),
    "plain": ConvLayer(N=1, C=17, H=9, W=1200, K=4, R=3, S=3, padding=1, dilation=2),
}


def alone_in_memory(image: Any) -> Any:
    """A copy of an image that has a page or two of memory on either side, and no more."""
    page = mmap.PAGESIZE
    memory = guarded(np.zeros(image.nbytes + 2 * page, np.uint8), "before")
    copy = memory[page : page + image.nbytes].view(image.dtype).reshape(image.shape)
    copy[...] = image
    return copy


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("algorithm", [Winograd(), TiledFFT()], ids=lambda algorithm: algorithm.name)
def test_no_rows_are_read_past_an_image(
    algorithm: Algorithm, name: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A processor forgives loads of which a mask leaves out every lane, if late; so all touch their first byte here."""
    load = Memory.load

    def touching(self: Any, p: Value, lanes: int = 1, *, mask: Value | None = None, **options: Any) -> Value:
        if mask is not None and lanes > 1:
            self.emit(i8, f"load volatile i8, ptr {p.text}, align 1")
        return load(self, p, lanes, mask=mask, **options)

    layer, device = LAYERS[name].replace(layout=layout), CPU.current()
    (candidate,) = some_runnable(algorithm, layer, device, 1)
    x, w, *_ = operands(layer)
    want, magnitude = reference.convolve(layer, x, w), reference.magnitude(layer, x, w)
    monkeypatch.setattr(Memory, "load", touching)
    monkeypatch.setattr(compiler, "_programs", weakref.WeakValueDictionary())
    monkeypatch.setattr(compiler.machine_code, "load", lambda key: None)
    monkeypatch.setattr(compiler.machine_code, "save", lambda key, code: None)

    def run() -> int:
        kernel = algorithm.build(layer, device, candidate.params)
        packed, out = device.buffer(kernel.packed_bytes), np.empty(layer.y_shape, np.float32)
        kernel.pack(w, packed)
        kernel.run(alone_in_memory(x), packed, out, None, None, device.buffer(kernel.workspace_bytes))
        return int(reference.error(out, want, magnitude) > allowed(algorithm, layer, candidate.params, want, magnitude))

    assert exit_code(run) == 0, f"{candidate}: below 0 where it has read what is not there"
