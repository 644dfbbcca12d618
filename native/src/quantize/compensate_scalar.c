/* Error compensation for any CPU. */
#include "compensate_loop.h"

void kt_compensate_scalar(const kt_compensate_job *job) { compensate_all(job); }
