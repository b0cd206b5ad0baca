/* Attention of single tokens over the keys and values of their sequences, in blocks that are read where they lie. kernel.py
 * calls it. The numbers of a token do not depend on the other tokens of the call.
 */

#define VERSION 2 /* of these functions, as in kernel.py */
#include "../model/kernel.h"

#define AT_ONCE 128 /* tokens that are seen at once: their scores stay in the cache */
#define LANES 16
#define FEWEST -87.0f /* exp of less is 0 */

/* Tokens and widths are of float. A KV head serves `group` heads of the query. */
typedef struct {
    const float *query; /* tokens x (KV heads * group * head) */
    int64_t query_stride;
    const float *keys, *values; /* places x (KV heads * head) */
    int64_t stride;
    const int32_t *table;   /* tokens x most: the numbers of the blocks of each sequence, in the order of its tokens */
    const int64_t *lengths; /* how many keys each token sees */
    float *out;             /* like `query`, without gaps */
    int64_t tokens, kv_heads, group, head, most, block;
    float scale;
    int64_t instructions;
} Work;

/* exp of a number that is not above 0. A NaN stays one. */
INLINE float exp_of(float x) {
    x = x < FEWEST ? FEWEST : x;
    float shifted = x * 1.44269504f + 12582912.0f, whole = shifted - 12582912.0f;
    float rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    int32_t bits;
    float power;
    memcpy(&bits, &shifted, 4);
    bits = (bits - 0x4B400000 + 127) << 23;
    memcpy(&power, &bits, 4);
    return sum * power;
}

/* G heads of a query that share a KV head. Blocks of keys are added one after the other, with the highest score until then. */
#define ATTEND(NAME, TARGET, VECTOR, WIDTH, LOAD, STORE, ZERO, FMA, SET1, SUM, G)                                             \
    TARGET static void NAME(                                                                                                  \
        const Work *w, const float *query, const float *keys, const float *values, const int32_t *blocks, int64_t length,     \
        float *out                                                                                                            \
    ) {                                                                                                                       \
        float scores[G][AT_ONCE], most[G], sums[G];                                                                           \
        int64_t head = w->head, stride = w->stride, block = w->block;                                                         \
        for (int g = 0; g < G; g++) most[g] = -1e38f, sums[g] = 0;                                                            \
        memset(out, 0, sizeof(float) * (size_t)(G * head));                                                                   \
        for (int64_t start = 0, count; start < length; start += count) {                                                      \
            int64_t first = start % block, at = (blocks[start / block] * block + first) * stride;                             \
            count = block - first < AT_ONCE ? block - first : AT_ONCE;                                                        \
            count = length - start < count ? length - start : count;                                                          \
            for (int64_t t = 0; t < count; t++) {                                                                             \
                VECTOR sum[G];                                                                                                \
                _Pragma("GCC unroll 4") for (int g = 0; g < G; g++) sum[g] = ZERO();                                          \
                for (int64_t i = 0; i < head; i += WIDTH) {                                                                   \
                    VECTOR key = LOAD(keys + at + t * stride + i);                                                            \
                    _Pragma("GCC unroll 4") for (int g = 0; g < G; g++) sum[g] = FMA(LOAD(query + g * head + i), key, sum[g]);\
                }                                                                                                             \
                _Pragma("GCC unroll 4") for (int g = 0; g < G; g++) scores[g][t] = SUM(sum[g]) * w->scale;                    \
            }                                                                                                                 \
            int64_t whole = (count + LANES - 1) / LANES * LANES;                                                              \
            for (int g = 0; g < G; g++) {                                                                                     \
                float top = most[g], lanes[LANES] = {0}, total = 0, *own = scores[g];                                         \
                for (int64_t t = 0; t < count; t++) top = own[t] > top ? own[t] : top;                                        \
                for (int64_t t = 0; t < count; t++) own[t] = exp_of(own[t] - top);                                            \
                for (int64_t t = count; t < whole; t++) own[t] = 0;                                                           \
                for (int64_t t = 0; t < whole; t += LANES)                                                                    \
                    for (int l = 0; l < LANES; l++) lanes[l] += own[t + l];                                                   \
                for (int l = 0; l < LANES; l++) total += lanes[l];                                                            \
                float before = exp_of(most[g] - top);                                                                         \
                if (start)                                                                                                    \
                    for (int64_t i = 0; i < head; i++) out[g * head + i] *= before;                                           \
                sums[g] = sums[g] * before + total;                                                                           \
                most[g] = top;                                                                                                \
            }                                                                                                                 \
            for (int64_t i = 0; i < head; i += WIDTH) {                                                                       \
                VECTOR sum[G];                                                                                                \
                _Pragma("GCC unroll 4") for (int g = 0; g < G; g++) sum[g] = LOAD(out + g * head + i);                        \
                for (int64_t t = 0; t < count; t++) {                                                                         \
                    VECTOR value = LOAD(values + at + t * stride + i);                                                        \
                    _Pragma("GCC unroll 4") for (int g = 0; g < G; g++) sum[g] = FMA(SET1(scores[g][t]), value, sum[g]);      \
                }                                                                                                             \
                _Pragma("GCC unroll 4") for (int g = 0; g < G; g++) STORE(out + g * head + i, sum[g]);                        \
            }                                                                                                                 \
        }                                                                                                                     \
        for (int g = 0; g < G; g++)                                                                                           \
            for (int64_t i = 0; i < head; i++) out[g * head + i] /= sums[g];                                                  \
    }

#define AVX2 __attribute__((target("avx2,fma")))
#define AVX512 __attribute__((target("avx512f,avx512dq,prefer-vector-width=512")))

AVX2 static inline float sum_of(__m256 x) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps(half, half, 1)));
}

#define ATTEND2(G)                                                                                                            \
    ATTEND(avx2_##G, AVX2, __m256, 8, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_setzero_ps, _mm256_fmadd_ps, _mm256_set1_ps,  \
           sum_of, G)
#define ATTEND5(G)                                                                                                            \
    ATTEND(avx512_##G, AVX512, __m512, 16, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_setzero_ps, _mm512_fmadd_ps,             \
           _mm512_set1_ps, _mm512_reduce_add_ps, G)

ATTEND2(1) ATTEND2(2) ATTEND2(3) ATTEND2(4)
ATTEND5(1) ATTEND5(2) ATTEND5(3) ATTEND5(4)

#define MOST 4 /* heads at once */
typedef void Attend(const Work *, const float *, const float *, const float *, const int32_t *, int64_t, float *);
static Attend *const KINDS[2][MOST] = {{avx2_1, avx2_2, avx2_3, avx2_4}, {avx512_1, avx512_2, avx512_3, avx512_4}};

/* KV heads of tokens. */
static void attend_some(const void *given, int64_t next, int64_t end) {
    const Work *w = given;
    Attend *const *kinds = KINDS[w->instructions - 1];
    int64_t width = w->kv_heads * w->group * w->head;
    for (; next < end; next++) {
        int64_t token = next / w->kv_heads, kv_head = next % w->kv_heads;
        const float *keys = w->keys + kv_head * w->head, *values = w->values + kv_head * w->head;
        const int32_t *blocks = w->table + token * w->most;
        for (int64_t first = 0, count; first < w->group; first += count) {
            count = w->group - first < MOST ? w->group - first : MOST;
            int64_t at = (kv_head * w->group + first) * w->head;
            const float *query = w->query + token * w->query_stride + at;
            kinds[count - 1](w, query, keys, values, blocks, w->lengths[token], w->out + token * width + at);
        }
    }
}

/* `sizes`: query stride, stride, tokens, KV heads, group, head, columns of the table, places of a block. A head has a multiple
 * of 16 numbers, and each token sees a key.
 */
API void hplm_attend(
    const float *query, const float *keys, const float *values, const int32_t *table, const int64_t *lengths, float *out,
    const int64_t *sizes, float scale, int64_t instructions, Parallel *parallel, int64_t threads
) {
    Work work = {query, sizes[0], keys, values, sizes[1], table, lengths, out,
                 sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7], scale, instructions};
    compute_all((Task){attend_some, &work, work.tokens * work.kv_heads, 1, 0}, parallel, threads);
}
