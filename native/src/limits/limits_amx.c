/* The limits of AMX: four sums, so that products need not wait for one another. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AMX)
#include "../gemm/amx_tiles.h"
#include "limits.h"

/* `each`: multiply-adds of a product. */
#define DEFINE(unit, multiply, each)                                                               \
  void kt_limit_##unit##_amx(int64_t rounds) {                                                     \
    kt_amx_configure(2 * KT_AMX_ROWS);                                                             \
    kt_amx_zero_sums(1);                                                                           \
    _tile_zero(4);                                                                                 \
    _tile_zero(5);                                                                                 \
    _tile_zero(6);                                                                                 \
    _tile_zero(7);                                                                                 \
    for (int64_t n = rounds * (KT_ROUND / (4 * (each))); n > 0; n--) {                             \
      multiply(0, 4, 6);                                                                           \
      multiply(1, 4, 7);                                                                           \
      multiply(2, 5, 6);                                                                           \
      multiply(3, 5, 7);                                                                           \
    }                                                                                              \
    _tile_release();                                                                               \
  }

DEFINE(int8, _tile_dpbssd, 16 * 16 * 64)
DEFINE(bf16, _tile_dpbf16ps, 16 * 16 * 32)

KT_TARGET_END
#endif
