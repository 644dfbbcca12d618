/* Numbers of E4M3. */
#include "e4m3.h"

/* Normal numbers: exponent bias 7 becomes 127, three bits of mantissa become seven. */
#define NORMAL(each, m) each((m) * 16 + 120 * 128)
#define NORMAL8(each, m)                                                                           \
  NORMAL(each, m), NORMAL(each, m + 1), NORMAL(each, m + 2), NORMAL(each, m + 3),                  \
      NORMAL(each, m + 4), NORMAL(each, m + 5), NORMAL(each, m + 6), NORMAL(each, m + 7)
#define MAGNITUDES(each)                                                                           \
  each(0), each(0x3b00), each(0x3b80), each(0x3bc0), each(0x3c00), each(0x3c20), each(0x3c40),     \
      each(0x3c60), /* m * 2^-9 */                                                                 \
      NORMAL8(each, 8), NORMAL8(each, 16), NORMAL8(each, 24), NORMAL8(each, 32),                   \
      NORMAL8(each, 40), NORMAL8(each, 48), NORMAL8(each, 56), NORMAL8(each, 64),                  \
      NORMAL8(each, 72), NORMAL8(each, 80), NORMAL8(each, 88), NORMAL8(each, 96),                  \
      NORMAL8(each, 104), NORMAL8(each, 112), NORMAL(each, 120), NORMAL(each, 121),                \
      NORMAL(each, 122), NORMAL(each, 123), NORMAL(each, 124), NORMAL(each, 125),                  \
      NORMAL(each, 126), each(0x7fc0)

#define WHOLE(bits) (bits)
#define LOWER(bits) (bits) & 0xff
#define UPPER(bits) (bits) >> 8

const uint16_t kt_e4m3_bf16[128] = {MAGNITUDES(WHOLE)};

const uint8_t kt_e4m3_bytes[2][128] = {{MAGNITUDES(LOWER)}, {MAGNITUDES(UPPER)}};
