/* Norms, rotary positions, and the ways of queries, keys and values to where attention reads. */
#pragma once
#include "product.h"

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
