"""The emulator itself: what it computes, and what it must complain of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from layers import edge
from ml_dtypes import bfloat16
from simt.emulator import MISSING, EmulationError, launcher, sanitized

from autoconv.cuda.codegen.source import Unit

pytestmark = pytest.mark.skipif(MISSING, reason="NOT CHECKED: the emulator needs g++")

LEVELS = (("-O0",), ("-O1",), ("-O2",), ("-O3",), ("-O1", "-mf16c"), ("-O2", "-mavx2", "-mfma", "-mf16c"))
UNIT = Unit("test", "common/tickets.cuh", edge("one"), grid=(2, 1, 1), threads=64, blocks=1, shared=4096)


def launch(
    body: str,
    *arrays: Any,
    schedule: int = 2,
    flags: tuple[str, ...] = ("-O1",),
    sanitizer: str = "",
    unit: Unit = UNIT,
) -> None:
    """Run a kernel with this body on 2 blocks of 64 threads; its arrays of floats are p0, p1 ..."""
    parameters = ", ".join(f"float* p{i}" for i in range(len(arrays)))
    text = f'{unit.text}\nextern "C" __global__ void test({parameters}) {{\nconst int t = threadIdx.x;\n{body}\n}}\n'
    run = sanitized(unit, sanitizer, schedule, text) if sanitizer else launcher(unit, flags, schedule, text)
    run(*arrays)


SHIFT = """
    struct Row { float at[64]; };
    SHARED(Row, row);
    row.at[t] = p0[t];
    %s
    p1[blockIdx.x * 64 + t] = row.at[(t + 33) %% 64];
"""


@pytest.mark.parametrize("flags", LEVELS, ids=" ".join)
def test_a_barrier_orders_shared_memory(flags: tuple[str, ...]) -> None:
    x, y = np.arange(64, dtype="f"), np.zeros(128, "f")
    for schedule in range(16):
        launch(SHIFT % "__syncthreads();", x, y, schedule=schedule, flags=flags)
        np.testing.assert_array_equal(y.reshape(2, 64), np.tile(np.roll(x, -33), (2, 1)))


def test_shared_memory_starts_as_nan_in_every_block() -> None:
    y = np.zeros(128, "f")
    launch("struct Row { float at[64]; }; SHARED(Row, row); p0[blockIdx.x * 64 + t] = row.at[t]; row.at[t] = 1;", y)
    assert np.isnan(y).all()


def test_a_missing_barrier_shows_in_some_schedule() -> None:
    x, wrong = np.arange(64, dtype="f"), []
    for schedule in range(4):
        y = np.zeros(128, "f")
        launch(SHIFT % "", x, y, schedule=schedule)
        wrong.append(not np.array_equal(y[:64], np.roll(x, -33)))
    assert all(wrong)


def test_thread_sanitizer_sees_the_race_and_only_it() -> None:
    x, y = np.arange(64, dtype="f"), np.zeros(128, "f")
    launch(SHIFT % "__syncthreads();", x, y, sanitizer="thread")
    np.testing.assert_array_equal(y[:64], np.roll(x, -33))
    with pytest.raises(EmulationError, match="data race"):
        launch(SHIFT % "", x, y, sanitizer="thread")


def test_a_barrier_of_a_warp_orders_what_the_warp_writes_and_no_more() -> None:
    within = SHIFT.replace("(t + 33) %% 64", "t / 32 * 32 + (t + 5) %% 32")
    x, y = np.arange(64, dtype="f"), np.zeros(128, "f")
    for schedule in range(4):
        launch(within % "sync_warp();", x, y, schedule=schedule)
        np.testing.assert_array_equal(y[:64], np.roll(x.reshape(2, 32), -5, axis=1).ravel())
    launch(within % "sync_warp();", x, y, sanitizer="thread")
    for body in (within % "", SHIFT % "sync_warp();"):
        with pytest.raises(EmulationError, match="data race"):
            launch(body, x, y, sanitizer="thread")


def test_address_sanitizer_sees_a_read_beyond_an_array() -> None:
    x, y = np.arange(64, dtype="f"), np.zeros(128, "f")
    launch("p1[blockIdx.x * 64 + t] = p0[t];", x, y, y, sanitizer="address")  # what is given twice, too
    np.testing.assert_array_equal(y[64:], x)
    with pytest.raises(EmulationError, match="heap-buffer-overflow"):
        launch("p1[blockIdx.x * 64 + t] = p0[t + 1];", x, y, sanitizer="address")


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("if (t < 32) __syncthreads();", "32 threads wait at a barrier, 32 have returned"),
        ("if (t < 7)\n__syncthreads();\nelse\n__syncthreads();", "two barriers"),
        ("if (t != 5) shuffle_xor(1.0f, 1);", "a warp's threads do not meet"),
        ("if (t < 32) sync_some<64>(2);", "barrier 2: not all of its threads meet"),
        (
            "if (t == 0) { fence_device(); take_ticket(reinterpret_cast<unsigned*>(p0), 5); fence_device(); }",
            "a ticket is left at 2, and the next launch wants it at 0",
        ),
        ("struct Big { float at[2000]; }; SHARED(Big, big); big.at[t] = 0;", "8000 bytes asked for, 4096 allowed"),
        ("struct Row { float at[64]; }; SHARED(Row, row); row.at[t + 1] = 0;", "written beyond its 256 bytes"),
        ("p0[t] = aligned<Bits128>(p0 + 1).word[0];", "not a multiple of 16"),
        ("copy_async16(p0, p0, true);", "not in shared memory"),
        (
            "struct Tile { alignas(16) short at[8][64]; }; SHARED(Tile, tile); unsigned d[4];"
            "load_matrices(d, tile.at[t % 8]);",
            "rows of a matrix in the same banks",
        ),
        ("struct Row { float at[64]; }; SHARED(Row, row); copy_async4(&row.at[t], p0 + t, true);", "in no group"),
        (
            "struct Row { float at[64]; }; SHARED(Row, row); copy_async4(&row.at[t], p0 + t, true); commit_copies();",
            "before its copies had landed",
        ),
    ],
)
def test_it_complains(body: str, complaint: str) -> None:
    with pytest.raises(EmulationError, match=complaint):
        launch(body, np.zeros(128, "f"), schedule=2)


# Both blocks leave their number and take a ticket; the second one to come looks for the other's.
LEAVE = """
    unsigned* const ticket = reinterpret_cast<unsigned*>(p1);
    struct Row { float at[64]; };
    SHARED(Row, row);
    publish(p0 + blockIdx.x * 64 + t, float(blockIdx.x + 1));
    %s
    bool last = false;
    if (t == 0) {
        %s
        last = take_ticket(ticket, 1) == 1;
        %s
    }
    if (any_of<64>(3, last)) p2[t] = p0[(1 - blockIdx.x) * 64 + t];
"""
ORDERED = "sync_some<64>(3);", "fence_device();", "fence_device();"


def test_blocks_find_what_others_stored_behind_fences_and_tickets() -> None:
    firsts = set()
    for schedule in range(16):
        p0, ticket, found = np.full(128, np.nan, "f"), np.zeros(1, "u4"), np.zeros(64, "f")
        launch(LEAVE % ORDERED, p0, ticket, found, schedule=schedule)
        assert found[0] in (1, 2)
        assert (found == found[0]).all()
        assert not ticket.any()
        firsts.add(found[0])
    assert firsts == {1, 2}


def test_what_no_fence_knows_of_is_not_there() -> None:
    p0, ticket, found = np.full(128, np.nan, "f"), np.zeros(1, "u4"), np.zeros(64, "f")
    launch(LEAVE % ("", *ORDERED[1:]), p0, ticket, found, schedule=0)
    assert np.isnan(found).any()
    assert not np.isnan(p0).any()  # when the kernel has ended


@pytest.mark.parametrize(
    ("left_out", "complaint"),
    [(1, "and no fence is before it"), (2, "and no fence is behind it")],
)
def test_a_ticket_has_fences_on_both_sides(left_out: int, complaint: str) -> None:
    arrays = np.zeros(128, "f"), np.zeros(1, "u4"), np.zeros(64, "f")
    with pytest.raises(EmulationError, match=complaint):
        launch(LEAVE % tuple("" if i == left_out else code for i, code in enumerate(ORDERED)), *arrays)


# How far in floats, how many bytes, and whether they are wanted: by the arguments, so that one program serves all.
BEYOND = """
    struct Row { alignas(16) float at[4 * 64]; };
    SHARED(Row, row);
    const long long far = static_cast<long long>(p0[0]);
    const bool wanted = p0[2] != 0;
    if (p0[1] == 16)
        copy_async16(row.at + 4 * t, p1 + far + 4 * t, wanted);
    else
        copy_async4(row.at + t, p1 + far + t, wanted);
    commit_copies();
    wait_copies<0>();
    __syncthreads();
    p2[blockIdx.x * 64 + t] = row.at[t];
"""


@pytest.mark.parametrize("sanitizer", ["", "address"])
def test_what_copies_read_lies_in_an_array(sanitizer: str) -> None:
    """Of 254 floats: four unwanted bytes may have any address, all others are looked at, to the last byte."""
    x, y = np.arange(1, 255, dtype="f"), np.zeros(128, "f")

    def copy(far: float, nbytes: int, wanted: bool) -> None:
        launch(BEYOND, np.array([far, nbytes, wanted], "f"), x, y, sanitizer=sanitizer)

    copy(190, 4, True)
    np.testing.assert_array_equal(y[:64], x[190:])
    for far in (191, 1e9, -1e9):
        copy(far, 4, False)
        np.testing.assert_array_equal(y, 0)
        with pytest.raises(EmulationError, match=r"cp\.async: reads outside every array"):
            copy(far, 4, True)
    copy(0, 16, False)  # the last begins with two floats that are there
    with pytest.raises(EmulationError, match=r"cp\.async: reads outside every array"):
        copy(0, 16, True)
    with pytest.raises(EmulationError, match="an address outside every array, wanted or not"):
        copy(4, 16, False)


def test_a_kernel_gets_as_many_arguments_as_it_takes() -> None:
    run = launcher(
        UNIT, ("-O1",), 0, f'{UNIT.text}\nextern "C" __global__ void test(float* p) {{ p[threadIdx.x] = 1; }}'
    )
    with pytest.raises(EmulationError, match="2 arguments given, the kernel takes 1"):
        run(np.zeros(64, "f"), np.zeros(64, "f"))


COPY = """
    struct Row { float at[2][64]; };
    SHARED(Row, row);
    for (int i = 0; i < 2; i++) {
        copy_async4(&row.at[i][t], p0 + 64 * i + t, i == 0 || t < 60);
        commit_copies();
    }
    wait_copies<%d>();
    __syncthreads();
    p1[t] = row.at[0][63 - t];
    wait_copies<0>();
    __syncthreads();
    p1[64 + t] = row.at[1][63 - t];
"""


def test_copies_land_when_waited_for_and_not_before_in_some_schedule() -> None:
    x = np.arange(1, 129, dtype="f")
    wanted = np.concatenate([x[:64], x[64:124], np.zeros(4, "f")]).reshape(2, 64)[:, ::-1]
    early = []
    for schedule in range(16):
        y = np.zeros(128, "f")
        launch(COPY % 1, x, y, schedule=schedule)
        np.testing.assert_array_equal(y.reshape(2, 64), wanted)
        launch(COPY % 2, x, y, schedule=schedule)
        early.append(np.array_equal(y.reshape(2, 64), wanted))
    assert not all(early)  # a wait that waits for nothing is noticed
    assert any(early)  # and copies may land at once


@pytest.mark.parametrize("flags", LEVELS, ids=" ".join)
def test_half_precision_converts_like_numpy(flags: tuple[str, ...]) -> None:
    """Every half to float and back, and floats around every rounding boundary, at every optimisation level."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    halves = bits.view(np.float16)
    edges = np.concatenate([halves.astype("f"), np.array([65519, 65520, 1e-8, 2.0**-25, 3e-8, 1e9], "f")])
    with np.errstate(invalid="ignore", over="ignore"):
        values = np.concatenate([edges, np.nextafter(edges, np.inf), np.nextafter(edges, -np.inf)])
        near = (edges[:-7] + edges[1:-6]) / 2  # halfway between neighbours: ties
        values = np.concatenate([values, near, -values])
        wanted16, wanted = values.astype(np.float16), values.astype(bfloat16)
    wide = np.full(1 << 16, 7, "f")
    narrow, brain = np.empty(values.size, "f"), np.empty(values.size, "f")
    body = f"""
        for (int i = t; i < 65536; i += 64) p0[i] = to_float(half_t{{(unsigned short)i}});
        for (int i = t; i < {values.size}; i += 64) {{
            p2[i] = bits_float(to_half(p1[i]).bits);
            p3[i] = bits_float(to_bfloat16(p1[i]).bits);
        }}
    """
    launch(body, wide, values, narrow, brain, flags=flags)
    np.testing.assert_array_equal(wide, halves.astype("f"))
    for got, want in ((narrow, wanted16), (brain, wanted)):
        number = ~np.isnan(want.astype("f"))
        np.testing.assert_array_equal(got.view(np.uint32)[number].astype(np.uint16), want.view(np.uint16)[number])
        back = got.view(np.uint32).astype(np.uint16).view(want.dtype)
        assert np.isnan(back[~number].astype("f")).all()


@pytest.mark.parametrize(("name", "depth"), [("half_t", 16), ("bfloat16_t", 16), ("float", 8)])
def test_matrix_instructions(name: str, depth: int) -> None:
    """mma.m16n8 on fragments loaded as the PTX manual lays them out, against a matrix product."""
    rng = np.random.default_rng(3)
    a, b, c = rng.integers(-8, 8, (16, depth)), rng.integers(-8, 8, (depth, 8)), rng.integers(-8, 8, (16, 8))
    pack = {"half_t": "to_half(%s).bits", "bfloat16_t": "to_bfloat16(%s).bits", "float": "float_bits(%s)"}
    row = f"p0[(g + r % 2 * 8) * {depth} + q * each + i + r / 2 * 4 * each]"
    body = f"""
        const int g = t % 32 / 4, q = t % 4, each = {1 if name == "float" else 2};
        unsigned a[4] = {{}}, b[2] = {{}};
        float c[4];
        for (int i = 0; i < each; i++) {{
            for (int r = 0; r < 4; r++)
                a[r] |= unsigned({pack[name] % row}) << 16 * i;
            for (int r = 0; r < 2; r++)
                b[r] |= unsigned({pack[name] % "p1[(q * each + i + r * 4 * each) * 8 + g]"}) << 16 * i;
        }}
        for (int i = 0; i < 4; i++) c[i] = p2[(g + i / 2 * 8) * 8 + q * 2 + i % 2];
        multiply({name}{{}}, c, a, b);
        for (int i = 0; i < 4; i++) p3[(g + i / 2 * 8) * 8 + q * 2 + i % 2] = c[i];
    """
    out = np.zeros((16, 8), "f")
    launch(body, a.astype("f"), b.astype("f"), c.astype("f"), out)
    np.testing.assert_array_equal(out, a @ b + c)


@pytest.mark.parametrize("transposed", [False, True])
def test_matrix_loads(transposed: bool) -> None:
    """ldmatrix gives lane i the values 2i and 2i + 1 of each 8x8 matrix, or of its transpose."""
    body = f"""
        struct Tile {{ alignas(16) unsigned short at[4][8][8]; }};
        SHARED(Tile, tile);
        for (int i = t; i < 256; i += 64) (&tile.at[0][0][0])[i] = (unsigned short)p0[i];
        __syncthreads();
        unsigned d[4];
        load_matrices{"_transposed" if transposed else ""}(d, tile.at[t % 32 / 8][t % 8]);
        for (int m = 0; m < 4; m++)
            for (int i = 0; i < 2; i++) p1[m * 64 + t % 32 * 2 + i] = float(d[m] >> 16 * i & 0xffffu);
    """
    matrices, out = np.arange(256, dtype="f").reshape(4, 8, 8), np.zeros((4, 8, 8), "f")
    launch(body, matrices, out)
    np.testing.assert_array_equal(out, matrices.transpose(0, 2, 1) if transposed else matrices)


def test_shuffles_cross_a_warp() -> None:
    y = np.zeros(64, "f")
    launch("float s = t; for (int m = 16; m; m /= 2) s += shuffle_xor(s, m); p0[t] = s;", y)
    np.testing.assert_array_equal(y, np.repeat(np.arange(64, dtype="f").reshape(2, 32).sum(1), 32))
