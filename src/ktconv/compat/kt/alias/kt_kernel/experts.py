"""`kt_kernel.experts` under the alias."""

from ktconv.compat.kt.wrapper import KTMoEWrapper

__all__ = ["KTMoEWrapper"]
