"""Only what pyproject.toml cannot say: the extension comes from cffi."""

from setuptools import setup

setup(cffi_modules=["native/build_ffi.py:ffi"])
