/* Encodings for any CPU: the reference of every level. */
#include "encode_loop.h"

kt_status kt_encode_scalar(const kt_encode_job *job) { return encode_any(job); }
