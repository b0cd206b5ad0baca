/* Attention of single tokens over the keys and values of their sequences, in blocks that are read where they lie.
 * attention.py calls it. The numbers of a token do not depend on the other tokens of the call.
 */

#ifndef WIDTH
#include "../model/kernel.h"

#define AT_ONCE 128 /* tokens that are seen at once: their scores stay in the cache */
#define LANES 16

/* Tokens and widths are of float. A KV head serves `group` heads of the query. A head has a multiple of 16 numbers. */
typedef struct {
    How how;
    const float *query;         /* tokens x (KV heads * group * head) */
    const float *keys, *values; /* places x (KV heads * head) */
    const int32_t *table;       /* tokens x most: the numbers of the blocks of each sequence, in the order of its tokens */
    const int64_t *lengths;     /* how many keys each token sees, one at least */
    float *out;                 /* like `query`, without gaps */
    int64_t query_stride, stride, tokens, kv_heads, group, head, most, block;
    float scale; /* of scores */
} Cached;

/* Returns 2 to the power of a number that is not above 0. A NaN stays one. */
INLINE float weight_of(float x) { return power_of_2(x < LEAST_POWER ? LEAST_POWER : x); }

#define WIDTH 8
#include "kernel.c"
#undef WIDTH
#define WIDTH 16
#include "kernel.c"
#undef WIDTH

API void hplm_attend_cached(const Cached *c) {
    compute_all(&c->how, c->how.instructions == 2 ? attend_tokens_16 : attend_tokens_8, c, c->tokens * c->kv_heads, 1);
}

#else

/* Heads of a query that share a KV head. Blocks of keys are added one after the other, with the highest score until then. */
TARGET INLINE void AT(attend_heads)(
    const Cached *c, const float *query, const float *keys, const float *values, const int32_t *blocks, int64_t length,
    float *out, const int heads
) {
    float scores[4][AT_ONCE], most[4], sums[4], scale = c->scale * LOG2_E;
    int64_t head = c->head, stride = c->stride, block = c->block;
    for (int h = 0; h < heads; h++) most[h] = -1e38f, sums[h] = 0;
    memset(out, 0, sizeof(float) * (size_t)(heads * head));
    for (int64_t start = 0, count; start < length; start += count) {
        int64_t first = start % block, at = (blocks[start / block] * block + first) * stride;
        count = block - first < AT_ONCE ? block - first : AT_ONCE;
        count = length - start < count ? length - start : count;
        for (int64_t t = 0; t < count; t++) {
            VECTOR sum[4];
            UNROLL for (int h = 0; h < heads; h++) sum[h] = OP(setzero)();
            for (int64_t i = 0; i < head; i += WIDTH) {
                VECTOR key = OP(loadu)(keys + at + t * stride + i);
                UNROLL for (int h = 0; h < heads; h++) sum[h] = OP(fmadd)(OP(loadu)(query + h * head + i), key, sum[h]);
            }
            UNROLL for (int h = 0; h < heads; h++) scores[h][t] = AT(total)(sum[h]) * scale;
        }
        int64_t whole = (count + LANES - 1) / LANES * LANES;
        for (int h = 0; h < heads; h++) {
            float top = most[h], lanes[LANES] = {0}, total = 0, *own = scores[h];
            for (int64_t t = 0; t < count; t++) top = own[t] > top ? own[t] : top;
            for (int64_t t = 0; t < count; t++) own[t] = weight_of(own[t] - top);
            for (int64_t t = count; t < whole; t++) own[t] = 0;
            for (int64_t t = 0; t < whole; t += LANES)
                for (int l = 0; l < LANES; l++) lanes[l] += own[t + l];
            for (int l = 0; l < LANES; l++) total += lanes[l];
            float before = weight_of(most[h] - top);
            if (start)
                for (int64_t i = 0; i < head; i++) out[h * head + i] *= before;
            sums[h] = sums[h] * before + total;
            most[h] = top;
        }
        for (int64_t i = 0; i < head; i += WIDTH) {
            VECTOR sum[4];
            UNROLL for (int h = 0; h < heads; h++) sum[h] = OP(loadu)(out + h * head + i);
            for (int64_t t = 0; t < count; t++) {
                VECTOR value = OP(loadu)(values + at + t * stride + i);
                UNROLL for (int h = 0; h < heads; h++) sum[h] = OP(fmadd)(OP(set1)(scores[h][t]), value, sum[h]);
            }
            UNROLL for (int h = 0; h < heads; h++) OP(storeu)(out + h * head + i, sum[h]);
        }
    }
    for (int h = 0; h < heads; h++)
        for (int64_t i = 0; i < head; i++) out[h * head + i] /= sums[h];
}

/* KV heads of tokens, with up to four heads of the query at once. */
TARGET static void AT(attend_tokens)(const void *given, int64_t next, int64_t end) {
    const Cached *c = given;
    int64_t width = c->kv_heads * c->group * c->head;
    for (; next < end; next++) {
        int64_t token = next / c->kv_heads, kv_head = next % c->kv_heads;
        const float *keys = c->keys + kv_head * c->head, *values = c->values + kv_head * c->head;
        const int32_t *blocks = c->table + token * c->most;
        for (int64_t first = 0; first < c->group; first += 4) {
            int64_t at = (kv_head * c->group + first) * c->head, length = c->lengths[token];
            const float *query = c->query + token * c->query_stride + at;
            float *out = c->out + token * width + at;
            switch (c->group - first) {
                case 1: AT(attend_heads)(c, query, keys, values, blocks, length, out, 1); break;
                case 2: AT(attend_heads)(c, query, keys, values, blocks, length, out, 2); break;
                case 3: AT(attend_heads)(c, query, keys, values, blocks, length, out, 3); break;
                default: AT(attend_heads)(c, query, keys, values, blocks, length, out, 4);
            }
        }
    }
}
#endif
