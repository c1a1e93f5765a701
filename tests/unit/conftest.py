"""Hypothesis without a clock: a loaded machine makes no test fail."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "unit", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("unit")
