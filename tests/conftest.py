"""Settings for all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# The same examples on every run: a failure must not depend on the day. The stress tests draw more.
settings.register_profile(
    "autoconv", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], database=None
)
settings.load_profile("autoconv")
