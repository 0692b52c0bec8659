/* What Python describes (model, step) and what the threads of a pass share. */
#pragma once
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
    long rows; /* of x, 16 a block */
    const struct sub *sub;
    int subs;
    int layer;
};

static long round_up(long x, long to) { return (x + to - 1) / to * to; }
static long key_dim(const struct model *m) { return round_up(m->head_dim, KSTEP); }
