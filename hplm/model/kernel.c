/* Attention inside packed texts, and the rounding of tokens to 8 bits. kernel.py calls them.
 *
 * The numbers of a text, or of a row, do not depend on its neighbours.
 */

#include <math.h>

#define VERSION 2 /* of these functions, as in kernel.py */
#include "kernel.h"

/* As in eightbit.py: */
#define LEVELS 127
#define ROUNDING (1.5f * (1 << 23) + 128)
#define LEAST 1e-30f
#define ROWS 16 /* that a thread takes at once */

typedef struct {
    const float *x;
    int64_t inputs, stride;
    uint8_t *numbers; /* rows x inputs */
    float *scales;    /* of each row */
} Rounding;

/* The largest number is found among the bits without the sign, where a NaN is larger than all numbers. */
#define ROUND(NAME, TARGET)                                                                                           \
    TARGET static void NAME##_row(const float *restrict x, int64_t inputs, uint8_t *restrict numbers, float *scale) { \
        int32_t most = 0;                                                                                             \
        float largest;                                                                                                \
        for (int64_t i = 0; i < inputs; i++) {                                                                        \
            int32_t bits;                                                                                             \
            memcpy(&bits, x + i, 4);                                                                                  \
            bits &= 0x7FFFFFFF;                                                                                       \
            most = bits > most ? bits : most;                                                                         \
        }                                                                                                             \
        memcpy(&largest, &most, 4);                                                                                   \
        if (largest < LEAST) largest = LEAST;                                                                         \
        float by = LEVELS / largest;                                                                                  \
        for (int64_t i = 0; i < inputs; i++) {                                                                        \
            float rounded = ROUNDING + x[i] * by;                                                                     \
            uint32_t bits;                                                                                            \
            memcpy(&bits, &rounded, 4);                                                                               \
            numbers[i] = (uint8_t)bits;                                                                               \
        }                                                                                                             \
        *scale = largest / LEVELS;                                                                                    \
    }                                                                                                                 \
    TARGET static void NAME(const void *given, int64_t row, int64_t end) {                                            \
        const Rounding *r = given;                                                                                    \
        for (; row < end; row++)                                                                                      \
            NAME##_row(r->x + row * r->stride, r->inputs, r->numbers + row * r->inputs, r->scales + row);             \
    }

ROUND(round_rows, )
ROUND(round_rows_avx2, __attribute__((target("avx2"))))
ROUND(round_rows_avx512, __attribute__((target("avx512f,avx512bw,avx512vl,prefer-vector-width=512"))))

API void hplm_round(
    const float *x, int64_t rows, int64_t inputs, int64_t stride, uint8_t *numbers, float *scales, Parallel *parallel,
    int64_t threads
) {
    Rounding rounding = {x, inputs, stride, numbers, scales};
    Task task = {round_rows, &rounding, rows, ROWS, 0};
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) task.compute = round_rows_avx2;
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) task.compute = round_rows_avx512;
    compute_all(task, parallel, threads);
}

#define LANES 16 /* keys are computed in groups of so many */
#define HEADS 4  /* that a thread takes at once */
#define ALIGNED __attribute__((aligned(64)))
#define LOG2_E 1.44269504f
#define LEAST_POWER -127.0f /* it gives 0 */

/* Tokens x (heads * head). A head of keys and values serves `group` heads of queries. */
typedef struct {
    const float *query, *key, *value;
    int64_t query_stride, key_stride, value_stride;
    const int64_t *starts; /* the first token of each text and the end of the last one */
    float *out;            /* like `query`, without gaps */
    int64_t heads, group, head, causal;
} Attention;

/* Returns 2 to the power of a number from LEAST_POWER to 0. A NaN stays one. */
INLINE float power_of_2(float x) {
    uint32_t bits;
    float shifted = x + 12582912.0f, rest = x - (shifted - 12582912.0f), power; /* the whole part is in the last bits */
    float sum = 1.3264713e-3f;
    sum = __builtin_fmaf(sum, rest, 9.671523e-3f);
    sum = __builtin_fmaf(sum, rest, 5.550734e-2f);
    sum = __builtin_fmaf(sum, rest, 2.4022242e-1f);
    sum = __builtin_fmaf(sum, rest, 6.93147e-1f);
    sum = __builtin_fmaf(sum, rest, 1.0f);
    memcpy(&bits, &shifted, 4);
    bits = (bits - 0x4B400000 + 127) << 23;
    memcpy(&power, &bits, 4);
    return sum * power;
}

/* Rows x `inputs` times inputs x two registers of outputs, or one. */
#define PRODUCT(NAME, TARGET, VECTOR, WIDTH, LOAD, STORE, ZERO, FMA, SET1, COUNT, REGISTERS)                                \
    TARGET static void NAME(                                                                                                \
        const float *x, int64_t x_stride, const float *weight, int64_t weight_stride, int64_t inputs, float *out,           \
        int64_t out_stride                                                                                                  \
    ) {                                                                                                                     \
        VECTOR sum[COUNT][REGISTERS];                                                                                       \
        _Pragma("GCC unroll 8") for (int r = 0; r < COUNT; r++)                                                             \
            _Pragma("GCC unroll 2") for (int v = 0; v < REGISTERS; v++) sum[r][v] = ZERO();                                 \
        for (int64_t i = 0; i < inputs; i++, weight += weight_stride) {                                                     \
            VECTOR w[REGISTERS];                                                                                            \
            _Pragma("GCC unroll 2") for (int v = 0; v < REGISTERS; v++) w[v] = LOAD(weight + v * WIDTH);                    \
            _Pragma("GCC unroll 8") for (int r = 0; r < COUNT; r++) {                                                       \
                VECTOR number = SET1(x[r * x_stride + i]);                                                                  \
                _Pragma("GCC unroll 2") for (int v = 0; v < REGISTERS; v++) sum[r][v] = FMA(number, w[v], sum[r][v]);       \
            }                                                                                                               \
        }                                                                                                                   \
        _Pragma("GCC unroll 8") for (int r = 0; r < COUNT; r++)                                                             \
            _Pragma("GCC unroll 2") for (int v = 0; v < REGISTERS; v++) STORE(out + r * out_stride + v * WIDTH, sum[r][v]); \
    }

#define AVX2 __attribute__((target("avx2,fma")))
#define AVX512 __attribute__((target("avx512f,avx512dq,avx512vl,avx512bw,avx2,fma,prefer-vector-width=512")))
#define PRODUCT2(COUNT)                                                                                           \
    PRODUCT(avx2_##COUNT, AVX2, __m256, 8, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_setzero_ps, _mm256_fmadd_ps, \
            _mm256_set1_ps, COUNT, 2)
#define PRODUCT5(COUNT, REGISTERS)                                                                                  \
    PRODUCT(avx512_##COUNT##_##REGISTERS, AVX512, __m512, 16, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_setzero_ps, \
            _mm512_fmadd_ps, _mm512_set1_ps, COUNT, REGISTERS)

PRODUCT2(1) PRODUCT2(2) PRODUCT2(4)
PRODUCT5(1, 1) PRODUCT5(2, 1) PRODUCT5(4, 1) PRODUCT5(8, 1)
PRODUCT5(1, 2) PRODUCT5(2, 2) PRODUCT5(4, 2) PRODUCT5(8, 2)

typedef void Product(const float *, int64_t, const float *, int64_t, int64_t, float *, int64_t);
#define MOST_ROWS 8 /* of a product */
/* Of 1, 2, 4 and 8 rows, for one or two times LANES outputs. */
static Product *const PRODUCTS2[][2] = {{avx2_1}, {avx2_2}, {avx2_4}};
static Product *const PRODUCTS5[][2] = {
    {avx512_1_1, avx512_1_2}, {avx512_2_1, avx512_2_2}, {avx512_4_1, avx512_4_2}, {avx512_8_1, avx512_8_2}};

/* All outputs, which are a multiple of LANES, by products for one or two times LANES outputs; the second may be NULL. */
INLINE void multiply(
    Product *const *products, const float *x, int64_t x_stride, const float *weight, int64_t weight_stride, int64_t inputs,
    float *out, int64_t out_stride, int64_t outputs
) {
    for (int64_t i = 0, step; i < outputs; i += step) {
        step = products[1] && outputs - i >= 2 * LANES ? 2 * LANES : LANES;
        products[step / LANES - 1](x, x_stride, weight + i, weight_stride, inputs, out + i, out_stride);
    }
}

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

/* Turns the first `count` scores of a row into weights, and the others into zeros. Scores are multiples of ln 2. */
#define SOFTEN(NAME, TARGET, VECTOR, WIDTH, LOAD, STORE, SET1, MAX, ADD, SUB, MUL, HIGHEST, TOTAL)                         \
    TARGET static inline void NAME(float *restrict scores, int64_t count, int64_t lanes) {                                 \
        VECTOR tops = SET1(-INFINITY), sums = SET1(0);                                                                     \
        for (int64_t t = count; t < lanes; t++) scores[t] = -INFINITY;                                                     \
        for (int64_t t = 0; t < lanes; t += WIDTH) tops = MAX(LOAD(scores + t), tops); /* a NaN is passed over */          \
        tops = SET1(HIGHEST(tops));                                                                                        \
        for (int64_t t = 0; t < lanes; t += WIDTH) STORE(scores + t, MAX(SET1(LEAST_POWER), SUB(LOAD(scores + t), tops))); \
        for (int64_t t = 0; t < lanes; t++) scores[t] = power_of_2(scores[t]);                                             \
        for (int64_t t = 0; t < lanes; t += WIDTH) sums = ADD(sums, LOAD(scores + t));                                     \
        VECTOR by = SET1(1 / TOTAL(sums));                                                                                 \
        for (int64_t t = 0; t < lanes; t += WIDTH) STORE(scores + t, MUL(LOAD(scores + t), by));                           \
    }

#define FOLD(NAME, STEP, STEP1)                                                                     \
    AVX2 static inline float NAME(__m256 x) {                                                       \
        __m128 half = STEP(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));                 \
        half = STEP(half, _mm_movehl_ps(half, half));                                               \
        return _mm_cvtss_f32(STEP1(half, _mm_shuffle_ps(half, half, 1)));                           \
    }
FOLD(highest, _mm_max_ps, _mm_max_ss) FOLD(total, _mm_add_ps, _mm_add_ss)

SOFTEN(avx2_soften, AVX2, __m256, 8, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_set1_ps, _mm256_max_ps, _mm256_add_ps,
       _mm256_sub_ps, _mm256_mul_ps, highest, total)
SOFTEN(avx512_soften, AVX512, __m512, 16, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_set1_ps, _mm512_max_ps, _mm512_add_ps,
       _mm512_sub_ps, _mm512_mul_ps, _mm512_reduce_max_ps, _mm512_reduce_add_ps)

/* What is computed with one set of instructions. */
typedef struct {
    Product *const (*products)[2];
    int sizes; /* of them: 1, 2, 4 rows ... */
    void (*soften)(float *, int64_t, int64_t);
} Set;

static const Set SET2 = {PRODUCTS2, 3, avx2_soften}, SET5 = {PRODUCTS5, 4, avx512_soften};

/* One head of one text, a block of rows after the other. */
INLINE void attend_text(const Attention *a, int64_t start, int64_t length, int64_t head, const Set *set) {
    int64_t lanes = (length + LANES - 1) / LANES * LANES, width = a->heads * a->head, at = head / a->group * a->head;
    int64_t stride = lanes | LANES; /* odd in cache lines, so that rows do not compete for places in the cache */
    float keys[a->head * stride] ALIGNED, scores[MOST_ROWS * stride] ALIGNED;
    const float *query = a->query + start * a->query_stride + head * a->head, *value = a->value + start * a->value_stride + at;
    float *out = a->out + start * width + head * a->head;
    float scale = LOG2_E / sqrtf((float)a->head);
    transpose(a->key + start * a->key_stride + at, a->key_stride, length, a->head, scale, keys, lanes, stride);
    for (int64_t row = 0, size, rows; row < length; row += rows) {
        for (size = set->sizes - 1; 1 << size > length - row;) size--;
        rows = 1 << size;
        int64_t seen = a->causal ? row + rows : length, own = (seen + LANES - 1) / LANES * LANES;
        Product *const *products = set->products[size];
        multiply(products, query + row * a->query_stride, a->query_stride, keys, stride, a->head, scores, stride, own);
        for (int64_t r = 0; r < rows; r++) set->soften(scores + r * stride, a->causal ? row + r + 1 : length, own);
        multiply(products, scores, stride, value, a->value_stride, seen, out + row * width, width, a->head);
    }
}

#define ATTEND(NAME, TARGET, SET)                                                                   \
    TARGET static void NAME(const void *given, int64_t next, int64_t end) {                         \
        const Attention *a = given;                                                                 \
        for (; next < end; next++) {                                                                \
            const int64_t *starts = a->starts + next / a->heads;                                    \
            attend_text(a, starts[0], starts[1] - starts[0], next % a->heads, &SET);                \
        }                                                                                           \
    }

ATTEND(attend_avx2, AVX2, SET2)
ATTEND(attend_avx512, AVX512, SET5)

/* A head has a multiple of LANES numbers. */
API void hplm_attend(const Attention *attention, int64_t texts, int64_t instructions, Parallel *parallel, int64_t threads) {
    Task task = {instructions == 2 ? attend_avx512 : attend_avx2, attention, texts * attention->heads, HEADS, 0};
    compute_all(task, parallel, threads);
}
