"""Property tests here draw whole schedules: on a busy machine that is slow, which is no reason to fail."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "schedules", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
settings.load_profile("schedules")
