/* Numbers of E4M3. */
#include "e4m3.h"

/* Normal numbers: exponent bias 7 becomes 127, three bits of mantissa become seven. */
#define NORMAL(m) ((m) * 16 + 120 * 128)
#define NORMAL8(m)                                                                                 \
  NORMAL(m), NORMAL(m + 1), NORMAL(m + 2), NORMAL(m + 3), NORMAL(m + 4), NORMAL(m + 5),            \
      NORMAL(m + 6), NORMAL(m + 7)

const uint16_t kt_e4m3_bf16[128] = {
    0,           0x3b00,      0x3b80,      0x3bc0,      0x3c00,      0x3c20,       0x3c40,
    0x3c60, /* m * 2^-9 */
    NORMAL8(8),  NORMAL8(16), NORMAL8(24), NORMAL8(32), NORMAL8(40), NORMAL8(48),  NORMAL8(56),
    NORMAL8(64), NORMAL8(72), NORMAL8(80), NORMAL8(88), NORMAL8(96), NORMAL8(104), NORMAL8(112),
    NORMAL(120), NORMAL(121), NORMAL(122), NORMAL(123), NORMAL(124), NORMAL(125),  NORMAL(126),
    0x7fc0};
