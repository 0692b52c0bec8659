/* Attention over the pages of each sequence, up to its own length. */
#pragma once
#include "heads.h"

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
        for (long k = 0; k < kd; k += RUN(kd)) {
            TLOAD(4, queries + k, kd * sizeof(elem));
            TLOAD(6, keys + k * LANES, 64);
            TDP_RUN(0, 4, 6, rows, kd);
            TLOAD(7, keys + LANES * kd + k * LANES, 64);
            TDP_RUN(1, 4, 7, rows, kd);
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
            for (long j = 0; j < PAGE; j += RUN(PAGE)) {
                TLOAD(4, weights + g * PAGE + j, stride * sizeof(elem));
                TLOAD(6, values + j * LANES, 64);
                TDP_RUN(0, 4, 6, rows, PAGE);
                if (both) {
                    TLOAD(7, values + PAGE * LANES + j * LANES, 64);
                    TDP_RUN(1, 4, 7, rows, PAGE);
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
