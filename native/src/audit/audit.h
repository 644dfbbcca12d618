/* audit.h - a second opinion on packed (packed.h) and on encoded weights (encoded.h).
 *
 * Nothing here is shared with what packs or encodes: places follow from docs/formats.md, source
 * values from the definition of their number formats (source.h). One loop for each of the two, one
 * file per level: the compiler makes of it what the level allows, but for some sums by hand
 * (packed_runs_*.h, packed_fixed_*, encoded_*_avx512.h). As sums have lanes of their own, the
 * results have the same bits everywhere. */
#ifndef KT_AUDIT_H
#define KT_AUDIT_H

#include "ktconv.h"

enum {
  KT_AUDIT_ROWS = 16,       /* rows of half a tile */
  KT_AUDIT_COLS = 64,       /* columns that are added at once: of INT8 half a tile */
  KT_AUDIT_GROUP_COLS = 32, /* the same of groups, a tile */
  KT_AUDIT_BLOCK = 1024,    /* columns that are unpacked at once, at most */
  KT_AUDIT_SUMMED = 512,    /* columns of encoded bytes whose sums are binary32 */
  KT_AUDIT_GATHERED = 128   /* the same of sources whose rows lie side by side */
};

#endif
