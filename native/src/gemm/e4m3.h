/* e4m3.h - numbers of E4M3, which are weights of FP8 and scales of NVFP4: no infinities, NaN only
 * with all bits set. */
#ifndef KT_E4M3_H
#define KT_E4M3_H

#include <stdint.h>

/* bf16 bits of the 128 magnitudes; exact. */
extern const uint16_t kt_e4m3_bf16[128];

/* The same, byte by byte: all lower ones, all upper ones. */
extern const uint8_t kt_e4m3_bytes[2][128];

#endif
