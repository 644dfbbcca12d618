/* What plain C reaches on this machine, as the compiler sees fit. */
#include "limits.h"

#include <string.h>

enum { STEP = 256 };

uint64_t kt_limit_read_scalar(const uint8_t *memory, size_t size, int32_t streams) {
  uint64_t sum = 0, word;
  for (size_t i = 0; i < size; i += STEP)
    for (int32_t s = 0; s < streams; s++)
      for (size_t j = 0; j < STEP; j += sizeof word) {
        memcpy(&word, memory + (size_t)s * size + i + j, sizeof word);
        sum += word;
      }
  return sum;
}

enum { VALUES = 4096 };

void kt_limit_int8_scalar(int64_t rounds) {
  volatile int32_t result = 0; /* each thread's own */
  int8_t a[VALUES], b[VALUES];
  memset(a, 1, sizeof a);
  memset(b, 2, sizeof b);
  for (int64_t i = 0; i < rounds * (KT_ROUND / VALUES); i++) {
    int32_t sum = 0;
    for (int k = 0; k < VALUES; k++) sum += a[k] * b[k];
    result = sum;
    a[i % VALUES] = (int8_t)(sum & 7);
  }
  (void)result;
}

void kt_limit_bf16_scalar(int64_t rounds) {
  volatile float result = 0;
  float a[VALUES], b[VALUES];
  for (int k = 0; k < VALUES; k++) a[k] = 1.0f, b[k] = 2.0f;
  for (int64_t i = 0; i < rounds * (KT_ROUND / VALUES); i++) {
    float sum[16] = {0};
    for (int k = 0; k < VALUES; k += 16)
      for (int j = 0; j < 16; j++) sum[j] += a[k + j] * b[k + j];
    result = sum[i % 16];
  }
  (void)result;
}
