/* source_ggml.h - 32 columns of a block of ggml as the audit reads them: element by element from
 * the definitions in docs/encodings.md, not from source/.
 *
 * <name>_columns: columns `first` (a multiple of 32) to first + 31 of the block at b. j is
 * first / 32, l counts from first on; half precision is little-endian. */
#ifndef KT_AUDIT_SOURCE_GGML_H
#define KT_AUDIT_SOURCE_GGML_H

#include "../simd/unroll.h"
#include "source_numbers.h"

INLINE float half_in(const uint8_t *b, int at) {
  return f16_value((uint16_t)(b[at] | b[at + 1] << 8));
}

/* The low nibbles of 16 bytes, then the high ones. */
INLINE void nibbles_of_16(const uint8_t *qs, uint8_t q[32]) {
  KT_LOOP
  for (int l = 0; l < 16; l++) q[l] = qs[l] & 15;
  KT_LOOP
  for (int l = 0; l < 16; l++) q[16 + l] = qs[l] >> 4;
}

INLINE void q4_0_columns(const uint8_t *b, int first, float *out) {
  const float d = half_in(b, 0);
  uint8_t q[32];
  (void)first;
  nibbles_of_16(b + 2, q);
  KT_LOOP
  for (int l = 0; l < 32; l++) out[l] = d * (float)(q[l] - 8);
}

INLINE void q4_1_columns(const uint8_t *b, int first, float *out) {
  const float d = half_in(b, 0), m = half_in(b, 2);
  uint8_t q[32];
  (void)first;
  nibbles_of_16(b + 4, q);
  KT_LOOP
  for (int l = 0; l < 32; l++) out[l] = d * (float)q[l] + m;
}

/* The same with bit l of a word as 16. */
INLINE void five_bits(const uint8_t *qh, const uint8_t *qs, uint8_t q[32]) {
  const uint32_t word =
      (uint32_t)qh[0] | (uint32_t)qh[1] << 8 | (uint32_t)qh[2] << 16 | (uint32_t)qh[3] << 24;
  nibbles_of_16(qs, q);
  KT_LOOP
  for (int l = 0; l < 32; l++) q[l] = (uint8_t)(q[l] + 16 * (word >> l & 1));
}

INLINE void q5_0_columns(const uint8_t *b, int first, float *out) {
  const float d = half_in(b, 0);
  uint8_t q[32];
  (void)first;
  five_bits(b + 2, b + 6, q);
  KT_LOOP
  for (int l = 0; l < 32; l++) out[l] = d * (float)(q[l] - 16);
}

INLINE void q5_1_columns(const uint8_t *b, int first, float *out) {
  const float d = half_in(b, 0), m = half_in(b, 2);
  uint8_t q[32];
  (void)first;
  five_bits(b + 4, b + 8, q);
  KT_LOOP
  for (int l = 0; l < 32; l++) out[l] = d * (float)q[l] + m;
}

INLINE void q8_0_columns(const uint8_t *b, int first, float *out) {
  const float d = half_in(b, 0);
  (void)first;
  KT_LOOP
  for (int l = 0; l < 32; l++) out[l] = d * (float)(int8_t)b[2 + l];
}

INLINE void q2_k_columns(const uint8_t *b, int first, float *out) {
  const float d = half_in(b, 80), dmin = half_in(b, 82);
  const uint8_t *const qs = b + 16 + first / 128 * 32;
  const int shift = first % 128 / 32 * 2;
  for (int run = 0; run < 2; run++) {
    const int scale = b[first / 16 + run];
    const float step = d * (float)(scale % 16), least_value = dmin * (float)(scale / 16);
    KT_LOOP
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
    KT_LOOP
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
  KT_LOOP
  for (int l = 0; l < 32; l++) out[l] = step * (float)(qs[l] >> shift & 15) - least_value;
}

INLINE void q5_k_columns(const uint8_t *b, int first, float *out) {
  const int j = first / 32, shift = j % 2 * 4;
  const uint8_t *const qh = b + 16, *const qs = b + 48 + j / 2 * 32;
  const float step = half_in(b, 0) * (float)packed_scale(b + 4, j);
  const float least_value = half_in(b, 2) * (float)packed_minimum(b + 4, j);
  KT_LOOP
  for (int l = 0; l < 32; l++)
    out[l] = step * (float)((qs[l] >> shift & 15) + 16 * (qh[l] >> j & 1)) - least_value;
}

INLINE void q6_k_columns(const uint8_t *b, int first, float *out) {
  const float d = half_in(b, 208);
  const int h = first / 128, quarter = first % 128 / 32;
  const uint8_t *const low = b + 64 * h + quarter % 2 * 32, *const high = b + 128 + 32 * h;
  for (int run = 0; run < 2; run++) {
    const float step = d * (float)(int8_t)b[192 + first / 16 + run];
    KT_LOOP
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
  uint8_t q[32];
  (void)first;
  nibbles_of_16(b + 2, q);
  KT_LOOP
  for (int l = 0; l < 32; l++) out[l] = d * iq4_numbers[q[l]];
}

INLINE void iq4_xs_columns(const uint8_t *b, int first, float *out) {
  const int j = first / 32, low = b[4 + j / 2] >> j % 2 * 4 & 15;
  const int high = (b[2] + 256 * b[3]) >> 2 * j & 3;
  const float step = half_in(b, 0) * (float)(low + 16 * high - 32);
  uint8_t q[32];
  nibbles_of_16(b + 8 + 16 * j, q);
  KT_LOOP
  for (int l = 0; l < 32; l++) out[l] = step * iq4_numbers[q[l]];
}

/* Twice E2M1, because scales are halved: then 2^128 is not needed. In ggml it has one zero. */
static const float twice_fp4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

INLINE void mxfp4_columns(const uint8_t *b, int first, float *out) {
  const uint32_t e = b[0];
  const float half = from_bits(e == 0 ? 1u << 21 : e == 1 ? 1u << 22 : (e - 1) << 23);
  uint8_t q[32];
  (void)first;
  nibbles_of_16(b + 1, q);
  KT_LOOP
  for (int l = 0; l < 32; l++) out[l] = half * twice_fp4[q[l]];
}

/* Half of F8 without its sign. 0x7f is 0, but 0xff what 0x7f would be: 480. */
INLINE float half_f8(uint32_t byte) {
  const uint32_t bits = byte & 0x7f;
  const uint32_t half = bits_of(f8_value((uint8_t)bits) / 2);
  return from_bits(choose(byte == 0x7f, 0, choose(byte == 0xff, bits_of(240.0f), half)));
}

INLINE void nvfp4_columns(const uint8_t *b, int first, float *out) {
  uint8_t q[32];
  float half[32];
  for (int run = 0; run < 2; run++) {
    const int s = first / 16 + run;
    const float of_run = half_f8(b[s]);
    KT_LOOP
    for (int l = 0; l < 8; l++) q[16 * run + l] = b[4 + 8 * s + l] & 15;
    KT_LOOP
    for (int l = 0; l < 8; l++) q[16 * run + 8 + l] = b[4 + 8 * s + l] >> 4;
    KT_LOOP
    for (int l = 0; l < 16; l++) half[16 * run + l] = of_run;
  }
  KT_LOOP
  for (int l = 0; l < 32; l++) out[l] = half[l] * twice_fp4[q[l]];
}

/* Digit n of a byte, counted from the highest in base 3. */
INLINE int ternary(uint8_t byte, int power) { return byte * power % 256 * 3 / 256 - 1; }

/* Runs of 16 columns are one digit of 16 bytes, but the last one is four digits of four. */
INLINE void tq1_0_columns(const uint8_t *b, int first, float *out) {
  static const uint8_t powers[5] = {1, 3, 9, 27, 81};
  const float d = half_in(b, 52);
  for (int run = first / 16; run < first / 16 + 2; run++, out += 16) {
    const uint8_t *const qs = run < 10 ? b + 16 * (run % 2) : b + 32;
    const int power = powers[run < 10 ? run / 2 : run == 15 ? 0 : run - 10];
    if (run < 15) KT_LOOP
    for (int l = 0; l < 16; l++) out[l] = d * (float)ternary(qs[l], power);
    else KT_LOOP for (int l = 0; l < 16; l++) out[l] =
        d * (float)ternary(b[48 + l % 4], powers[l / 4]);
  }
}

INLINE void tq2_0_columns(const uint8_t *b, int first, float *out) {
  const float d = half_in(b, 64);
  const uint8_t *const qs = b + first / 128 * 32;
  const int shift = first % 128 / 32 * 2;
  KT_LOOP
  for (int l = 0; l < 32; l++) out[l] = d * (float)((qs[l] >> shift & 3) - 1);
}

INLINE void q1_0_columns(const uint8_t *b, int first, float *out) {
  const float d = half_in(b, 0);
  const uint8_t *const qs = b + 2 + first / 8;
  KT_LOOP
  for (int l = 0; l < 32; l++) out[l] = qs[l / 8] >> l % 8 & 1 ? d : -d;
}

INLINE void q2_0_columns(const uint8_t *b, int first, float *out) {
  const float d = half_in(b, 0);
  const uint8_t *const qs = b + 2 + first / 4;
  KT_LOOP
  for (int l = 0; l < 32; l++) out[l] = d * (float)((qs[l / 4] >> l % 4 * 2 & 3) - 1);
}

#endif
