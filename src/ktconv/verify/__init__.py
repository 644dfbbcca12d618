"""Check a converted checkpoint against its source, level by level.

    result = verify(Request(output=Path("qwen3-int4"), source="Qwen/Qwen3-30B-A3B"))
    result.passed, result.failures, result.facts

Failures are in the result, not raised; a KtconvError means that nothing could be checked.
"""

from ktconv import callable_module
from ktconv.verify.findings import Failure
from ktconv.verify.request import LEVELS, Thresholds, VerifyRequest
from ktconv.verify.run import Result, prepare, verify

Request = VerifyRequest

__all__ = [
    "LEVELS",
    "Failure",
    "Request",
    "Result",
    "Thresholds",
    "VerifyRequest",
    "prepare",
    "verify",
]

callable_module(__name__)
