/* audit_ggml.h - 32 columns of a block of ggml as the audit reads them: element by element from the
 * definitions in docs/encodings.md, not from source/.
 *
 * <name>_columns: columns `first` (a multiple of 32) to first + 31 of the block at b. j is
 * first / 32, l counts from first on; half precision is little-endian. */
#ifndef KT_AUDIT_GGML_H
#define KT_AUDIT_GGML_H

#include "audit_numbers.h"

INLINE float half_in(const uint8_t *b, int at) {
  return f16_value((uint16_t)(b[at] | b[at + 1] << 8));
}

/* Nibble l of 16 bytes: 0..15 the low ones. */
INLINE int nibble_of_32(const uint8_t *qs, int l) { return l < 16 ? qs[l] & 15 : qs[l - 16] >> 4; }

INLINE void q4_0_columns(const uint8_t *b, int first, float *out) {
  const float d = half_in(b, 0);
  (void)first;
  for (int l = 0; l < 32; l++) out[l] = d * (float)(nibble_of_32(b + 2, l) - 8);
}

INLINE void q4_1_columns(const uint8_t *b, int first, float *out) {
  const float d = half_in(b, 0), m = half_in(b, 2);
  (void)first;
  for (int l = 0; l < 32; l++) out[l] = d * (float)nibble_of_32(b + 4, l) + m;
}

INLINE int five_bits(const uint8_t *qh, const uint8_t *qs, int l) {
  const uint32_t word =
      (uint32_t)qh[0] | (uint32_t)qh[1] << 8 | (uint32_t)qh[2] << 16 | (uint32_t)qh[3] << 24;
  return nibble_of_32(qs, l) + 16 * (int)(word >> l & 1);
}

INLINE void q5_0_columns(const uint8_t *b, int first, float *out) {
  const float d = half_in(b, 0);
  (void)first;
  for (int l = 0; l < 32; l++) out[l] = d * (float)(five_bits(b + 2, b + 6, l) - 16);
}

INLINE void q5_1_columns(const uint8_t *b, int first, float *out) {
  const float d = half_in(b, 0), m = half_in(b, 2);
  (void)first;
  for (int l = 0; l < 32; l++) out[l] = d * (float)five_bits(b + 4, b + 8, l) + m;
}

INLINE void q8_0_columns(const uint8_t *b, int first, float *out) {
  const float d = half_in(b, 0);
  (void)first;
  for (int l = 0; l < 32; l++) out[l] = d * (float)(int8_t)b[2 + l];
}

INLINE void q2_k_columns(const uint8_t *b, int first, float *out) {
  const float d = half_in(b, 80), dmin = half_in(b, 82);
  const uint8_t *const qs = b + 16 + first / 128 * 32;
  const int shift = first % 128 / 32 * 2;
  for (int run = 0; run < 2; run++) {
    const int scale = b[first / 16 + run];
    const float step = d * (float)(scale % 16), least_value = dmin * (float)(scale / 16);
    for (int l = 16 * run; l < 16 * run + 16; l++)
      out[l] = step * (float)(qs[l] >> shift & 3) - least_value;
  }
}

INLINE void q3_k_columns(const uint8_t *b, int first, float *out) {
  const float d = half_in(b, 108);
  const uint8_t *const mask = b, *const qs = b + 32 + first / 128 * 32, *const scales = b + 96;
  const int shift = first % 128 / 32 * 2, bit = first / 32;
  for (int run = 0; run < 2; run++) {
    const int j = first / 16 + run;
    const int low = scales[j % 8] >> (j < 8 ? 0 : 4) & 15;
    const int high = scales[8 + j % 4] >> 2 * (j / 4) & 3;
    const float step = d * (float)(16 * high + low - 32);
    for (int l = 16 * run; l < 16 * run + 16; l++)
      out[l] = step * (float)((qs[l] >> shift & 3) - 4 + 4 * (mask[l] >> bit & 1));
  }
}

/* Scale and minimum j of a Q4_K or Q5_K block, whose packed ones are s[12]. */
INLINE int packed_scale(const uint8_t *s, int j) {
  return j < 4 ? s[j] % 64 : s[j + 4] % 16 + 16 * (s[j - 4] / 64);
}

INLINE int packed_minimum(const uint8_t *s, int j) {
  return j < 4 ? s[j + 4] % 64 : s[j + 4] / 16 + 16 * (s[j] / 64);
}

INLINE void q4_k_columns(const uint8_t *b, int first, float *out) {
  const int j = first / 32, shift = j % 2 * 4;
  const uint8_t *const qs = b + 16 + j / 2 * 32;
  const float step = half_in(b, 0) * (float)packed_scale(b + 4, j);
  const float least_value = half_in(b, 2) * (float)packed_minimum(b + 4, j);
  for (int l = 0; l < 32; l++) out[l] = step * (float)(qs[l] >> shift & 15) - least_value;
}

INLINE void q5_k_columns(const uint8_t *b, int first, float *out) {
  const int j = first / 32, shift = j % 2 * 4;
  const uint8_t *const qh = b + 16, *const qs = b + 48 + j / 2 * 32;
  const float step = half_in(b, 0) * (float)packed_scale(b + 4, j);
  const float least_value = half_in(b, 2) * (float)packed_minimum(b + 4, j);
  for (int l = 0; l < 32; l++)
    out[l] = step * (float)((qs[l] >> shift & 15) + 16 * (qh[l] >> j & 1)) - least_value;
}

INLINE void q6_k_columns(const uint8_t *b, int first, float *out) {
  const float d = half_in(b, 208);
  const int h = first / 128, quarter = first % 128 / 32;
  const uint8_t *const low = b + 64 * h + quarter % 2 * 32, *const high = b + 128 + 32 * h;
  for (int run = 0; run < 2; run++) {
    const float step = d * (float)(int8_t)b[192 + first / 16 + run];
    for (int l = 16 * run; l < 16 * run + 16; l++) {
      const int six = (low[l] >> quarter / 2 * 4 & 15) + 16 * (high[l] >> 2 * quarter & 3);
      out[l] = step * (float)(six - 32);
    }
  }
}

/* The numbers of IQ4_NL and IQ4_XS. */
static const float iq4_numbers[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                      1,    13,   25,  38,  53,  69,  89,  113};

INLINE void iq4_nl_columns(const uint8_t *b, int first, float *out) {
  const float d = half_in(b, 0);
  (void)first;
  for (int l = 0; l < 32; l++) out[l] = d * iq4_numbers[nibble_of_32(b + 2, l)];
}

INLINE void iq4_xs_columns(const uint8_t *b, int first, float *out) {
  const int j = first / 32, low = b[4 + j / 2] >> j % 2 * 4 & 15;
  const int high = (b[2] + 256 * b[3]) >> 2 * j & 3;
  const float step = half_in(b, 0) * (float)(low + 16 * high - 32);
  for (int l = 0; l < 32; l++) out[l] = step * iq4_numbers[nibble_of_32(b + 8 + 16 * j, l)];
}

/* + 0: in ggml, E2M1 has one zero. The scale is halved and the number doubled, so that 2^128 is
 * not needed. */
INLINE float fp4_of_ggml(int nibble) { return 2 * f4_value((uint32_t)nibble) + 0.0f; }

INLINE void mxfp4_columns(const uint8_t *b, int first, float *out) {
  const uint32_t e = b[0];
  const float half = from_bits(e == 0 ? 1u << 21 : e == 1 ? 1u << 22 : (e - 1) << 23);
  (void)first;
  for (int l = 0; l < 32; l++) out[l] = half * fp4_of_ggml(nibble_of_32(b + 1, l));
}

INLINE void nvfp4_columns(const uint8_t *b, int first, float *out) {
  for (int run = 0; run < 2; run++) {
    const int s = first / 16 + run, byte = b[s];
    /* F8 without the sign; 0x7f is 0, while 0xff is what 0x7f would be: 480 */
    const float number = (byte & 0x7f) == 0x7f ? 480.0f : f8_value(byte & 0x7f);
    const float half = byte == 0x7f ? 0.0f : number / 2;
    for (int l = 0; l < 16; l++) {
      const int nibble = b[4 + 8 * s + l % 8] >> (l < 8 ? 0 : 4) & 15;
      out[16 * run + l] = half * fp4_of_ggml(nibble);
    }
  }
}

/* Column i is digit n of a byte, counted from the highest in base 3. */
INLINE int ternary(const uint8_t *b, int i) {
  int n = i / 32, at = i % 32;
  if (i >= 160) n = (i - 160) / 16, at = 32 + (i - 160) % 16;
  if (i >= 240) n = (i - 240) / 4, at = 48 + (i - 240) % 4;
  int rest = b[at];
  for (int k = 0; k < n; k++) rest = rest * 3 % 256;
  return rest * 3 / 256 - 1;
}

INLINE void tq1_0_columns(const uint8_t *b, int first, float *out) {
  const float d = half_in(b, 52);
  for (int l = 0; l < 32; l++) out[l] = d * (float)ternary(b, first + l);
}

INLINE void tq2_0_columns(const uint8_t *b, int first, float *out) {
  const float d = half_in(b, 64);
  const uint8_t *const qs = b + first / 128 * 32;
  const int shift = first % 128 / 32 * 2;
  for (int l = 0; l < 32; l++) out[l] = d * (float)((qs[l] >> shift & 3) - 1);
}

#endif
