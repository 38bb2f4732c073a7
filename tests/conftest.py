"""Settings for all tests."""

from __future__ import annotations

import pytest
import vectors
from hypothesis import HealthCheck, settings

# The same examples on every run: a failure must not depend on the day. The stress tests draw more.
settings.register_profile(
    "autoconv", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], database=None
)
settings.load_profile("autoconv")

collect_ignore = ["bochs.py"]  # no tests, and what it imports is only there for --avx512


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--avx512", action="store_true", help="of CPU kernels those of AVX-512 alone, emulated by Bochs")


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("avx512"):
        return
    try:
        import bochs
    except ImportError as error:
        raise pytest.UsageError(f"--avx512: {error}; pip install -e '.[bochs]'") from None
    processor, patch = bochs.Processor(), pytest.MonkeyPatch()
    bochs.install(patch, processor)
    patch.setattr(vectors, "INSTRUCTION_SETS", ("avx512",))
    config.add_cleanup(processor.close)
    config.add_cleanup(patch.undo)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("avx512"):
        import bochs

        for item in items:
            if item.name == bochs.WRONG_THERE:
                item.add_marker(pytest.mark.xfail(reason="so does the emulator, not the kernel"))
