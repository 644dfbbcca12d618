"""Only what pyproject.toml cannot say: the extension comes from cffi, and compiles in parallel."""

import os
from concurrent.futures import ThreadPoolExecutor

from setuptools import setup
from setuptools.command.build_ext import build_ext


class ParallelBuild(build_ext):
    """setuptools compiles the files of an extension one after the other; this, one per CPU."""

    def build_extension(self, ext):
        compile_files = self.compiler.compile

        def compile_at_once(sources, **options):
            # A container may have less memory than its host's CPUs would need.
            jobs = int(os.environ.get("MAX_JOBS") or min(16, len(os.sched_getaffinity(0))))
            with ThreadPoolExecutor(jobs) as pool:
                objects = pool.map(lambda source: compile_files([source], **options), sources)
                return [path for paths in objects for path in paths]

        self.compiler.compile = compile_at_once
        super().build_extension(ext)


setup(cffi_modules=["native/build_ffi.py:ffi"], cmdclass={"build_ext": ParallelBuild})
