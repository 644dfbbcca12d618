/* ktconv.h - the public C API of ktconv's native library.
 *
 * Every function is a pure computation on memory that the caller owns: nothing
 * here allocates, prints, opens a file, exits or keeps state, except that the
 * first call detects the CPU (kt_isa_active) and that a kt_pool has threads.
 * All functions may be called from any number of threads at once as long as
 * their outputs do not overlap. Results do not depend on the thread's
 * floating-point mode (rounding, flush-to-zero).
 *
 * Sizes are in elements unless a name ends in _size (bytes). float pointers and
 * scratch need the alignment of a float; source data and packed bytes need none,
 * but packing is fastest when packed bytes are 64-byte aligned.
 *
 * Functions return KT_OK or the reason for refusing; kt_strerror() words it.
 * On any error the outputs hold unspecified bytes within their bounds.
 *
 *   ktconv_base.h      statuses and levels
 *   ktconv_convert.h   matrices, formats, encodings, compensation, audit
 *   ktconv_run.h       threads, layers, routers, fine-tuning, limits
 */
#ifndef KTCONV_H
#define KTCONV_H

#include "ktconv_base.h"
#include "ktconv_convert.h"
#include "ktconv_run.h"

#endif
