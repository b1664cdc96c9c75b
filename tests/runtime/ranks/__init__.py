"""Tests of several ranks."""
