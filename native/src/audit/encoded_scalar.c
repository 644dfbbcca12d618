/* The comparison of encoded integers for any CPU. */
#include "encoded_loop.h"

void kt_encoded_scalar(const kt_encoded_job *job, kt_encoded_audit *audit) {
  audit_encoded(job, audit);
}
