/* A whole forward pass of a Llama-like model over paged KV memory, in one call.
 *
 * Rows (tokens of all sequences, one after the other) are taken in blocks of 16 lanes. All
 * activations lie transposed, [feature][lane], so that
 *   - the weights are the A operand as they are stored, row by row: nothing is repacked, the
 *     same mapped memory serves training;
 *   - norms, activation and the search for the best token are vectors over the lanes;
 *   - a row's result does not depend on its neighbours: any batch gives the same bits.
 * LoRA: for each (adapter, block of rows) that meet, z = scale * A x for the adapter's lanes and
 * 0 for the others; then B z is one more step along k of the base product.
 */
#include "threads.h"
#include "tile.h"
#include <math.h>

enum { PAGE = 32, MODULES = 7, Q = 0, K, V, O, GATE, UP, DOWN };

struct layer {
    const elem *qkv, *o, *gate_up, *down, *norm1, *norm2, *bias, *q_norm, *k_norm;
    elem *keys, *values; /* pages x kv_heads x PAGE x head_dim */
    int64_t window;      /* 0: none */
};
struct lora { const elem *a, *b; int64_t rank; float scale, unused; };
struct model {
    int64_t hidden, inter, layers, heads, kv_heads, head_dim, vocab, threads, packed;
    float eps, unused;
    const elem *embed, *head, *norm;
    const float *inverse; /* rotary frequencies [head_dim / 2] */
    const struct layer *layer;
    struct scratch *scratch;
};
struct step {
    int64_t rows, seqs, table_stride, logit_rows;
    const int32_t *tokens, *starts, *begins, *tables, *adapter /* per sequence, -1: none */;
    const int32_t *logit_row, *full /* index in logits, -1: only the best */;
    const struct lora *const *loras; /* [adapter] -> [layer][MODULES] */
    int64_t *best;
    float *logits;
};
struct pair { int32_t adapter, block; uint32_t mask; };
struct item { int32_t seq, token, tokens, kv_head, head, heads; };
struct scratch {
    char *memory;
    size_t size;
    struct pool *pool;
};
/* What all threads of a pass share. */
struct pass {
    const struct model *m;
    const struct step *s;
    int blocks, logit_blocks, items, pairs, zs;
    float *h, *y, *cos, *sin, *last;
    elem *x, *wide_x, *q, *z, *head_x;
    struct pair *pair;
    int *first_pair; /* per block, and one past the last */
    struct item *item;
    int32_t *row_seq, *row_pos;
    char *own; /* per thread: scores and probabilities */
    long own_size, scores_stride;
    float *best_value;
    int32_t *best_token;
    struct phase *phase;
};
struct sub { long first, rows; int module; };
struct gemm {
    const elem *w;
    const elem *x;
    long n, k; /* rows and columns of w */
    const struct sub *sub;
    int subs;
    int layer;
};

const char *kernel_name(void) { return KERNEL_NAME; }
int kernel_ready(void) { return tiles_allowed(); }

static long round_up(long x, long to) { return (x + to - 1) / to * to; }
static long key_dim(const struct model *m) { return round_up(m->head_dim, KSTEP); }
long key_page_elements(const struct model *m) { return PAGE * key_dim(m) * m->kv_heads; }
long value_page_elements(const struct model *m) { return PAGE * m->head_dim * m->kv_heads; }

/* ------------------------------------------------------------------ products */

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
            for (long r = 0; r < l->rank; r += KSTEP) {                                         \
                TLOAD(6, z + r * LANES, 64);                                                    \
                TLOAD(4, b + r, l->rank * sizeof(elem));                                        \
                if (half) TDP(c1, 4, 6); else TDP(c0, 4, 6);                                    \
            }                                                                                   \
        }                                                                                       \
    }

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
                for (long k = 0; k < g->k; k += KSTEP) {
                    TLOAD(4, l->a + r * g->k + k, g->k * sizeof(elem));
                    TLOAD(6, x + k * LANES, 64);
                    TDP(0, 4, 6);
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

/* ------------------------------------------------------------------ norms, positions */

/* to = packed (h * rsqrt(mean h^2 + eps) * weight) of one block. */
static void norm_block(const float *h, const elem *weight, elem *to, long n, float eps) {
    v16 sum[4] = {};
    for (long k = 0; k < n; k += 4)
        for (int j = 0; j < 4; j++) sum[j] += *(v16 *)(h + (k + j) * LANES) *
                                              *(v16 *)(h + (k + j) * LANES);
    v16 total = (sum[0] + sum[1]) + (sum[2] + sum[3]), scale;
    for (int lane = 0; lane < LANES; lane++) scale[lane] = 1.0f / sqrtf(total[lane] / n + eps);
    for (long k = 0; k < n; k += 2) {
        v16 rows[2];
        for (int j = 0; j < 2; j++)
            rows[j] = *(v16 *)(h + (k + j) * LANES) * scale * wide(weight[k + j]);
        pack_rows(to + k * LANES, rows, 2);
    }
}

static void norm_head(float *y, const elem *weight, long d, float eps) {
    v16 total = {}, scale;
    for (long k = 0; k < d; k++) total += *(v16 *)(y + k * LANES) * *(v16 *)(y + k * LANES);
    for (int lane = 0; lane < LANES; lane++) scale[lane] = 1.0f / sqrtf(total[lane] / d + eps);
    for (long k = 0; k < d; k++) *(v16 *)(y + k * LANES) *= scale * wide(weight[k]);
}

static void rotate(float *y, const float *cos, const float *sin, long d, float factor) {
    const long half = d / 2;
    for (long k = 0; k < half; k++) {
        v16 a = *(v16 *)(y + k * LANES), b = *(v16 *)(y + (k + half) * LANES);
        v16 c = *(v16 *)(cos + k * LANES), s = *(v16 *)(sin + k * LANES);
        *(v16 *)(y + k * LANES) = (a * c - b * s) * factor;
        *(v16 *)(y + (k + half) * LANES) = (b * c + a * s) * factor;
    }
}

/* Query rows of one head side by side with those of its group: a tile reads them in one go. */
static inline elem *query_row(const struct pass *p, long row, long head) {
    const long group = p->m->heads / p->m->kv_heads;
    return p->q + (((head / group) * p->blocks * LANES + row) * group + head % group) *
                      key_dim(p->m);
}

static void place_query(struct pass *p, const float *y, int block, long head) {
    const long d = p->m->head_dim, kd = key_dim(p->m), first = (long)block * LANES;
    for (long k = 0; k < kd; k += LANES) {
        v16 rows[16] = {};
        if (k < d) memcpy(rows, y + k * LANES, sizeof rows);
        transpose(rows);
        for (long lane = 0; lane < LANES; lane++)
            store_narrow(query_row(p, first + lane, head) + k, rows[lane]);
    }
}

static inline long page_of(const struct pass *p, long row) {
    return p->s->tables[p->row_seq[row] * p->s->table_stride + p->row_pos[row] / PAGE];
}

enum { WIDEST_HEAD = 512 };

/* A key lies along the lanes of its page: one PAIR in each row of 16 keys. */
static void place_key(struct pass *p, const struct layer *l, const float *y, int block, long head) {
    const long d = p->m->head_dim, kd = key_dim(p->m);
    elem packed[WIDEST_HEAD * LANES] __attribute__((aligned(64)));
    for (long k = 0; k < d; k += 16) pack_rows(packed + k * LANES, (const v16 *)(y + k * LANES), 16);
    for (long lane = 0, row = (long)block * LANES; lane < LANES && row < p->s->rows; lane++, row++) {
        const long j = p->row_pos[row] % PAGE;
        elem *to = l->keys + (page_of(p, row) * p->m->kv_heads + head) * PAGE * kd +
                   j / LANES * LANES * kd + j % LANES * PAIR;
        const elem *from = packed + lane * PAIR;
        for (long k = 0; k < d / PAIR; k++)
            memcpy(to + k * LANES * PAIR, from + k * LANES * PAIR, PAIR * sizeof(elem));
    }
}

/* A value lies along the rows of its page, 16 dimensions a row, PAIR values interleaved. */
static void place_value(struct pass *p, const struct layer *l, const float *y, int block,
                        long head) {
    const long d = p->m->head_dim, first = (long)block * LANES;
    for (long k = 0; k < d; k += LANES) {
        v16 rows[16];
        memcpy(rows, y + k * LANES, sizeof rows);
        transpose(rows);
        for (long lane = 0; lane < LANES && first + lane < p->s->rows; lane++) {
            const long row = first + lane, j = p->row_pos[row] % PAGE;
            elem line[16], *to = l->values +
                (page_of(p, row) * p->m->kv_heads + head) * PAGE * d + k * PAGE +
                j / PAIR * LANES * PAIR + j % PAIR;
            store_narrow(line, rows[lane]);
            for (long c = 0; c < LANES; c++) to[c * PAIR] = line[c];
        }
    }
}

/* Head norms, rotary positions; queries to rows, keys and values to their pages. */
static void place_heads(struct pass *p, const struct layer *l, struct phase *f) {
    const struct model *m = p->m;
    const long d = m->head_dim, all = m->heads + 2 * m->kv_heads;
    const float scale = 1.44269504f / sqrtf((float)d); /* softmax by powers of two */
    const int total = p->blocks * (int)all;
    EACH(i, f, total) {
        const int block = i / all;
        const long head = i % all;
        float *y = p->y + ((long)block * all + head) * d * LANES;
        const float *cos = p->cos + block * d / 2 * LANES, *sin = p->sin + block * d / 2 * LANES;
        if (head < m->heads) {
            if (l->q_norm) norm_head(y, l->q_norm, d, m->eps);
            rotate(y, cos, sin, d, scale);
            place_query(p, y, block, head);
        } else if (head < m->heads + m->kv_heads) {
            if (l->k_norm) norm_head(y, l->k_norm, d, m->eps);
            rotate(y, cos, sin, d, 1.0f);
            place_key(p, l, y, block, head - m->heads);
        } else {
            place_value(p, l, y, block, head - m->heads - m->kv_heads);
        }
    }
    wait_for(f, total);
}

/* ------------------------------------------------------------------ attention */

static inline void fetch(const elem *from, long elements) {
    for (long b = 0; b < elements * (long)sizeof(elem); b += 64)
        __builtin_prefetch((const char *)from + b, 0, 3);
}

/* One row's scores for positions low to high (counted from its first page) become weights,
 * zero outside; returns 1 / their sum. ``size``: a whole number of pages. */
static inline float soften(float *scores, elem *weights, long low, long high, long size) {
    const i16 count = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const v16 nothing = splat(-1e30f);
    const long from = low / LANES * LANES, to = high / LANES * LANES;
    v16 *first = (v16 *)(scores + from), *last = (v16 *)(scores + to);
    *first = pick_lanes(count + (int32_t)from >= (i16){} + (int32_t)low, *first, nothing);
    *last = pick_lanes(count + (int32_t)to <= (i16){} + (int32_t)high, *last, nothing);
    v16 top = nothing, sum = {};
    for (long j = from; j <= to; j += LANES) {
        v16 here = *(v16 *)(scores + j);
        top = pick_lanes(here > top, here, top);
    }
    float most = top[0], total = 0;
    for (int j = 1; j < LANES; j++) most = top[j] > most ? top[j] : most;
    for (long j = 0; j < from; j += LANES) store_narrow(weights + j, (v16){});
    for (long j = from; j <= to; j += LANES) {
        v16 weight = exp2v(*(v16 *)(scores + j) - most);
        sum += weight;
        store_narrow(weights + j, weight);
    }
    for (long j = to + LANES; j < size; j += LANES) store_narrow(weights + j, (v16){});
    for (int j = 0; j < LANES; j++) total += sum[j];
    return 1.0f / total;
}

/* Scores of up to 16 (token, head) rows against all their keys, softmax, weighted values.
 * Rows beyond the item's hold whatever lies there; nobody reads what comes of them. */
static void attend(struct pass *p, const struct layer *l, const struct item *it, int me) {
    const struct model *m = p->m;
    const long d = m->head_dim, kd = key_dim(m), stride = p->scores_stride;
    const long first_row = p->s->starts[it->seq] + it->token;
    const long begin = p->row_pos[first_row], end = begin + it->tokens; /* positions */
    const long oldest = l->window && begin - l->window + 1 > 0 ? begin - l->window + 1 : 0;
    const long page0 = oldest / PAGE, pages = (end + PAGE - 1) / PAGE - page0;
    const long key_page = PAGE * kd, value_page = PAGE * d;
    const int32_t *table = p->s->tables + it->seq * p->s->table_stride + page0;
    const elem *all_keys = l->keys + it->kv_head * key_page;
    const elem *all_values = l->values + it->kv_head * value_page;
    const int rows = it->tokens * it->heads;
    const elem *queries = query_row(p, first_row, it->head);
    char *own = p->own + me * p->own_size;
    float *scores = (float *)own, inverse[16];
    elem *weights = (elem *)(own + 16 * stride * sizeof(float));
    float *out = (float *)(weights + 16 * stride);
    TILES
    for (long g = 0; g < pages; g++) {
        const elem *keys = all_keys + table[g] * m->kv_heads * key_page;
        if (it->tokens == 1) { /* prompts find them in the cache */
            if (g + 1 < pages) fetch(all_keys + table[g + 1] * m->kv_heads * key_page, key_page);
            fetch(all_values + table[g] * m->kv_heads * value_page, value_page);
        }
        TZERO(0); TZERO(1);
        for (long k = 0; k < kd; k += KSTEP) {
            TLOAD(4, queries + k, kd * sizeof(elem));
            TLOAD(6, keys + k * LANES, 64);
            TDP(0, 4, 6);
            TLOAD(7, keys + LANES * kd + k * LANES, 64);
            TDP(1, 4, 7);
        }
        TSTORE(0, scores + g * PAGE, stride * sizeof(float));
        TSTORE(1, scores + g * PAGE + LANES, stride * sizeof(float));
    }
    for (int r = 0; r < rows; r++) {
        const long position = begin + r / it->heads - page0 * PAGE; /* counted from page0 */
        const long low = l->window && position >= l->window ? position - l->window + 1 : 0;
        inverse[r] = soften(scores + r * stride, weights + r * stride, low, position, pages * PAGE);
    }
    for (long d0 = 0; d0 < d; d0 += 2 * LANES) {
        const int both = d0 + LANES < d;
        TZERO(0); TZERO(1);
        for (long g = 0; g < pages; g++) {
            const elem *values = all_values + table[g] * m->kv_heads * value_page + d0 * PAGE;
            for (long j = 0; j < PAGE; j += KSTEP) {
                TLOAD(4, weights + g * PAGE + j, stride * sizeof(elem));
                TLOAD(6, values + j * LANES, 64);
                TDP(0, 4, 6);
                if (both) {
                    TLOAD(7, values + PAGE * LANES + j * LANES, 64);
                    TDP(1, 4, 7);
                }
            }
        }
        TSTORE(0, out + d0, d * sizeof(float));
        if (both) TSTORE(1, out + d0 + LANES, d * sizeof(float));
    }
    for (int r = 0; r < rows; r++) {
        const long row = first_row + r / it->heads, head = it->head + r % it->heads;
        elem *to = p->x + (row / LANES * m->heads + head) * d * LANES + row % LANES * PAIR;
        elem line[WIDEST_HEAD] __attribute__((aligned(64)));
        for (long k = 0; k < d; k += LANES)
            store_narrow(line + k, *(v16 *)(out + r * d + k) * inverse[r]);
        for (long k = 0; k < d; k += PAIR) memcpy(to + k * LANES, line + k, PAIR * sizeof(elem));
    }
}

/* ------------------------------------------------------------------ the pass */

static void embed_block(struct pass *p, int block) {
    const long n = p->m->hidden;
    float *h = p->h + block * n * LANES;
    for (long lane = 0, row = (long)block * LANES; lane < LANES; lane++, row++) {
        const elem *from = row < p->s->rows ? p->m->embed + p->s->tokens[row] * n : NULL;
        for (long k = 0; k < n; k++) h[k * LANES + lane] = from ? wide(from[k]) : 0.0f;
    }
    const long half = p->m->head_dim / 2;
    for (long k = 0; k < half; k++)
        for (long lane = 0; lane < LANES; lane++) {
            long row = (long)block * LANES + lane;
            float angle = row < p->s->rows ? (float)p->row_pos[row] * p->m->inverse[k] : 0.0f;
            p->cos[(block * half + k) * LANES + lane] = cosf(angle);
            p->sin[(block * half + k) * LANES + lane] = sinf(angle);
        }
}

static void take_last(struct pass *p, int block) {
    const long n = p->m->hidden;
    float *to = p->last + block * n * LANES;
    for (long lane = 0, at = (long)block * LANES; lane < LANES; lane++, at++) {
        if (at >= p->s->logit_rows) {
            for (long k = 0; k < n; k++) to[k * LANES + lane] = 0.0f;
            continue;
        }
        const long row = p->s->logit_row[at];
        const float *h = p->h + row / LANES * n * LANES + row % LANES;
        for (long k = 0; k < n; k++) to[k * LANES + lane] = h[k * LANES];
    }
    norm_block(to, p->m->norm, p->head_x + block * n * LANES, n, p->m->eps);
}

static void norm_blocks(struct pass *p, const elem *weight, struct phase *f) {
    const long n = p->m->hidden * LANES;
    EACH(b, f, p->blocks)
        norm_block(p->h + b * n, weight, p->x + b * n, p->m->hidden, p->m->eps);
    wait_for(f, p->blocks);
}

enum { PHASES = 12 }; /* a layer */

static void run_layer(struct pass *p, int i, struct phase *f, int me) {
    const struct model *m = p->m;
    const struct layer *l = &m->layer[i];
    const long q = m->heads * m->head_dim, kv = m->kv_heads * m->head_dim;
    const struct sub qkv[] = {{0, q, Q}, {q, kv, K}, {q + kv, kv, V}};
    const struct sub o[] = {{0, m->hidden, O}}, down[] = {{0, m->hidden, DOWN}};
    const struct sub both[] = {{0, m->inter, GATE}, {m->inter, m->inter, UP}};
    const struct gemm products[] = {
        {l->qkv, p->x, q + 2 * kv, m->hidden, qkv, 3, i},
        {l->o, p->x, m->hidden, q, o, 1, i},
        {l->gate_up, p->x, 2 * m->inter, m->hidden, both, 2, i},
        {l->down, p->wide_x, m->hidden, m->inter, down, 1, i},
    };
    norm_blocks(p, l->norm1, f);
    if (p->pairs) lora_inputs(p, &products[0], f + 1);
    multiply(p, &products[0], f + 2, me, p->blocks, LANES, store_qkv);
    place_heads(p, l, f + 3);
    EACH(t, f + 4, p->items) {
        const int next = t + (int)m->threads;
        if (next < p->items && p->item[next].tokens == 1) {
            const struct item *it = &p->item[next];
            const long page = p->s->tables[it->seq * p->s->table_stride], size = PAGE * key_dim(m);
            fetch(l->keys + (page * m->kv_heads + it->kv_head) * size, size);
        }
        attend(p, l, &p->item[t], me);
    }
    wait_for(f + 4, p->items);
    if (p->pairs) lora_inputs(p, &products[1], f + 5);
    multiply(p, &products[1], f + 6, me, p->blocks, LANES, add_residual);
    norm_blocks(p, l->norm2, f + 7);
    if (p->pairs) lora_inputs(p, &products[2], f + 8);
    multiply(p, &products[2], f + 9, me, p->blocks, m->inter, gated);
    if (p->pairs) lora_inputs(p, &products[3], f + 10);
    multiply(p, &products[3], f + 11, me, p->blocks, LANES, add_residual);
}

static void run(void *job, int me) {
    struct pass *p = job;
    const struct model *m = p->m;
    struct phase *f = p->phase;
    tiles_begin();
    EACH(b, f, p->blocks) embed_block(p, b);
    wait_for(f, p->blocks);
    f++;
    for (int i = 0; i < m->layers; i++, f += PHASES) run_layer(p, i, f, me);
    EACH(b, f, p->logit_blocks) take_last(p, b);
    wait_for(f, p->logit_blocks);
    const struct gemm head = {m->head, p->head_x, m->vocab, m->hidden, NULL, 0, 0};
    multiply(p, &head, f + 1, me, p->logit_blocks, LANES, pick);
    tiles_end();
}

/* Which adapters have rows in which block; rows of one adapter lie together. */
static void find_pairs(struct pass *p) {
    long rank = 0;
    p->pairs = 0;
    for (int b = 0; b < p->blocks; b++) {
        p->first_pair[b] = p->pairs;
        for (long lane = 0, row = (long)b * LANES; lane < LANES && row < p->s->rows; lane++, row++) {
            const int adapter = p->s->adapter[p->row_seq[row]];
            if (adapter < 0) continue;
            int i = p->first_pair[b];
            while (i < p->pairs && p->pair[i].adapter != adapter) i++;
            if (i == p->pairs) p->pair[p->pairs++] = (struct pair){adapter, b, 0};
            p->pair[i].mask |= 1u << lane;
        }
    }
    p->first_pair[p->blocks] = p->pairs;
    for (int i = 0; i < p->pairs; i++)
        for (long j = 0; j < p->m->layers * MODULES; j++) {
            const long r = p->s->loras[p->pair[i].adapter][j].rank;
            if (r > rank) rank = r;
        }
    p->zs = (int)(round_up(rank, KSTEP) * LANES);
}

static void find_items(struct pass *p) {
    const struct model *m = p->m;
    const int group = (int)(m->heads / m->kv_heads), heads = group < 16 ? group : 16;
    const int tokens = 16 / heads;
    p->items = 0;
    for (int s = 0; s < p->s->seqs; s++) {
        const int rows = p->s->starts[s + 1] - p->s->starts[s];
        for (int r = 0; r < rows; r++) {
            p->row_seq[p->s->starts[s] + r] = s;
            p->row_pos[p->s->starts[s] + r] = p->s->begins[s] + r;
        }
        for (int t = 0; t < rows; t += tokens)
            for (int h = 0; h < m->heads;) {
                const int left = group - h % group, take_ = left < heads ? left : heads;
                p->item[p->items++] = (struct item){
                    s, t, rows - t < tokens ? rows - t : tokens, h / group, h, take_};
                h += take_;
            }
    }
}

/* Cuts the scratch memory; with base NULL only counts. */
#define CUT(field, count) \
    (p->field = (void *)(base + at), at = (size_t)round_up((long)(at + (count) * sizeof *p->field), 64))
static size_t lay_out(struct pass *p, char *base) {
    const struct model *m = p->m;
    const long rows = (long)p->blocks * LANES, width = m->hidden, all = m->heads + 2 * m->kv_heads;
    const long q = m->heads * m->head_dim, kd = key_dim(m), t = m->threads;
    const long head_rows = (long)p->logit_blocks * LANES;
    size_t at = 0;
    CUT(h, rows * width);
    CUT(y, rows * all * m->head_dim);
    CUT(cos, rows * m->head_dim / 2);
    CUT(sin, rows * m->head_dim / 2);
    CUT(last, head_rows * width);
    CUT(head_x, head_rows * width);
    CUT(x, rows * (width > q ? width : q));
    CUT(wide_x, rows * m->inter);
    CUT(q, (rows * m->heads + 16) * kd); /* a tile may read past the last rows */
    CUT(pair, rows);
    CUT(first_pair, p->blocks + 1);
    CUT(item, rows * m->heads);
    CUT(row_seq, rows);
    CUT(row_pos, rows);
    CUT(best_value, t * head_rows);
    CUT(best_token, t * head_rows);
    CUT(phase, m->layers * PHASES + 3);
    p->scores_stride = p->s->table_stride * PAGE + LANES;
    p->own_size = round_up(16 * p->scores_stride * (long)(sizeof(float) + sizeof(elem)) +
                           16 * m->head_dim * (long)sizeof(float),
                           4096);
    CUT(own, t * p->own_size);
    CUT(z, (long)p->pairs * 3 * p->zs);
    return at;
}

static int reserve(struct scratch *s, size_t size) {
    if (size <= s->size) return 0;
    free(s->memory);
    s->size = 0;
    s->memory = aligned_alloc(4096, (size_t)round_up((long)size, 4096));
    if (!s->memory) return -1;
    memset(s->memory, 0, size);
    s->size = size;
    return 0;
}

void scratch_free(struct scratch *s) {
    free(s->memory);
    s->memory = NULL;
    s->size = 0;
    pool_free(s->pool);
    s->pool = NULL;
}

/* Computes a step. 0, or -1 when memory is short. */
int forward(const struct model *m, const struct step *s) {
    struct pass pass = {.m = m, .s = s}, *p = &pass;
    p->blocks = (int)((s->rows + LANES - 1) / LANES);
    p->logit_blocks = (int)((s->logit_rows + LANES - 1) / LANES);
    /* Twice: the lists that say how many pairs there are lie before what depends on them. */
    if (reserve(m->scratch, lay_out(p, NULL))) return -1;
    lay_out(p, m->scratch->memory);
    find_items(p);
    find_pairs(p);
    if (p->pairs) {
        const int pairs = p->pairs, zs = p->zs;
        if (reserve(m->scratch, lay_out(p, NULL))) return -1;
        lay_out(p, m->scratch->memory);
        find_items(p);
        find_pairs(p);
        if (pairs != p->pairs || zs != p->zs) return -1;
    }
    const long places = (long)p->logit_blocks * LANES;
    for (long i = 0; i < places * m->threads; i++) {
        p->best_value[i] = -INFINITY;
        p->best_token[i] = 0;
    }
    memset(p->phase, 0, sizeof *p->phase * (m->layers * PHASES + 3));
    if (!m->scratch->pool) m->scratch->pool = pool_new((int)m->threads, run);
    if (!m->scratch->pool) return -1;
    pool_run(m->scratch->pool, p);
    for (long i = 0; i < s->logit_rows; i++) {
        float most = -INFINITY;
        for (long t = 0; t < m->threads; t++) {
            const float value = p->best_value[t * places + i];
            const int32_t token = p->best_token[t * places + i];
            if (value > most || (value == most && token < s->best[i])) {
                most = value;
                s->best[i] = token;
            }
        }
    }
    return 0;
}
