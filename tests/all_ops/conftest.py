"""Fixtures of the tests of all ops."""

from __future__ import annotations

from tests.core.conftest import generated_sources as generated_sources
