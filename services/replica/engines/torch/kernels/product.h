/* Products of the weights with blocks of rows, with the adapters' changes added on the way. */
#pragma once
#include "model.h"

/* Adds B z of every adapter that has lanes in block m to the tiles of two row blocks. */
#define LORA(c0, c1, mb)                                                                        \
    for (int i = p->first_pair[mb]; i < p->first_pair[(mb) + 1]; i++) {                         \
        const struct lora *table = p->s->loras[p->pair[i].adapter] + g->layer * MODULES;        \
        for (int half = 0; half < 2; half++) {                                                  \
            long n = half ? n1 : n0;                                                            \
            int sub = 0;                                                                        \
            while (sub + 1 < g->subs && n >= g->sub[sub + 1].first) sub++;                      \
            const struct lora *l = &table[g->sub[sub].module];                                  \
            if (!l->rank || (half && n1 == n0)) continue;                                       \
            const elem *z = p->z + ((long)i * 3 + sub) * p->zs;                                 \
            const elem *b = l->b + (n - g->sub[sub].first) * l->rank;                           \
            for (long r = 0; r < l->rank; r += RUN(l->rank)) {                                  \
                TLOAD(6, z + r * LANES, 64);                                                    \
                TLOAD(4, b + r, l->rank * sizeof(elem));                                        \
                if (half) TDP_RUN(c1, 4, 6, 16, l->rank);                                       \
                else TDP_RUN(c0, 4, 6, 16, l->rank);                                            \
            }                                                                                   \
        }                                                                                       \
    }

#ifdef STRIPS
/* Lanes of block m that hold rows of x. */
static inline int lanes_of(const struct gemm *g, int m) {
    const long left = g->rows - (long)m * LANES;
    return left < LANES ? (int)left : LANES;
}
#endif

/* out[0..3] = rows n0 and n1 of w (16 each) times blocks m0 and m1 of x (m1 < 0: only m0). */
static inline __attribute__((always_inline)) void product(
    const struct pass *p, const struct gemm *g, long n0, long n1, int m0, int m1,
    float out[4][256], const char *next0, const char *next1) {
    TILES
    const int packed = (int)p->m->packed;
    const long stride = packed ? 64 : g->k * (long)sizeof(elem);
    const long advance = packed ? TILE : KSTEP, steps = g->k / KSTEP, block = g->k * LANES;
    const elem *a0 = g->w + n0 * g->k, *a1 = g->w + n1 * g->k;
    const elem *b0 = g->x + m0 * block, *b1 = g->x + (m1 < 0 ? m0 : m1) * block;
    TZERO(0); TZERO(1); TZERO(2); TZERO(3);
#ifdef STRIPS
    const int lanes0 = lanes_of(g, m0), lanes1 = m1 < 0 ? 0 : lanes_of(g, m1);
    const long most = packed ? 1 : CHUNK / 16; /* a packed tile's rows end with it */
    for (long s = 0; s < steps; s += most) {
        const long units = 16 * (steps - s < most ? steps - s : most);
        for (int half = 0; half < 2; half++) {
            const char *a = (const char *)((half ? a1 : a0) + s * advance);
            const char *next = next0 ? (half ? next1 : next0) + s * 1024 : NULL;
            strips(tile_[2 * half].c[0], a, stride, (const char *)(b0 + s * TILE), units, 16, lanes0,
                   next);
            if (m1 >= 0)
                strips(tile_[2 * half + 1].c[0], a, stride, (const char *)(b1 + s * TILE), units, 16,
                       lanes1, NULL);
        }
    }
#else
    for (long s = 0; s < steps; s++) {
        if (next0)
            for (int line = 0; line < 16; line++) {
                __builtin_prefetch(next0 + (s * 16 + line) * 64, 0, 2);
                __builtin_prefetch(next1 + (s * 16 + line) * 64, 0, 2);
            }
        TLOAD(4, a0 + s * advance, stride);
        TLOAD(6, b0 + s * TILE, 64);
        TDP(0, 4, 6);
        TLOAD(5, a1 + s * advance, stride);
        TDP(2, 5, 6);
        if (m1 >= 0) {
            TLOAD(7, b1 + s * TILE, 64);
            TDP(1, 4, 7);
            TDP(3, 5, 7);
        }
    }
#endif
    if (p->pairs && g->subs) {
        LORA(0, 2, m0)
        if (m1 >= 0) { LORA(1, 3, m1) }
    }
    TSTORE(0, out[0], 64);
    TSTORE(2, out[2], 64);
    if (m1 >= 0) { TSTORE(1, out[1], 64); TSTORE(3, out[3], 64); }
}

typedef void epilogue(struct pass *, const struct gemm *, int me, long n0, long n1, int m0, int m1,
                      float out[4][256]);

/* All panels of a product. ``apart``: distance of a panel's second 16 rows from the first. */
static inline __attribute__((always_inline)) void multiply(
    struct pass *p, const struct gemm *g, struct phase *f, int me, int blocks, long apart,
    epilogue *finish) {
    float out[4][256] __attribute__((aligned(64)));
    const long step = apart == LANES ? 2 * LANES : LANES;
    const long rows = apart == LANES ? g->n : apart, panels = (rows + step - 1) / step;
    const long ahead = step * p->m->threads;
    EACH(i, f, (int)panels) {
        long n0 = i * step, n1 = n0 + apart;
        if (n0 + LANES > rows) n0 = rows - LANES; /* the last rows again, not beyond */
        if (apart == LANES && n1 + LANES > rows) n1 = n0 + LANES > rows - LANES ? n0 : rows - LANES;
        for (int m0 = 0; m0 < blocks; m0 += 2) {
            const int m1 = m0 + 1 < blocks ? m0 + 1 : -1;
            const int fetch = m0 == 0 && n1 + ahead + LANES <= g->n && n0 + ahead + LANES <= rows;
            const char *next = (const char *)(g->w + (n0 + ahead) * g->k);
            product(p, g, n0, n1, m0, m1, out, fetch ? next : NULL,
                    (const char *)(g->w + (n1 + ahead) * g->k));
            finish(p, g, me, n0, n1, m0, m1, out);
        }
    }
    wait_for(f, (int)panels);
}

static inline void each_tile(long n0, long n1, int m0, int m1, int t, long *n, int *mb) {
    *n = t & 2 ? n1 : n0;
    *mb = t & 1 ? m1 : m0;
}

static inline void store_qkv(struct pass *p, const struct gemm *g, int me, long n0, long n1, int m0,
                             int m1, float out[4][256]) {
    (void)me;
    const elem *bias = p->m->layer[g->layer].bias;
    for (int t = 0; t < 4; t++) {
        long n; int mb;
        each_tile(n0, n1, m0, m1, t, &n, &mb);
        if (mb < 0) continue;
        float *to = p->y + ((long)mb * g->n + n) * LANES;
        for (int r = 0; r < 16; r++) {
            v16 value = *(v16 *)&out[t][r * 16];
            if (bias) value += wide(bias[n + r]);
            *(v16 *)(to + r * LANES) = value;
        }
    }
}

static inline void add_residual(struct pass *p, const struct gemm *g, int me, long n0, long n1, int m0,
                                int m1, float out[4][256]) {
    (void)me;
    for (int t = 0; t < 4; t++) {
        long n; int mb;
        each_tile(n0, n1, m0, m1, t, &n, &mb);
        if (mb < 0 || (t & 2 && n1 == n0)) continue;
        float *to = p->h + ((long)mb * g->n + n) * LANES;
        for (int r = 0; r < 16; r++) *(v16 *)(to + r * LANES) += *(v16 *)&out[t][r * 16];
    }
}

static inline void pack_rows(elem *to, const v16 *rows, int count) {
#ifdef BF16
    for (int r = 0; r < count; r += 2) store_pair(to + r * LANES, rows[r], rows[r + 1]);
#else
    memcpy(to, rows, count * 64);
#endif
}

static inline void gated(struct pass *p, const struct gemm *g, int me, long n0, long n1, int m0, int m1,
                         float out[4][256]) {
    (void)g; (void)me; (void)n1;
    for (int side = 0; side < 2; side++) {
        int mb = side ? m1 : m0;
        if (mb < 0) continue;
        v16 result[16];
        for (int r = 0; r < 16; r++) {
            v16 gate = *(v16 *)&out[side][r * 16], up = *(v16 *)&out[2 + side][r * 16];
            result[r] = gate * up / (1.0f + exp2v(gate * -1.44269504f));
        }
        pack_rows(p->wide_x + ((long)mb * p->m->inter + n0) * LANES, result, 16);
    }
}

static inline void pick(struct pass *p, const struct gemm *g, int me, long n0, long n1, int m0, int m1,
                        float out[4][256]) {
    const struct step *s = p->s;
    const long places = (long)p->logit_blocks * LANES;
    float *value = p->best_value + me * places;
    int32_t *token = p->best_token + me * places;
    for (int t = 0; t < 4; t++) {
        long n; int mb;
        each_tile(n0, n1, m0, m1, t, &n, &mb);
        if (mb < 0) continue;
        v16 best = *(v16 *)(value + mb * LANES);
        i16 where = *(i16 *)(token + mb * LANES);
        for (int r = 0; r < 16; r++) {
            v16 here = *(v16 *)&out[t][r * 16];
            i16 better = here > best, index = (i16){} + (int32_t)(n + r);
            best = pick_lanes(better, here, best);
            where = select_int(better, index, where);
        }
        *(v16 *)(value + mb * LANES) = best;
        *(i16 *)(token + mb * LANES) = where;
        for (long lane = 0; lane < LANES && mb * LANES + lane < s->logit_rows; lane++) {
            long at = s->full[mb * LANES + lane];
            if (at >= 0)
                for (int r = 0; r < 16; r++) s->logits[at * g->n + n + r] = out[t][r * 16 + lane];
        }
    }
}

/* z of every (adapter, block) for the modules that read x: scale * A x, masked. */
static void lora_inputs(struct pass *p, const struct gemm *g, struct phase *f) {
    float out[256] __attribute__((aligned(64)));
    TILES
    EACH(i, f, p->pairs * g->subs) {
        const int at = i / g->subs, sub = i % g->subs;
        const struct pair *pair = &p->pair[at];
        const struct lora *l =
            &p->s->loras[pair->adapter][g->layer * MODULES + g->sub[sub].module];
        elem *z = p->z + ((long)at * 3 + sub) * p->zs;
        const elem *x = g->x + pair->block * g->k * LANES;
        v16 scale;
        for (int lane = 0; lane < LANES; lane++)
            scale[lane] = pair->mask >> lane & 1 ? l->scale : 0.0f;
        for (long r = 0; r < round_up(l->rank, KSTEP); r += 16) {
            v16 rows[16] = {};
            if (r < l->rank) {
                TZERO(0);
                const int left = l->rank - r < 16 ? (int)(l->rank - r) : 16;
                for (long k = 0; k < g->k; k += RUN(g->k)) {
                    TLOAD(4, l->a + r * g->k + k, g->k * sizeof(elem));
                    TLOAD(6, x + k * LANES, 64);
                    TDP_RUN(0, 4, 6, left, g->k);
                }
                TSTORE(0, out, 64);
                for (int j = 0; j < 16 && r + j < l->rank; j++)
                    rows[j] = *(v16 *)&out[j * 16] * scale;
            }
            pack_rows(z + r * LANES, rows, 16);
        }
    }
    wait_for(f, p->pairs * g->subs);
}
