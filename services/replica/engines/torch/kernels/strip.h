/* Products of up to 16 rows with 8 or 16 lanes in plain vector code: sums that stay in registers.
 *
 * Written for AVX2, whose 16 registers hold 6 rows x 16 lanes of sums beside two vectors of lanes
 * and a broadcast weight; other vector units with 256 bits or 32 registers compile it as well.
 * A unit is what 4 bytes of a row hold: one number, or a pair of bf16. A lane's sum is one chain
 * of multiply-adds along k whatever the number of rows and lanes, so its bits never depend on it.
 */
#pragma once

typedef float v8 __attribute__((vector_size(32), aligned(4)));
typedef uint32_t u8v __attribute__((vector_size(32), aligned(4)));

enum { CHUNK = 288 /* units: a strip's operands stay in the first-level cache */ };

/* sum[row][half] += the row's unit x the unit's lanes. */
static inline __attribute__((always_inline)) void add_unit(
    v8 sum[8][2], const char *a, long stride, const char *b, const int rows, const int halves) {
#ifdef BF16
    v8 even[2], odd[2];
    for (int h = 0; h < halves; h++) {
        u8v lanes = *(const u8v *)(b + h * 32);
        even[h] = (v8)(lanes << 16), odd[h] = (v8)(lanes & 0xFFFF0000u);
    }
    for (int r = 0; r < rows; r++) {
        float pair; /* by its type spread from memory first, then cut: not the other way round */
        memcpy(&pair, a + r * stride, 4);
        u8v both = (u8v)(v8){pair, pair, pair, pair, pair, pair, pair, pair};
        v8 first = (v8)(both << 16), second = (v8)(both & 0xFFFF0000u);
        for (int h = 0; h < halves; h++) sum[r][h] += even[h] * first;
        for (int h = 0; h < halves; h++) sum[r][h] += odd[h] * second;
    }
#else
    v8 lanes[2];
    for (int h = 0; h < halves; h++) lanes[h] = *(const v8 *)(b + h * 32);
    for (int r = 0; r < rows; r++) {
        const float weight = *(const float *)(a + r * stride);
        for (int h = 0; h < halves; h++) sum[r][h] += lanes[h] * weight;
    }
#endif
}

/* c[row][lane] (16 apart) += a[row] . b[.][lane]; rows and halves (of 16 lanes) are constants. */
static inline __attribute__((always_inline)) void strip_of(
    float *c, const char *a, long stride, const char *b, long units, const char *next,
    const int rows, const int halves) {
    v8 sum[8][2];
    for (int r = 0; r < rows; r++)
        for (int h = 0; h < halves; h++) sum[r][h] = *(v8 *)(c + r * 16 + h * 8);
    const int by = next || halves == 1 ? 2 : 1; /* units a turn; a line is fetched in each */
    for (long k0 = 0; k0 < units; k0 += by) {
        if (next) __builtin_prefetch(next + k0 * 32, 0, 2);
        for (long k = k0; k < k0 + by; k++)
            add_unit(sum, a + k * 4, stride, b + k * 64, rows, halves);
    }
    for (int r = 0; r < rows; r++)
        for (int h = 0; h < halves; h++) *(v8 *)(c + r * 16 + h * 8) = sum[r][h];
}

#define STRIP(ROWS, HALVES)                                                                  \
    static __attribute__((noinline)) void strip_##ROWS##_##HALVES(                           \
        float *c, const char *a, long stride, const char *b, long units, const char *next) { \
        if (next) strip_of(c, a, stride, b, units, next, ROWS, HALVES);                      \
        else strip_of(c, a, stride, b, units, NULL, ROWS, HALVES);                           \
    }
STRIP(1, 2) STRIP(2, 2) STRIP(3, 2) STRIP(4, 2) STRIP(5, 2) STRIP(6, 2) STRIP(8, 1)
#undef STRIP

/* ``rows`` rows (16 at most) of a tile. On the way ``units`` lines from ``next`` are fetched, half
 * of them by each of the first two strips: evenly, as memory delivers them. */
static inline void strips(float *c, const char *a, long stride, const char *b, long units, int rows,
                          int lanes, const char *next) {
    if (lanes <= 8 && rows == 16) {
        strip_8_1(c, a, stride, b, units, next);
        strip_8_1(c + 128, a + 8 * stride, stride, b, units, next ? next + units * 32 : NULL);
        return;
    }
    int r = 0;
#define NEXT(ROWS)                                                         \
    (strip_##ROWS##_2(c + r * 16, a + r * stride, stride, b, units, next), \
     next = r || !next ? NULL : next + units * 32, r += ROWS)
#ifdef BF16
    while (rows - r > 4) NEXT(4); /* more and the registers do not do */
#else
    if (rows > 12) { NEXT(6); NEXT(5); NEXT(5); return; }
    if (rows == 8) NEXT(4);
    else if (rows > 6) NEXT(6);
#endif
    switch (rows - r) {
        case 1: NEXT(1); break;
        case 2: NEXT(2); break;
        case 3: NEXT(3); break;
        case 4: NEXT(4); break;
        case 5: NEXT(5); break;
        case 6: NEXT(6); break;
    }
#undef NEXT
}
