"""Fixtures of the unit tests."""

from __future__ import annotations

from tests.helpers.fast_path import driver as driver
