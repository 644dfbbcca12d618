/* amx_instructions.c - each AMX instruction by itself, for the tests of the emulator.
 *
 *   cc -std=c11 -O1 -shared -fPIC native/test/amx_instructions.c -o amx_instructions.so */
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#define AMX __attribute__((target("amx-tile,amx-int8,amx-bf16")))

AMX void kt_test_load_config(const uint8_t *config) { _tile_loadconfig(config); }

AMX void kt_test_store_config(uint8_t *config) { _tile_storeconfig(config); }

AMX void kt_test_release(void) { _tile_release(); }

AMX void kt_test_load(const void *from, ptrdiff_t stride) { _tile_loadd(3, from, stride); }

AMX void kt_test_stream_load(const void *from, ptrdiff_t stride) {
  _tile_stream_loadd(3, from, stride);
}

AMX void kt_test_store(void *to, ptrdiff_t stride) { _tile_stored(3, to, stride); }

AMX void kt_test_zero(void) { _tile_zero(3); }

/* c += a * b with tiles 0, 1, 2; kind: 0 SSD, 1 SUD, 2 USD, 3 UUD, 4 BF16. */
AMX void kt_test_product(int kind, const void *a, ptrdiff_t a_stride, const void *b,
                         ptrdiff_t b_stride, void *c, ptrdiff_t c_stride) {
  _tile_loadd(0, c, c_stride);
  _tile_loadd(1, a, a_stride);
  _tile_loadd(2, b, b_stride);
  switch (kind) {
  case 0: _tile_dpbssd(0, 1, 2); break;
  case 1: _tile_dpbsud(0, 1, 2); break;
  case 2: _tile_dpbusd(0, 1, 2); break;
  case 3: _tile_dpbuud(0, 1, 2); break;
  default: _tile_dpbf16ps(0, 1, 2); break;
  }
  _tile_stored(0, c, c_stride);
}

/* Address forms by hand: bases rsp and r12 (which need a SIB byte), r13 (which needs a
 * displacement), high index registers, scales, displacements of one and of four bytes. */
AMX void kt_test_addresses(const uint8_t *from, uint8_t *to) {
  __asm__ volatile("movq %0, %%r12\n\t"
                   "movq $16, %%r15\n\t"
                   "tileloadd (%%r12,%%r15,4), %%tmm3\n\t"
                   "movq %1, %%r13\n\t"
                   "tilestored %%tmm3, (%%r13,%%r15,4)\n\t"
                   "leaq -1024(%1), %%r13\n\t"
                   "movq $64, %%r14\n\t"
                   "tilestored %%tmm3, 2048(%%r13,%%r14,1)\n\t"
                   "leaq 2000(%1), %%r12\n\t"
                   "tilestored %%tmm3, 48(%%r12,%%r14,1)\n\t"
                   :
                   : "r"(from), "r"(to)
                   : "r12", "r13", "r14", "r15", "memory");
}

void kt_test_undefined(void) { __asm__ volatile("ud2"); }

void kt_test_breakpoint(void) { __asm__ volatile("int3"); }
