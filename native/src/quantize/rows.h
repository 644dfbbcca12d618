/* rows.h - quantizing whole matrices, one row at a time: the reference for every level. */
#ifndef KT_QUANTIZE_ROWS_H
#define KT_QUANTIZE_ROWS_H

#include "../format/format.h"

/* KT_ERR_ARGUMENT for a rule that is none, or importance beyond what ktconv.h allows. */
kt_status kt_choice_check(const kt_choice *choice, int64_t cols);

/* Plain codes and scales. */
kt_status kt_quantize_rows(const kt_layout *layout, const kt_matrix *m, const kt_choice *choice,
                           uint8_t *codes, void *scale, float *scratch);

kt_quantize_pack_fn kt_quantize_pack_rows; /* the scalar cell of every format with a quantizer */

#endif
