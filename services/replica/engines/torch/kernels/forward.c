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
#include "attention.h"

const char *kernel_name(void) { return KERNEL_NAME; }
int kernel_ready(void) { return tiles_allowed(); }

long key_page_elements(const struct model *m) { return PAGE * key_dim(m) * m->kv_heads; }
long value_page_elements(const struct model *m) { return PAGE * m->head_dim * m->kv_heads; }

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
    const long q = m->heads * m->head_dim, kv = m->kv_heads * m->head_dim, rows = p->s->rows;
    const struct sub qkv[] = {{0, q, Q}, {q, kv, K}, {q + kv, kv, V}};
    const struct sub o[] = {{0, m->hidden, O}}, down[] = {{0, m->hidden, DOWN}};
    const struct sub both[] = {{0, m->inter, GATE}, {m->inter, m->inter, UP}};
    const struct gemm products[] = {
        {l->qkv, p->x, q + 2 * kv, m->hidden, rows, qkv, 3, i},
        {l->o, p->x, m->hidden, q, rows, o, 1, i},
        {l->gate_up, p->x, 2 * m->inter, m->hidden, rows, both, 2, i},
        {l->down, p->wide_x, m->hidden, m->inter, rows, down, 1, i},
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
    const struct gemm head = {m->head, p->head_x, m->vocab, m->hidden, p->s->logit_rows, NULL, 0, 0};
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
