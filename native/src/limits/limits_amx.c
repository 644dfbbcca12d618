/* The limits of AMX: four sums, so that products need not wait for one another. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AMX)
#include "../gemm/amx_tiles.h"
#include "limits.h"

enum { INT8_OPS = 16 * 16 * 64, BF16_OPS = 16 * 16 * 32 }; /* multiply-adds of a product */

void kt_limit_int8_amx(int64_t rounds) {
  kt_amx_configure(2 * KT_AMX_ROWS);
  kt_amx_zero_sums(1);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
  for (int64_t n = rounds * (KT_ROUND / (4 * INT8_OPS)); n > 0; n--) {
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  }
  _tile_release();
}

void kt_limit_bf16_amx(int64_t rounds) {
  kt_amx_configure(2 * KT_AMX_ROWS);
  kt_amx_zero_sums(1);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
  for (int64_t n = rounds * (KT_ROUND / (4 * BF16_OPS)); n > 0; n--) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
}

KT_TARGET_END
#endif
