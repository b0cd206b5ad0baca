/* Rows times the weights of their slots, attention inside packed texts, and the rounding of tokens to 8 bits. groups.py,
 * attention.py and products.py call them.
 *
 * The numbers of a text, or of a row, do not depend on its neighbours.
 */

#ifndef WIDTH
#include <cpuid.h>
#include <math.h>

#include "kernel.h"

#if __has_include(<avx512bf16intrin.h>) /* older compilers do not know the instructions */
#define BF16
#endif

API int64_t hplm_version(void) { return 7; } /* of all functions, as in hplm/compiled.py */

/* Returns the best set of instructions: 0 none, 1 AVX2 with FMA and F16C, 2 AVX-512 with BW, DQ and VL. */
API int64_t hplm_instructions(void) {
    unsigned int a, b, c, d;
    __builtin_cpu_init();
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & (1u << 29))) return 0; /* F16C */
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") ? 2 : 1;
}

/* Whether `hplm_map` takes bf16. */
API int64_t hplm_has_bf16(void) {
#ifdef BF16
    return hplm_instructions() == 2 && __builtin_cpu_supports("avx512bf16");
#else
    return 0;
#endif
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

#define LANES 16 /* keys are computed in groups of so many */
#define HEADS 4  /* that a thread takes at once */
#define MOST_ROWS 8 /* of a text that are computed together */
#define PIECE 128   /* rows of a text of which no token sees all others, for which keys are transposed together */
#define ALIGNED __attribute__((aligned(64)))

/* Tokens x (heads * head). */
typedef struct {
    How how;
    const float *query, *key, *value;
    const int64_t *starts; /* the first token of each text and the end of the last one */
    const int64_t *reads;  /* how many first tokens of each text attend; NULL: all */
    float *out;            /* like `query`, without gaps */
    int64_t query_stride, key_stride, value_stride, texts, heads, head;
    int64_t group; /* heads of queries that share one of keys and values */
    int64_t near;  /* tokens to each side that a token sees */
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

/* As in groups.py: the inner numbers of a run stay in the cache. */
#define MOST_RANK 256
#define MOST_MAPPED 60 /* a multiple of the rows of a block */

/* Rows in runs of one slot each, and the matrices of all slots, inputs x outputs, with their biases, which may be NULL.
 *
 * A rank before `up` is at most MOST_RANK. Ranks and outputs are multiples of 16, in bf16 inputs of 2. With `down`, `x` may be `out`.
 */
typedef struct {
    How how;
    const void *down, *down_bias; /* NULL: there is only `up` */
    const void *up, *up_bias;
    const int64_t *starts, *slots; /* the first row of each run and the end of the last one; the slot of each */
    const void *x;
    void *out;
    int64_t inputs, rank, outputs; /* `up` has rank x outputs */
    int64_t relu, adds;            /* after `down`; whether the result is added to `out` */
    int64_t bf16;                  /* 0: all numbers have 32 bits */
    int64_t count;                 /* of runs */
    int64_t x_stride, out_stride;  /* from one row to the next */
} Maps;

static int64_t pieces_of(const Maps *maps, int64_t run) {
    return (maps->starts[run + 1] - maps->starts[run] + MOST_MAPPED - 1) / MOST_MAPPED;
}

#define WIDTH 8
#include "kernel.c"
#undef WIDTH
#define WIDTH 16
#include "kernel.c"
#undef WIDTH
#ifdef BF16
#define WIDTH 32
#include "kernel.c"
#undef WIDTH
#else
#define map_pieces_32 map_pieces_16
#endif

API void hplm_round(const Rounding *r) {
    compute_all(&r->how, r->how.instructions == 2 ? round_rows_16 : round_rows_8, r, r->rows, ROWS);
}

/* A head has a multiple of LANES numbers. */
API void hplm_attend(const Attention *a) {
    compute_all(&a->how, a->how.instructions == 2 ? attend_16 : attend_8, a, a->texts * a->heads, HEADS);
}

/* Writes into each row of `out`, or adds to it: up (f (down x + down_bias)) + up_bias, with the maps of the row's slot. */
API void hplm_map(const Maps *maps) {
    How how = maps->how;
    int64_t pieces = 0;
    for (int64_t run = 0; run < maps->count; run++) pieces += pieces_of(maps, run);
    if (pieces < how.threads) how.threads = pieces;
    int64_t at_once = how.threads > 1 ? pieces / (4 * how.threads) : pieces;
    Compute *compute = maps->bf16 ? map_pieces_32 : how.instructions == 2 ? map_pieces_16 : map_pieces_8;
    compute_all(&how, compute, maps, pieces, at_once ? at_once : 1);
}

#else

#if WIDTH < 32
TARGET static void AT(round_rows)(const void *given, int64_t row, int64_t end) {
    const Rounding *r = given;
    for (; row < end; row++) round_row(r->x + row * r->stride, r->inputs, r->numbers + row * r->inputs, r->scales + row);
}
#endif

/* Products. Inputs are added in their order, so the numbers of a row do not depend on its neighbours. */

#if WIDTH == 32 /* bf16: a register of weights has two inputs of each output */
#define NUMBER uint16_t
#define SUMS 16
#define INPUTS 2
TARGET INLINE __m512i wide_32(const uint16_t *x) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)x)); }
TARGET INLINE __m512 load_32(const uint16_t *x) { return (__m512)_mm512_slli_epi32(wide_32(x), 16); }
TARGET INLINE void store_32(uint16_t *x, __m512 y) { _mm256_storeu_si256((void *)x, (__m256i)_mm512_cvtneps_pbh(y)); }
TARGET INLINE __m512 weights_32(const uint16_t *x, int64_t stride) {
    return (__m512)_mm512_or_si512(_mm512_slli_epi32(wide_32(x + stride), 16), wide_32(x));
}
TARGET INLINE __m512 inputs_32(const uint16_t *x) {
    int32_t both;
    memcpy(&both, x, 4);
    return (__m512)_mm512_set1_epi32(both);
}
TARGET INLINE __m512 multiplied_32(__m512 x, __m512 y, __m512 sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)y);
}
#else
#define NUMBER float
#define SUMS WIDTH
#define INPUTS 1
TARGET INLINE VECTOR AT(load)(const float *x) { return OP(loadu)(x); }
TARGET INLINE void AT(store)(float *x, VECTOR y) { OP(storeu)(x, y); }
TARGET INLINE VECTOR AT(weights)(const float *x, int64_t stride) { return OP(loadu)(x); }
TARGET INLINE VECTOR AT(inputs)(const float *x) { return OP(set1)(*x); }
TARGET INLINE VECTOR AT(multiplied)(VECTOR x, VECTOR y, VECTOR sum) { return OP(fmadd)(x, y, sum); }
#endif

#define Product AT(Product)
/* Rows x `inputs` times `inputs` x outputs. `bias` may be NULL. `adds`: to what `out` holds. */
typedef struct {
    const NUMBER *x;
    int64_t x_stride;
    const NUMBER *weight;
    int64_t weight_stride, inputs;
    const NUMBER *bias;
    NUMBER *out;
    int64_t out_stride;
    int adds, relu;
} Product;

/* Some rows and registers of outputs. A NaN stays one. */
TARGET INLINE void AT(block)(const Product p, const int rows, const int registers) {
    VECTOR sum[12][2];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < registers; v++) {
            sum[r][v] = p.adds ? AT(load)(p.out + r * p.out_stride + v * SUMS) : OP(setzero)();
            if (p.bias) sum[r][v] = OP(add)(sum[r][v], AT(load)(p.bias + v * SUMS));
        }
    const NUMBER *weight = p.weight, *x = p.x;
    for (int64_t i = 0; i < p.inputs; i += INPUTS, weight += INPUTS * p.weight_stride, x += INPUTS) {
        VECTOR w[2];
        UNROLL for (int v = 0; v < registers; v++) w[v] = AT(weights)(weight + v * SUMS, p.weight_stride);
        UNROLL for (int r = 0; r < rows; r++) {
            VECTOR own = AT(inputs)(x + r * p.x_stride);
            UNROLL for (int v = 0; v < registers; v++) sum[r][v] = AT(multiplied)(own, w[v], sum[r][v]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < registers; v++)
            AT(store)(p.out + r * p.out_stride + v * SUMS, p.relu ? OP(max)(OP(setzero)(), sum[r][v]) : sum[r][v]);
}

#define BLOCK(ROWS)                                                                   \
    TARGET static void AT(block1_##ROWS)(const Product *p) { AT(block)(*p, ROWS, 1); } \
    TARGET static void AT(block2_##ROWS)(const Product *p) { AT(block)(*p, ROWS, 2); }
#define PAIR(ROWS) {AT(block1_##ROWS), AT(block2_##ROWS)},
#if WIDTH >= 16 /* the rows that the registers have room for */
#define SIZES(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11) DO(12)
#else
#define SIZES(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6)
#endif
SIZES(BLOCK)
static void (*const AT(BLOCKS)[][2])(const Product *) = {SIZES(PAIR)};

/* All rows and outputs, which are a multiple of 16. All outputs of a block of rows follow one another in memory. */
static void AT(multiply)(Product p, int64_t rows, int64_t outputs) {
    const int64_t most = sizeof AT(BLOCKS) / sizeof *AT(BLOCKS), count = (rows + most - 1) / most;
    for (int64_t block = 0, first = 0, end; block < count; block++, first = end) {
        end = count == 1 ? rows : (block + 1) * rows / count;
        Product own = p;
        own.x += first * p.x_stride;
        own.out += first * p.out_stride;
        for (int64_t left = outputs, step; left; left -= step, own.weight += step, own.out += step) {
            step = left >= 2 * SUMS ? 2 * SUMS : SUMS;
            AT(BLOCKS)[end - first - 1][step == 2 * SUMS](&own);
            if (own.bias) own.bias += step;
        }
    }
}
#undef BLOCK
#undef PAIR
#undef SIZES

#if WIDTH < 32
/* Turns scores of a row, from `first` to before `end`, into weights, and the others into zeros. Scores are multiples of ln 2. */
TARGET INLINE void AT(soften)(float *restrict scores, int64_t first, int64_t end, int64_t lanes) {
    VECTOR tops = OP(set1)(-INFINITY), sums = OP(setzero)();
    for (int64_t t = 0; t < first; t++) scores[t] = -INFINITY;
    for (int64_t t = end; t < lanes; t++) scores[t] = -INFINITY;
    for (int64_t t = 0; t < lanes; t += WIDTH) tops = OP(max)(OP(loadu)(scores + t), tops); /* a NaN is passed over */
    tops = OP(set1)(AT(highest)(tops));
    for (int64_t t = 0; t < lanes; t += WIDTH)
        OP(storeu)(scores + t, OP(max)(OP(set1)(LEAST_POWER), OP(sub)(OP(loadu)(scores + t), tops)));
    for (int64_t t = 0; t < lanes; t++) scores[t] = power_of_2(scores[t]);
    for (int64_t t = 0; t < lanes; t += WIDTH) sums = OP(add)(sums, OP(loadu)(scores + t));
    VECTOR by = OP(set1)(1 / AT(total)(sums));
    for (int64_t t = 0; t < lanes; t += WIDTH) OP(storeu)(scores + t, OP(mul)(OP(loadu)(scores + t), by));
}

/* One head of the tokens of a text from `row` to before `end`, a block of rows after the other. Only near keys are seen. */
TARGET static void AT(attend_rows)(const Attention *a, int64_t start, int64_t length, int64_t row, int64_t end, int64_t head) {
    const int64_t width = a->heads * a->head, near = a->near, own = head / a->group * a->head;
    const int64_t first = row > near ? row - near : 0, last = length - end > near ? end + near : length; /* keys */
    const int64_t all = (last - first + LANES - 1) / LANES * LANES;
    const int64_t stride = all | LANES; /* odd in cache lines, so that rows do not compete for places in the cache */
    float keys[a->head * stride] ALIGNED, scores[MOST_ROWS * stride] ALIGNED;
    const float *query = a->query + start * a->query_stride + head * a->head;
    const float *value = a->value + start * a->value_stride + own;
    float *out = a->out + start * width + head * a->head;
    float scale = LOG2_E / sqrtf((float)a->head);
    transpose(a->key + (start + first) * a->key_stride + own, a->key_stride, last - first, a->head, scale, keys, all, stride);
    for (int64_t rows; row < end; row += rows) {
        rows = end - row < MOST_ROWS ? end - row : MOST_ROWS;
        int64_t from = row - near > first ? (row - near - first) / LANES * LANES + first : first;
        int64_t to = last - row - rows > near ? row + rows + near : last, lanes = (to - from + LANES - 1) / LANES * LANES;
        AT(multiply)((Product){query + row * a->query_stride, a->query_stride, keys + from - first, stride, a->head, NULL, scores,
                               stride, 0, 0}, rows, lanes);
        for (int64_t r = 0; r < rows; r++) {
            int64_t place = row + r - from; /* of the row among the keys */
            AT(soften)(scores + r * stride, place > near ? place - near : 0, to - from - place > near ? place + near + 1 : to - from,
                       lanes);
        }
        AT(multiply)((Product){scores, stride, value + from * a->value_stride, a->value_stride, to - from, NULL,
                               out + row * width, width, 0, 0}, rows, a->head);
    }
}

static void AT(attend)(const void *given, int64_t next, int64_t end) {
    const Attention *a = given;
    for (; next < end; next++) {
        int64_t text = next / a->heads, start = a->starts[text], length = a->starts[text + 1] - start;
        int64_t reads = a->reads && a->reads[text] < length ? a->reads[text] : length;
        int64_t piece = a->near < length ? PIECE : reads;
        for (int64_t row = 0; row < reads; row += piece)
            AT(attend_rows)(a, start, length, row, reads - row > piece ? row + piece : reads, next % a->heads);
    }
}
#endif

static void AT(map_rows)(const Maps *maps, int64_t slot, int64_t row, int64_t count) {
    NUMBER inner[MOST_MAPPED * MOST_RANK], *out = maps->out;
    const NUMBER *x = maps->x, *weight = maps->up, *bias = maps->up_bias;
    Product up = {
        x + row * maps->x_stride, maps->x_stride, weight + slot * maps->rank * maps->outputs, maps->outputs, maps->rank,
        bias ? bias + slot * maps->outputs : NULL, out + row * maps->out_stride, maps->out_stride, (int)maps->adds, 0
    };
    if ((weight = maps->down)) {
        bias = maps->down_bias;
        Product down = {
            up.x, up.x_stride, weight + slot * maps->inputs * maps->rank, maps->rank, maps->inputs,
            bias ? bias + slot * maps->rank : NULL, inner, maps->rank, 0, (int)maps->relu
        };
        AT(multiply)(down, count, maps->rank);
        up.x = inner;
        up.x_stride = maps->rank;
    }
    AT(multiply)(up, count, maps->outputs);
}

/* Pieces of runs, which are numbered through all runs. */
static void AT(map_pieces)(const void *given, int64_t next, int64_t end) {
    const Maps *maps = given;
    for (int64_t run = 0, before = 0, pieces; before < end; run++, before += pieces) {
        int64_t first = maps->starts[run], rows = maps->starts[run + 1] - first;
        pieces = pieces_of(maps, run);
        for (; next < before + pieces && next < end; next++) {
            int64_t row = (next - before) * rows / pieces;
            AT(map_rows)(maps, maps->slots[run], first + row, (next - before + 1) * rows / pieces - row);
        }
    }
}
#undef NUMBER
#undef SUMS
#undef INPUTS
#undef Product
#endif
