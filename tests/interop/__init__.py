"""Runs with the lock libraries of other languages; see :mod:`tests.interop.__main__`."""
