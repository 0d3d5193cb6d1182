/* Rows of keys and values that lie in pages: where they are, and fetching them before their time. */
#ifndef BATCHMLA_PAGED_H
#define BATCHMLA_PAGED_H

#include "softmax.h"

/* One kind of key or value rows. Row n of page p: base + (p * page_rows + n) * stride + head * step,
 * all in elements. */
typedef struct {
    const bf16 *base;
    long width, stride, step;
} Lanes;

/* `heads` query heads share a key head; query (token, key head, j) is at
 * q + token * q_stride + (key_head * heads + j) * width; results likewise. */
typedef struct {
    const bf16 *q;
    bf16 *out;
    long q_stride, out_stride, heads, key_heads, page_rows, table_width, sequences;
    const int64_t *table;      /* [S, table_width] pages */
    const int64_t *table_row;  /* of each sequence */
    const int64_t *first_row;  /* its first token */
    const int64_t *num_queries, *num_keys;
    Lanes key, tail, value;    /* a key is `key` followed by `tail`, which may be empty */
    float scale;
    /* Sequences of one query whose first pages are the same are members of a cluster: */
    long clusters;
    const int64_t *cluster_end;  /* after its last member; the first cluster begins at 0 */
    const int64_t *cluster_keys; /* that all members share, a multiple of 128 */
    const int64_t *member;       /* sequences, cluster by cluster */
    const int64_t *place;        /* [S] among the members, or -1 */
    const int64_t *shared;       /* [S] the cluster's keys, or 0 */
} Job;

enum { ALONE = -1 };

/* Up to 32 rows (query, j) from `row` on of a sequence, from its first key that is not shared; or
 * of the members (member, j) of `cluster`, over the keys that they share. */
typedef struct {
    long sequence, key_head, row, cluster;
} Unit;

static inline long first_member(const Job *job, long cluster) {
    return cluster ? job->cluster_end[cluster - 1] : 0;
}

/* Row of the unit's queries and results, of all tokens. */
static inline long token_of(const Job *job, Unit unit, long row) {
    const long query = (unit.row + row) / job->heads;
    if (unit.cluster == ALONE) return job->first_row[unit.sequence] + query;
    return job->first_row[job->member[first_member(job, unit.cluster) + query]];
}

static inline long first_key(const Job *job, Unit unit) {
    return unit.cluster == ALONE ? job->shared[unit.sequence] : 0;
}

static inline const bf16 *row_at(const Job *job, const Lanes *lanes, const int64_t *pages, long position,
                          long key_head) {
    long row = pages[position / job->page_rows] * job->page_rows + position % job->page_rows;
    return lanes->base + row * lanes->stride + key_head * lanes->step;
}

/* What a block will read is asked for while the one before it is computed, a few lines at a time:
 * a core keeps only some under way. A position has its key, and its value where that lies elsewhere.
 */
typedef struct {
    const Job *job;
    const int64_t *pages;
    long position, end, key_head, parts, left; /* rows of the page */
    const char *row[2];
} Ahead;

static inline const Lanes *ahead_lanes(const Ahead *ahead, long part) {
    return part ? &ahead->job->value : &ahead->job->key;
}

static inline void ahead_page(Ahead *ahead) {
    ahead->left = ahead->job->page_rows - ahead->position % ahead->job->page_rows;
    for (long part = 0; part < ahead->parts; part++)
        ahead->row[part] = (const char *)row_at(ahead->job, ahead_lanes(ahead, part), ahead->pages,
                                                ahead->position, ahead->key_head);
}

/* Up to 128 keys of `unit` from `position` on. */
static inline Ahead look_ahead(const Job *job, Unit unit, long position) {
    long end = unit.cluster == ALONE ? job->num_keys[unit.sequence] : job->cluster_keys[unit.cluster];
    Ahead ahead = {.job = job,
                   .pages = job->table + job->table_row[unit.sequence] * job->table_width,
                   .position = position,
                   .end = end < position + BLOCK ? end : position + BLOCK,
                   .key_head = unit.key_head,
                   .parts = job->value.base == job->key.base ? 1 : 2};
    if (position < end) ahead_page(&ahead);
    return ahead;
}

static inline void ahead_row(Ahead *ahead) {
    ahead->position++;
    if (--ahead->left)
        for (long part = 0; part < ahead->parts; part++)
            ahead->row[part] += 2 * ahead_lanes(ahead, part)->stride;
    else if (ahead->position < ahead->end)
        ahead_page(ahead);
}

/* Rows of about so many lines. */
static inline void fetch(Ahead *ahead, long lines) {
    while (lines > 0 && ahead->position < ahead->end) {
        for (long part = 0; part < ahead->parts; part++) {
            const long bytes = 2 * ahead_lanes(ahead, part)->width;
            lines -= bytes / 64;
            for (long at = 0; at < bytes; at += 64)
                /* not the builtin: gcc takes a function that does nothing else for one without
                 * effect */
                __asm__ volatile("prefetcht1 %0" ::"m"(ahead->row[part][at]));
        }
        ahead_row(ahead);
    }
}

/* The key rows of a tile from `position` on, in a row each `*stride` elements; where they lie in
 * several pages, gathered into `room`. */
static inline const bf16 *key_tile(const Job *job, const Lanes *lanes, Unit unit, const int64_t *pages,
                            long position, bf16 *room, long *stride) {
    *stride = lanes->stride;
    if (job->page_rows % TILE == 0) return row_at(job, lanes, pages, position, unit.key_head);
    *stride = lanes->width;
    for (long n = 0; n < TILE && position + n < job->num_keys[unit.sequence]; n++)
        memcpy(room + n * lanes->width, row_at(job, lanes, pages, position + n, unit.key_head),
               2 * (size_t)lanes->width);
    return room;
}

#endif
