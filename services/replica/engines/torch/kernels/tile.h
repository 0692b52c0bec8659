/* Tiles: 16 rows of 64 bytes. C (fp32) += A (rows of weights or queries) x B (16 lanes).
 *
 * With AMX these are the processor's tile registers; elsewhere the same operations on arrays in
 * vector code, so that there is one source. KSTEP elements of a row make a tile row; PAIR
 * neighbours along k lie together in B, as the bf16 dot product instructions want it. TDP_RUN
 * takes RUN(n) of a row's ``n`` elements and computes the first ``rows`` rows of C at least: in tile
 * registers a part costs what the whole does, elsewhere it saves work.
 */
#pragma once
#include <stdint.h>
#include <string.h>

typedef float v16 __attribute__((vector_size(64), aligned(4)));
typedef int32_t i16 __attribute__((vector_size(64), aligned(4)));
typedef uint32_t u16v __attribute__((vector_size(64), aligned(4)));

#ifdef BF16
typedef uint16_t elem;
enum { PAIR = 2, KSTEP = 32 };
static inline float wide(elem x) {
    union { uint32_t u; float f; } bits = {(uint32_t)x << 16};
    return bits.f;
}
static inline elem narrow(float x) { /* round to nearest even; no NaN comes here */
    union { float f; uint32_t u; } bits = {x};
    return (elem)((bits.u + 0x7FFF + ((bits.u >> 16) & 1)) >> 16);
}
/* Two rows of 16 lanes as one row of 16 pairs. */
static inline void store_pair(elem *to, v16 even, v16 odd) {
    u16v a = (u16v)even, b = (u16v)odd;
    a = (a + 0x7FFF + ((a >> 16) & 1)) >> 16;
    b = (b + 0x7FFF + ((b >> 16) & 1)) & 0xFFFF0000u;
    *(u16v *)to = a | b;
}
#else
typedef float elem;
enum { PAIR = 1, KSTEP = 16 };
static inline float wide(elem x) { return x; }
static inline elem narrow(float x) { return x; }
#endif

enum { LANES = 16, TILE = 1024 / sizeof(elem) /* elements of a tile */ };

#ifdef __AVX512BF16__
#include <immintrin.h>
typedef __m256i __m256bh_u __attribute__((aligned(2)));
#endif
#if defined(BF16) && defined(__AMX_BF16__) && !defined(NO_AMX)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define KERNEL_NAME "amx"
#define TILES
#define TZERO(t) _tile_zero(t)
#define TLOAD(t, p, stride) _tile_loadd(t, p, stride)
#define TDP(c, a, b) _tile_dpbf16ps(c, a, b)
#define RUN(left) KSTEP
#define TDP_RUN(c, a, b, rows, n) _tile_dpbf16ps(c, a, b)
#define TSTORE(t, p, stride) _tile_stored(t, p, stride)
struct tile_config { uint8_t palette, start, reserved[14]; uint16_t bytes[16]; uint8_t rows[16]; };
static int tiles_allowed(void) { /* ARCH_REQ_XCOMP_PERM for tile data, once a process */
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}
static void tiles_begin(void) {
    struct tile_config config = {.palette = 1};
    for (int t = 0; t < 8; t++) { config.bytes[t] = 64; config.rows[t] = 16; }
    _tile_loadconfig(&config);
}
static void tiles_end(void) { _tile_release(); }
#else
#if defined(BF16) && defined(__AVX512BF16__)
#include <immintrin.h>
#define KERNEL_NAME "avx512_bf16"
#else
#define KERNEL_NAME "vector"
#endif
struct tile { const char *p; long stride; float c[16][16] __attribute__((aligned(64))); };
#define TILES struct tile tile_[8];
#define TZERO(t) memset(tile_[t].c, 0, sizeof tile_[t].c)
#define TLOAD(t, q, s) (tile_[t].p = (const char *)(q), tile_[t].stride = (s))
#define TDP(c, a, b) TDP_RUN(c, a, b, 16, KSTEP)
#define TSTORE(t, q, s) tstore(&tile_[t], (char *)(q), s)
#ifdef __AVX512F__
/* ``n`` rows from ``first`` on; n is a constant where this is called, so the sums are registers. */
static inline __attribute__((always_inline)) void tdp_part(
    struct tile *c, const struct tile *a, const struct tile *b, const int first, const int n) {
    v16 sum[8];
    for (int r = 0; r < n; r++) sum[r] = *(v16 *)c->c[first + r];
    for (int k = 0; k < 16; k++) {
        const char *row = b->p + k * b->stride;
#if defined(BF16) && defined(__AVX512BF16__)
        __m512bh lanes = (__m512bh)_mm512_loadu_si512(row);
        for (int r = 0; r < n; r++) {
            int pair;
            memcpy(&pair, a->p + (first + r) * a->stride + 4 * k, 4);
            sum[r] = (v16)_mm512_dpbf16_ps((__m512)sum[r], (__m512bh)_mm512_set1_epi32(pair),
                                           lanes);
        }
#elif defined(BF16)
        u16v lanes = *(const u16v *)row;
        v16 even = (v16)(lanes << 16), odd = (v16)(lanes & 0xFFFF0000u);
        for (int r = 0; r < n; r++) {
            const elem *pair = (const elem *)(a->p + (first + r) * a->stride) + 2 * k;
            sum[r] += even * wide(pair[0]) + odd * wide(pair[1]);
        }
#else
        v16 lanes = *(const v16 *)row;
        for (int r = 0; r < n; r++)
            sum[r] += lanes * *((const float *)(a->p + (first + r) * a->stride) + k);
#endif
    }
    for (int r = 0; r < n; r++) *(v16 *)c->c[first + r] = sum[r];
}
static inline __attribute__((always_inline)) void tdp(
    struct tile *c, const struct tile *a, const struct tile *b, const int rows) {
    if (rows <= 4) return tdp_part(c, a, b, 0, 4);
    tdp_part(c, a, b, 0, 8);
    if (rows > 8) tdp_part(c, a, b, 8, 8);
}
#define RUN(left) KSTEP
#define TDP_RUN(c, a, b, rows, n) tdp(&tile_[c], &tile_[a], &tile_[b], rows)
#else
#define STRIPS
#include "strip.h"
static inline void tdp_run(struct tile *c, const struct tile *a, const struct tile *b, int rows,
                           long n) {
    strips(c->c[0], a->p, a->stride, b->p, (n + PAIR - 1) / PAIR, rows, LANES, NULL);
}
#define RUN(left) (left)
#define TDP_RUN(c, a, b, rows, n) tdp_run(&tile_[c], &tile_[a], &tile_[b], rows, n)
#endif
static inline void tstore(const struct tile *t, char *to, long stride) {
    for (int r = 0; r < 16; r++) memcpy(to + r * stride, t->c[r], 64);
}
static int tiles_allowed(void) { return 1; }
static void tiles_begin(void) {}
static void tiles_end(void) {}
#endif

static inline v16 splat(float x) { return (v16){} + x; }
static inline i16 select_int(i16 mask, i16 yes, i16 no) { return (mask & yes) | (~mask & no); }
static inline v16 pick_lanes(i16 mask, v16 yes, v16 no) {
    return (v16)select_int(mask, (i16)yes, (i16)no);
}

/* Sixteen numbers, narrowed, side by side. */
static inline void store_narrow(elem *to, v16 x) {
#ifdef BF16
#ifdef __AVX512BF16__
    *(__m256bh_u *)to = (__m256bh_u)_mm512_cvtneps_pbh((__m512)x);
#else
    typedef uint16_t h16 __attribute__((vector_size(32), aligned(2)));
    u16v bits = (u16v)x;
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    *(h16 *)to = __builtin_convertvector(bits, h16);
#endif
#else
    *(v16 *)to = x;
#endif
}

/* 2^x for x up to 127; below -126 nearly 0. Relative error 2e-7 (fp32), 4e-5 where the result
 * is rounded to bf16 anyway. */
static inline v16 exp2v(v16 x) {
    v16 low = splat(-126.0f);
    x = pick_lanes(x < low, low, x);
    v16 magic = splat(12582912.0f), whole = (x + magic) - magic, f = x - whole;
#ifdef BF16
    v16 p = splat(9.6181291e-3f);
#else
    v16 p = splat(1.5403530e-4f);
    p = p * f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
#endif
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
    i16 power = __builtin_convertvector(whole, i16) + 127;
    return p * (v16)(power << 23);
}

/* 16 x 16 numbers, rows[i][j] -> rows[j][i]. */
static inline void transpose(v16 rows[16]) {
    typedef int32_t shuffle __attribute__((vector_size(64)));
    v16 other[16];
#define STEP(from, to, gap, first, second)                      \
    for (int i = 0; i < 16; i++)                                \
        if (!(i & (gap))) {                                     \
            to[i] = __builtin_shuffle(from[i], from[i + (gap)], first);          \
            to[i + (gap)] = __builtin_shuffle(from[i], from[i + (gap)], second); \
        }
    STEP(rows, other, 8, ((shuffle){0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}),
         ((shuffle){8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31}))
    STEP(other, rows, 4, ((shuffle){0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27}),
         ((shuffle){4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31}))
    STEP(rows, other, 2, ((shuffle){0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29}),
         ((shuffle){2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31}))
    STEP(other, rows, 1, ((shuffle){0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30}),
         ((shuffle){1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31}))
#undef STEP
}
