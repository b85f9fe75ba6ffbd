"""Fixtures of the tests of all ops."""

from __future__ import annotations

from tests.core.fast_path import driver as driver
