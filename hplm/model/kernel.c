/* Attention inside packed texts, and the rounding of tokens to 8 bits. attention.py and products.py call them.
 *
 * The numbers of a text, or of a row, do not depend on its neighbours.
 */

#ifndef WIDTH
#include <cpuid.h>
#include <math.h>

#include "kernel.h"

API int64_t hplm_version(void) { return 5; } /* of all functions, as in hplm/compiled.py */

/* Returns the best set of instructions: 0 none, 1 AVX2 with FMA and F16C, 2 AVX-512 with BW, DQ and VL. */
API int64_t hplm_instructions(void) {
    unsigned int a, b, c, d;
    __builtin_cpu_init();
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & (1u << 29))) return 0; /* F16C */
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") ? 2 : 1;
}

/* As in products.py: */
#define LEVELS 127
#define ROUNDING (1.5f * (1 << 23) + 128)
#define LEAST 1e-30f
#define ROWS 16 /* that a thread takes at once */

typedef struct {
    How how;
    const float *x;
    uint8_t *numbers; /* rows x inputs */
    float *scales;    /* of each row */
    int64_t rows, inputs, stride;
} Rounding;

/* The largest number is found among the bits without the sign, where a NaN is larger than all numbers. */
INLINE void round_row(const float *restrict x, int64_t inputs, uint8_t *restrict numbers, float *scale) {
    int32_t most = 0;
    float largest;
    for (int64_t i = 0; i < inputs; i++) {
        int32_t bits;
        memcpy(&bits, x + i, 4);
        bits &= 0x7FFFFFFF;
        most = bits > most ? bits : most;
    }
    memcpy(&largest, &most, 4);
    if (largest < LEAST) largest = LEAST;
    float by = LEVELS / largest;
    for (int64_t i = 0; i < inputs; i++) {
        float rounded = ROUNDING + x[i] * by;
        uint32_t bits;
        memcpy(&bits, &rounded, 4);
        numbers[i] = (uint8_t)bits;
    }
    *scale = largest / LEVELS;
}

#define ROUND(NAME, TARGET)                                                                               \
    TARGET static void NAME(const void *given, int64_t row, int64_t end) {                                \
        const Rounding *r = given;                                                                        \
        for (; row < end; row++)                                                                          \
            round_row(r->x + row * r->stride, r->inputs, r->numbers + row * r->inputs, r->scales + row);  \
    }
ROUND(round_rows, ) ROUND(round_rows_8, TARGET_8) ROUND(round_rows_16, TARGET_16)

API void hplm_round(const Rounding *r) {
    Compute *const kinds[] = {round_rows, round_rows_8, round_rows_16};
    compute_all(&r->how, kinds[r->how.instructions], r, r->rows, ROWS);
}

#define LANES 16 /* keys are computed in groups of so many */
#define HEADS 4  /* that a thread takes at once */
#define MOST_ROWS 8 /* of a text that are computed together */
#define ALIGNED __attribute__((aligned(64)))

/* Tokens x (heads * head). */
typedef struct {
    How how;
    const float *query, *key, *value;
    const int64_t *starts; /* the first token of each text and the end of the last one */
    const int64_t *reads;  /* how many first tokens of each text attend; NULL: all */
    float *out;            /* like `query`, without gaps */
    int64_t query_stride, key_stride, value_stride, texts, heads, head;
} Attention;

/* Writes `tokens` x head as head x lanes, times a scale. Behind the tokens are zeros. */
INLINE void transpose(
    const float *x, int64_t stride, int64_t tokens, int64_t head, float scale, float *out, int64_t lanes, int64_t out_stride
) {
    __m128 by = _mm_set1_ps(scale);
    for (int64_t t = 0; t < lanes; t += 4)
        for (int64_t i = 0; i < head; i += 4) {
            __m128 row[4];
            for (int r = 0; r < 4; r++)
                row[r] = t + r < tokens ? _mm_mul_ps(_mm_loadu_ps(x + (t + r) * stride + i), by) : _mm_setzero_ps();
            _MM_TRANSPOSE4_PS(row[0], row[1], row[2], row[3]);
            for (int r = 0; r < 4; r++) _mm_storeu_ps(out + (i + r) * out_stride + t, row[r]);
        }
}

#define WIDTH 8
#include "kernel.c"
#undef WIDTH
#define WIDTH 16
#include "kernel.c"
#undef WIDTH

/* A head has a multiple of LANES numbers. */
API void hplm_attend(const Attention *a) {
    compute_all(&a->how, a->how.instructions == 2 ? attend_16 : attend_8, a, a->texts * a->heads, HEADS);
}

#else
#include "product.h"

/* Turns the first `count` scores of a row into weights, and the others into zeros. Scores are multiples of ln 2. */
TARGET INLINE void AT(soften)(float *restrict scores, int64_t count, int64_t lanes) {
    VECTOR tops = OP(set1)(-INFINITY), sums = OP(setzero)();
    for (int64_t t = count; t < lanes; t++) scores[t] = -INFINITY;
    for (int64_t t = 0; t < lanes; t += WIDTH) tops = OP(max)(OP(loadu)(scores + t), tops); /* a NaN is passed over */
    tops = OP(set1)(AT(highest)(tops));
    for (int64_t t = 0; t < lanes; t += WIDTH)
        OP(storeu)(scores + t, OP(max)(OP(set1)(LEAST_POWER), OP(sub)(OP(loadu)(scores + t), tops)));
    for (int64_t t = 0; t < lanes; t++) scores[t] = power_of_2(scores[t]);
    for (int64_t t = 0; t < lanes; t += WIDTH) sums = OP(add)(sums, OP(loadu)(scores + t));
    VECTOR by = OP(set1)(1 / AT(total)(sums));
    for (int64_t t = 0; t < lanes; t += WIDTH) OP(storeu)(scores + t, OP(mul)(OP(loadu)(scores + t), by));
}

/* One head of the first tokens of a text, a block of rows after the other. */
TARGET static void AT(attend_text)(const Attention *a, int64_t start, int64_t length, int64_t reads, int64_t head) {
    int64_t lanes = (length + LANES - 1) / LANES * LANES, width = a->heads * a->head, at = head * a->head;
    int64_t stride = lanes | LANES; /* odd in cache lines, so that rows do not compete for places in the cache */
    float keys[a->head * stride] ALIGNED, scores[MOST_ROWS * stride] ALIGNED;
    const float *query = a->query + start * a->query_stride + at, *value = a->value + start * a->value_stride + at;
    float *out = a->out + start * width + at;
    float scale = LOG2_E / sqrtf((float)a->head);
    transpose(a->key + start * a->key_stride + at, a->key_stride, length, a->head, scale, keys, lanes, stride);
    for (int64_t row = 0, rows; row < reads; row += rows) {
        rows = reads - row < MOST_ROWS ? reads - row : MOST_ROWS;
        AT(multiply)((Product){query + row * a->query_stride, a->query_stride, keys, stride, a->head, NULL, scores, stride, 0, 0},
                     rows, lanes);
        for (int64_t r = 0; r < rows; r++) AT(soften)(scores + r * stride, length, lanes);
        AT(multiply)((Product){scores, stride, value, a->value_stride, length, NULL, out + row * width, width, 0, 0},
                     rows, a->head);
    }
}

static void AT(attend)(const void *given, int64_t next, int64_t end) {
    const Attention *a = given;
    for (; next < end; next++) {
        int64_t text = next / a->heads, start = a->starts[text], length = a->starts[text + 1] - start;
        int64_t reads = a->reads && a->reads[text] < length ? a->reads[text] : length;
        AT(attend_text)(a, start, length, reads, next % a->heads);
    }
}
#endif
