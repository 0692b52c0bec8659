/* Threads that share the phases of a pass without waiting for each other's attendance.
 *
 * A phase is a number of items that any thread takes; it is over when all are done, not when all
 * threads have come by: a thread that another process has driven from its core delays only the
 * item it holds. Waiting spins briefly and then sleeps, so that on a busy machine the waiting
 * thread's core is free for the one it waits for.
 */
#pragma once
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

enum { SPINS = 2000, CLOSED = 1 << 30 };

static inline void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

static void sleep_on(atomic_int *word, int value) { /* until it is no longer value, about */
#ifdef __linux__
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
#else
    if (atomic_load(word) == value) sched_yield();
#endif
}

static void wake_all(atomic_int *word) {
#ifdef __linux__
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1 << 20, NULL, NULL, 0);
#else
    (void)word;
#endif
}

struct phase {
    atomic_int next, done, sleepers;
    int unused[13]; /* a cache line of its own */
};

static inline int take(struct phase *f) {
    return atomic_fetch_add_explicit(&f->next, 1, memory_order_relaxed);
}

static inline void item_done(struct phase *f, int total) {
    if (atomic_fetch_add(&f->done, 1) + 1 == total && atomic_load(&f->sleepers)) wake_all(&f->done);
}

static inline void wait_for(struct phase *f, int total) {
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(&f->done, memory_order_acquire) >= total) return;
        pause_briefly();
    }
    atomic_fetch_add(&f->sleepers, 1);
    for (int seen; (seen = atomic_load(&f->done)) < total;) sleep_on(&f->done, seen);
    atomic_fetch_sub(&f->sleepers, 1);
}

/* ``for`` over the items of a phase that this thread gets. */
#define EACH(i, f, total) \
    for (int i; (i = take(f)) < (total); item_done(f, total))

struct pool;
struct worker { struct pool *pool; int number; pthread_t thread; };
struct pool {
    atomic_int generation, gate; /* gate: workers inside, and CLOSED */
    atomic_int stop;
    int workers;
    void (*run)(void *job, int thread);
    void *job;
    struct worker worker[];
};

static void *work(void *argument) {
    struct worker *me = argument;
    struct pool *pool = me->pool;
    int seen = 0;
    for (;;) {
        int spins = 0, now;
        while ((now = atomic_load(&pool->generation)) == seen)
            if (++spins < SPINS * 4) pause_briefly(); else sleep_on(&pool->generation, seen);
        seen = now;
        if (atomic_load(&pool->stop)) return NULL;
        if (!(atomic_fetch_add(&pool->gate, 1) & CLOSED)) pool->run(pool->job, me->number);
        atomic_fetch_sub(&pool->gate, 1);
        wake_all(&pool->gate);
    }
}

static struct pool *pool_new(int threads, void (*run)(void *, int)) {
    struct pool *pool = calloc(1, sizeof *pool + sizeof(struct worker) * (size_t)threads);
    if (!pool) return NULL;
    pool->run = run;
    atomic_store(&pool->gate, CLOSED);
    for (int i = 0; i + 1 < threads; i++) {
        pool->worker[i] = (struct worker){pool, i + 1, 0};
        if (pthread_create(&pool->worker[i].thread, NULL, work, &pool->worker[i])) break;
        pool->workers++;
    }
    return pool;
}

/* Runs the job in this thread and in every worker that comes in time. */
static void pool_run(struct pool *pool, void *job) {
    pool->job = job;
    atomic_fetch_and(&pool->gate, ~CLOSED);
    atomic_fetch_add(&pool->generation, 1);
    if (pool->workers) wake_all(&pool->generation);
    pool->run(job, 0);
    atomic_fetch_or(&pool->gate, CLOSED);
    int spins = 0;
    for (int inside; (inside = atomic_load(&pool->gate)) != CLOSED;)
        if (++spins < SPINS) pause_briefly(); else sleep_on(&pool->gate, inside);
}

static void pool_free(struct pool *pool) {
    if (!pool) return;
    atomic_store(&pool->stop, 1);
    atomic_fetch_add(&pool->generation, 1);
    wake_all(&pool->generation);
    for (int i = 0; i < pool->workers; i++) pthread_join(pool->worker[i].thread, NULL);
    free(pool);
}
