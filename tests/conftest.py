"""Hypothesis profiles: `dev` by default, its built-in `ci` under CI, `thorough` on demand. And a user without a home."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # workers run side by side; before torch is imported

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("dev", max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "ci", max_examples=100, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))


@pytest.fixture
def homeless(monkeypatch):
    """A user without a home folder, as a container may start one: no variable says where it is, nor a password entry."""
    pwd = pytest.importorskip("pwd")

    def no_entry(user):
        raise KeyError(user)

    for variable in ("HOME", "XDG_CACHE_HOME", "MINIVLLM_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_entry)
