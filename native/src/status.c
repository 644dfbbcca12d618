#include "ktconv.h"

const char *kt_strerror(int status) {
  switch (status) {
  case KT_OK: return "success";
  case KT_ERR_ARGUMENT: return "a pointer, size or dtype is not valid";
  case KT_ERR_SHAPE: return "rows or columns are not a multiple of what the format needs";
  case KT_ERR_STRIDE: return "one stride of a source matrix must be 1";
  case KT_ERR_SCALE:
    return "this dtype needs scales; zero points and groups need them, and blocks have a size";
  case KT_ERR_SCRATCH: return "the scratch buffer is too small";
  case KT_ERR_NONFINITE: return "the matrix contains a NaN or an infinity";
  case KT_ERR_ISA_UNKNOWN: return "that is not the name of a level";
  case KT_ERR_ISA_MISSING: return "this machine does not support that level";
  case KT_ERR_EXPERT: return "a token goes to an expert that has no weights here";
  case KT_ERR_THREADS:
    return "threads cannot be started, or the pool belongs to another process (after a fork)";
  case KT_ERR_UNSUPPORTED: return "the library does not do that with this layout of weights";
  case KT_ERR_ASSUME_UNKNOWN: return "KTCONV_ASSUME is not the name of a level";
  default: return "unknown status";
  }
}
